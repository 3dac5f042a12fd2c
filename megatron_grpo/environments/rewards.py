"""Reward functions by import path, and the ones that come with the project.

A reward function is `(response: str, answer: str, metadata: str) -> float`: the text the policy
wrote (all its turns, joined by newlines), the gold answer, and the prompt's metadata as a JSON
object. It returns a finite number and must not raise for anything a model could write. For a gold
answer that it cannot use it raises
ValueError: it is called once per row with an empty response when the data is loaded, so that is
    found then.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import re
from collections.abc import Callable
from decimal import Decimal
from typing import cast

from megatron_grpo.errors import RewardError
from megatron_grpo.types import Prompt, Reward

RewardFunction = Callable[[str, str, str], float]

# A comma groups thousands only where every group has three digits. A sign belongs to a number
# unless it follows a digit, a word or a closing bracket, where it is an operator: "8-3" holds 8 and
# 3.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)


def load_reward(path: str) -> RewardFunction:
    """Import `module:function`.

    Raises:
        RewardError: not of that form, not importable, or not callable with (response, answer,
            metadata).
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise RewardError(
            "reward", "is not an import path", found=path, remedy="write module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RewardError(
            f"reward {path}",
            f"importing {module_name} failed: {type(error).__name__}: {error}",
            remedy="check the spelling, and PYTHONPATH",
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise RewardError(
            f"reward {path}",
            f"{module_name} has no function of that name",
            found=name,
            remedy="check the spelling",
        )
    try:
        inspect.signature(function).bind("response", "answer", "{}")
    except TypeError as error:
        raise RewardError(
            f"reward {path}",
            f"cannot be called with (response, answer, metadata): {error}",
            remedy="take three positional arguments, all text",
        ) from error
    return cast(RewardFunction, function)


def grade(function: RewardFunction, name: str, prompt: Prompt, response: str) -> Reward:
    """Call a reward function and hold it to its contract.

    Raises:
        RewardError: it raised, or returned something other than a finite number. Both are faults of
            the function, not of the response, and a run that went on would train on noise.
    """
    try:
        value = function(response, prompt.answer, prompt.metadata)
    except Exception as error:
        raise RewardError(
            f"reward {name}",
            f"raised {type(error).__name__} on prompt {prompt.prompt_id}: {error}",
            remedy="return 0.0 for what it cannot grade; drop rows whose answer it cannot use",
        ) from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            f"reward {name}",
            f"returned no finite number on prompt {prompt.prompt_id}",
            found=value if value is not None else "None",
            remedy="return a float",
        )
    return Reward(float(value))


def last_number(response: str, answer: str, metadata: str) -> float:
    """1.0 if the last number written in `response` equals `answer`, else 0.0.

    Numbers are compared by exact value: "5", "+5", "5.0" and "5." are one number, "1,234" is 1234,
    "-3" is not 3. Exponents, fractions and percent signs are not interpreted: "1/2" holds the
    numbers 1 and 2. The rule is deliberately about the last number: one that a response corrects
    earlier does not count.

    >>> last_number("2 + 3 is 5.", "5", "{}"), last_number("5, no, 6", "5", "{}")
    (1.0, 0.0)

    Raises:
        ValueError: `answer` is not one number, so nothing could ever be right.
    """
    gold = _NUMBER.fullmatch(answer.strip())
    if gold is None:
        raise ValueError(f"the answer {answer!r} is not a number")
    written = _NUMBER.findall(response)
    return 1.0 if written and _value(written[-1]) == _value(gold.group()) else 0.0


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
