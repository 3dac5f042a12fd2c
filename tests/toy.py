"""A tokenizer whose ids can be worked out by hand: one id per printable character, 5 special
tokens.

<pad> 0, <s> 1, </s> 2, <user> 3, <assistant> 4, newline 5, then the printable ASCII characters from
space (6). All ids are below the 130 of `tiny`'s vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<assistant>"]
PAD, BOS, EOS, USER, ASSISTANT = range(5)
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]

PLAIN_TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS_TEMPLATE = "<s>" + PLAIN_TEMPLATE


def ids_of(text: str) -> list[int]:
    """Ids of plain text."""
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def save_toy_tokenizer(
    folder: Path, *, adds_bos: bool = False, template: str | None = PLAIN_TEMPLATE
) -> Path:
    """Write it as a Hugging Face folder and return the folder. Without adds_bos it has no BOS at
    all.
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if adds_bos or template == BOS_TEMPLATE else None,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
