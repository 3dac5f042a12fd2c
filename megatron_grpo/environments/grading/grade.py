"""One grading, start to end: `judge` is what a worker runs for every response."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_grpo.environments.grading.clean import clean, plain_words
from megatron_grpo.environments.grading.compare import Mathematics, same
from megatron_grpo.environments.grading.extract import extract
from megatron_grpo.environments.grading.structure import TooDeep, parse

LONGEST_RESPONSE = 1_000_000
LONGEST_ANSWER = 2_000
_NOTHING = frozenset(("none", "null", "nan", "undefined", "n/a", "na", "?", "unknown"))

Reason = Literal[
    "correct",
    "wrong",
    "no answer",
    "unclosed box",
    "unfinished thinking",
    "too long",
    "nested too deeply",
    "unusable gold",
    "timeout",
    "memory",
    "crash",
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """1.0 or 0.0, why, and what was taken for the answer."""

    reward: float
    reason: Reason
    extracted: str = ""


def gold_text(answer: str) -> str:
    """What a data set's answer field says: of a worked solution, the box or what follows ####.

    >>> gold_text("It is 3 * 24 = 72.\\n#### 72"), gold_text("$\\\\boxed{5}$"), gold_text("7")
    ('72', '5', '7')
    """
    if "####" in answer or re.search(r"\\(?:boxed|fbox)", answer):
        found = extract(answer)
        return found.text
    return answer.strip()


def usable(answer: str) -> bool:
    """Whether a gold answer says anything: not empty, not "???", not None."""
    text = gold_text(answer)
    if len(text) > LONGEST_ANSWER or not re.search(r"[\w\u221e\u2205]", text):
        return False
    return _is_something(clean(text))


def judge(response: str, answer: str, mathematics: Mathematics) -> Judgement:
    """Grade one response.

    Args:
        mathematics: compares two expressions; False for what it cannot read.
    """
    if not usable(answer):
        return Judgement(0.0, "unusable gold")
    if len(response) > LONGEST_RESPONSE:
        return Judgement(0.0, "too long")
    found = extract(response)
    if found.problem == "unclosed box":
        return Judgement(0.0, "unclosed box")
    if found.problem == "unfinished thinking":
        return Judgement(0.0, "unfinished thinking")
    if len(found.text) > LONGEST_ANSWER:
        return Judgement(0.0, "too long", found.text[:100])
    cleaned = clean(found.text)
    if not _is_something(cleaned):
        return Judgement(0.0, "no answer", found.text)
    try:
        right = same(parse(clean(gold_text(answer))), parse(cleaned), mathematics)
    except TooDeep:
        return Judgement(0.0, "nested too deeply", found.text)
    return Judgement(float(right), "correct" if right else "wrong", found.text)


def _is_something(cleaned: str) -> bool:
    """Whether a cleaned answer says anything at all."""
    words = plain_words(cleaned).casefold().strip(" .()[]{}")
    return words not in _NOTHING and re.search(r"[\w\\]", words) is not None
