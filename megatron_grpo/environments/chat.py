"""The one place where text becomes prompt ids and completions become text.

Prompts are encoded once, through the model's chat template; engines and trainer get the same ids,
never text. Completions are decoded for graders and people, and never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_grpo.errors import CheckpointError
from megatron_grpo.types import Int32


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class ChatTokenizer:
    """A model folder's tokenizer with its chat template.

    Who writes the beginning-of-sequence token is decided here and nowhere else: a template may
    write it, a tokenizer may add it to raw text, and some do both. A prompt gets exactly one when
    either would, at its start, and none when neither would.

    Args:
        folder: a local Hugging Face model folder; nothing is fetched.

    Raises:
        CheckpointError: no tokenizer can be read from the folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(
                str(folder),
                "is not a folder",
                remedy="set model.path to a Hugging Face model folder",
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                str(folder),
                f"holds no usable tokenizer: {first}",
                remedy="copy the tokenizer files there",
            ) from error
        self._tokenizer: PreTrainedTokenizerBase = tokenizer
        bos = tokenizer.bos_token_id
        self._bos_id = None if bos is None else int(bos)
        self._adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a prompt that asks for an assistant turn.

        Without a chat template (a base model) it is the contents of the messages, one per line.
        """
        if self._tokenizer.chat_template is None:
            return "\n".join(message.content for message in messages)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        )

    def encode_prompt(self, messages: Sequence[Message]) -> Int32:
        """Token ids [P] of `render(messages)`, with one beginning-of-sequence token if the model
        has one.
        """
        encoded = self._tokenizer(self.render(messages), add_special_tokens=False)
        ids = [int(token) for token in encoded["input_ids"]]
        if self._bos_id is not None:
            written = 0
            while written < len(ids) and ids[written] == self._bos_id:
                written += 1
            if written or self._adds_bos:
                ids = [self._bos_id, *ids[written:]]
        return np.array(ids, np.int32)

    def decode(self, token_ids: Int32) -> str:
        """Text of sampled ids, special tokens left out."""
        text = self._tokenizer.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return str(text)
