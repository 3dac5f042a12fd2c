"""The one place where text becomes prompt ids and completions become text.

Prompts are encoded once, through the model's chat template; engines and trainer get the same ids,
never text. Completions are decoded for graders and people, and never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_grpo.errors import CheckpointError, RolloutError
from megatron_grpo.types import Bool, Int32

# Stands for an assistant's words where only what the template writes around them is looked at.
_MARK = "\u2042sampled\u2042"


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
        eos = tokenizer.eos_token_id
        self._eos_id = None if eos is None else int(eos)
        self._adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """The text of a dialogue; with `ask`, a prompt that asks for an assistant turn.

        Without a chat template (a base model) it is the contents of the messages, one per line.
        """
        if self._tokenizer.chat_template is None:
            return "\n".join(message.content for message in messages)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
        )

    def encode_prompt(self, messages: Sequence[Message]) -> Int32:
        """Token ids [P] of `render(messages)`, with one beginning-of-sequence token if the model
        has one.
        """
        ids = self._with_bos(self._encode(self.render(messages)))
        return np.array(ids, np.int32)

    def encode_reply(self, text: str, role: Literal["user", "tool"]) -> Int32:
        """Token ids [M] that continue a dialogue after a sampled turn: what the template writes
        between the policy's stop token and its next turn, with `text` spoken by `role`.

        What was sampled is neither needed nor encoded again: the ids are those of the end of a
        dialogue whose turn is a mark.

        Raises:
            RolloutError: the template leaves no trace of the mark or the text.
        """
        before = [Message("user", "."), Message("assistant", _MARK)]
        rendered = self.render([*before, Message(role, text)])
        _, found, after = rendered.rpartition(_MARK)
        if not found or text.strip() not in after:
            raise RolloutError(
                "chat template",
                f"writes no {role} turn after an assistant's",
                remedy="set task.reply_role to user, or give the model another template",
            )
        ids = self._encode(after)
        if self._tokenizer.chat_template is None:
            ids = self._encode(f"\n{text}\n")
        # The policy sampled the end of its turn itself.
        return np.array(ids[1:] if ids[:1] == [self._turn_end] else ids, np.int32)

    def encode_dialogue(
        self, messages: Sequence[Message], *, last_only: bool = False
    ) -> tuple[Int32, Bool]:
        """Token ids [L] of a dialogue up to its last assistant turn, and which of them the
        assistant wrote, [L]: its words and the token that ends its turn. With `last_only`, those of
        the last assistant turn alone.

        Each turn is encoded behind the very prompt that would have asked for it. Where the template
        ends no turn, the end-of-sequence token is added to the last one.

        Raises:
            RolloutError: no assistant turn, one with nothing before it, or a template that rewrites
                earlier turns.
        """
        ids: list[int] = []
        mask: list[bool] = []
        written = ""
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns or turns[0] == 0:
            raise RolloutError(
                "dialogue",
                "needs an assistant turn, with something before it",
                found=[message.role for message in messages],
                remedy="leave the row out",
            )
        for turn in turns:
            asked = self.render(messages[:turn])
            answered = self.render(messages[: turn + 1], ask=False)
            if not (asked.startswith(written) and answered.startswith(asked)):
                raise RolloutError(
                    "dialogue",
                    "the chat template writes earlier turns differently once there are later ones",
                    found=f"turn {turn}",
                    remedy="give dialogues of one assistant turn each, or a template that does not",
                )
            question = self._encode(asked[len(written) :])
            ids += question if ids else self._with_bos(question)
            mask += [False] * (len(ids) - len(mask))
            answer, trained = self._end_turn(answered[len(asked) :], last=turn == turns[-1])
            ids += answer
            mask += trained if turn == turns[-1] or not last_only else [False] * len(answer)
            written = answered
        return np.array(ids, np.int32), np.array(mask, np.bool_)

    @cached_property
    def _turn_end(self) -> int | None:
        """The token with which the template ends an assistant's turn: the first special one behind
        its words. Many models have another end of sequence (<|eot_id|>, <end_of_turn>). None where
        the template ends no turn, or there is none.
        """
        if self._tokenizer.chat_template is None:
            return None
        turns = [Message("user", "."), Message("assistant", _MARK)]
        after = self.render(turns, ask=False).rpartition(_MARK)[2]
        added = self._tokenizer.added_tokens_decoder.items()
        special = {token for token, entry in added if entry.special}
        special |= {int(token) for token in self._tokenizer.all_special_ids}
        return next((token for token in self._encode(after) if token in special), None)

    def _end_turn(self, text: str, *, last: bool) -> tuple[list[int], list[bool]]:
        """Ids of an assistant turn; trained up to the token that ends it, not what follows."""
        ids = self._encode(text)
        if self._turn_end in ids:
            end = len(ids) - ids[::-1].index(self._turn_end)
            return ids, [i < end for i in range(len(ids))]
        if last and self._eos_id is not None and self._eos_id not in ids[-1:]:
            ids = [*ids, self._eos_id]
        return ids, [True] * len(ids)

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False)
        return [int(token) for token in encoded["input_ids"]]

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos_id is None:
            return ids
        written = 0
        while written < len(ids) and ids[written] == self._bos_id:
            written += 1
        return [self._bos_id, *ids[written:]] if written or self._adds_bos else ids

    def decode(self, token_ids: Int32) -> str:
        """Text of sampled ids, special tokens left out."""
        text = self._tokenizer.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return str(text)
