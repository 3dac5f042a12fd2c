"""Text to prompt ids and back, with ids worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from toy import ASSISTANT, BOS, BOS_TEMPLATE, EOS, PLAIN_TEMPLATE, USER, ids_of, save_toy_tokenizer

from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.errors import CheckpointError

QUESTION = [Message("user", "2+3?")]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, BOS_TEMPLATE, None])
def test_n1_a_prompt_starts_with_exactly_one_bos_if_the_model_has_one(tmp_path, adds_bos, template):
    tokenizer = ChatTokenizer(save_toy_tokenizer(tmp_path, adds_bos=adds_bos, template=template))
    ids = tokenizer.encode_prompt(QUESTION)
    has_bos = adds_bos or template == BOS_TEMPLATE
    turn = ids_of("2+3?") if template is None else [USER, *ids_of("2+3?"), ASSISTANT]
    assert ids.tolist() == ([BOS] if has_bos else []) + turn
    assert ids.dtype == np.int32


def test_messages_come_in_order_and_a_base_model_gets_them_line_by_line(tmp_path):
    messages = [Message("system", "Add."), Message("user", "1+1")]
    chat = ChatTokenizer(save_toy_tokenizer(tmp_path / "chat"))
    assert chat.render(messages) == "<user>Add.<user>1+1<assistant>"
    base = ChatTokenizer(save_toy_tokenizer(tmp_path / "base", template=None))
    assert base.encode_prompt(messages).tolist() == ids_of("Add.\n1+1")


def test_decoding_leaves_special_tokens_out_and_nothing_else(tmp_path):
    tokenizer = ChatTokenizer(save_toy_tokenizer(tmp_path))
    ids = np.array([*ids_of(" It is 5 , no ."), EOS], np.int32)
    assert tokenizer.decode(ids) == " It is 5 , no ."


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="missing: is not a folder"):
        ChatTokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="holds no usable tokenizer"):
        ChatTokenizer(tmp_path)
