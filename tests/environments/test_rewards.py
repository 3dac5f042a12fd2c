"""Reward functions: the shipped one case by case, and what happens to those that break their
contract.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_grpo.environments.rewards import grade, last_number, load_reward
from megatron_grpo.errors import RewardError
from megatron_grpo.types import Prompt

PROMPT = Prompt("sums/7", np.array([1], np.int32), "?", answer="5")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        # One number in different dress.
        ("5", "5", 1),
        ("The answer is 5.", "5", 1),
        ("It is 5.0", "5", 1),
        ("+5", "5", 1),
        ("5", "5.0", 1),
        ("5", "+5", 1),
        ("05", "5", 1),
        ("**5**", "5", 1),
        (r"\boxed{5}", "5", 1),
        ("0.50", ".5", 1),
        ("it is .5", "0.5", 1),
        ("0", "-0", 1),
        # The sign counts.
        ("-3", "-3", 1),
        ("3", "-3", 0),
        ("-3", "3", 0),
        ("\u22123", "-3", 1),
        ("= -3", "-3", 1),
        # A minus between two terms is no sign.
        ("8-3", "3", 1),
        ("8 - 3", "3", 1),
        ("(1)-3", "3", 1),
        ("x-3", "3", 1),
        # The last number counts, and only that one.
        ("2 + 3 = 5", "5", 1),
        ("5 is what 2 + 3 gives", "5", 0),
        ("5, no, 6", "5", 0),
        ("5, no, 6", "6", 1),
        ("15", "5", 0),
        ("5.5", "5", 0),
        ("1/2", "2", 1),
        # Thousands.
        ("1,234", "1234", 1),
        ("1,234,567.5", "1234567.5", 1),
        ("1234", "1,234", 1),
        ("1,2", "2", 1),
        ("1,2345", "2345", 1),
        ("1234,567", "567", 1),
        ("So 12,", "12", 1),
        # Nothing to find.
        ("", "5", 0),
        ("None", "5", 0),
        (r"\boxed{None}", "5", 0),
        (r"\boxed{}", "5", 0),
        ("five", "5", 0),
        ("\u0665", "5", 0),
    ],
)
def test_f4_the_last_number_equals_the_answer_or_not(response, answer, reward):
    value = last_number(response, answer, "{}")
    assert value == reward
    assert type(value) is float


@pytest.mark.parametrize("answer", ["", "???", "None", "1 2", "a5", "5 apples"])
def test_f4_an_answer_that_is_not_a_number_rewards_nobody(answer):
    with pytest.raises(RewardError, match="raised ValueError on prompt sums/7") as caught:
        grade(last_number, "last_number", Prompt("sums/7", PROMPT.token_ids, "?", answer), answer)
    assert repr(answer) in str(caught.value)


def test_a_hundred_thousand_digits_are_graded_at_once():
    digits = "9" * 100_000
    assert last_number(digits, "5", "{}") == 0.0
    assert last_number(digits, digits, "{}") == 1.0
    assert last_number("1," * 100_000 + "5", "5", "{}") == 1.0


def test_f4_a_reward_of_zero_stays_zero_and_numbers_become_floats():
    assert grade(lambda r, a, m: 0.0, "f", PROMPT, "x").value == 0.0
    for value in (1, True, np.float32(1.0), np.int64(1)):
        graded = grade(lambda r, a, m, value=value: value, "f", PROMPT, "x").value
        assert graded == 1.0 and type(graded) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1.0]])
def test_f4_anything_but_a_finite_number_is_an_error_that_shows_it(value):
    with pytest.raises(RewardError) as caught:
        grade(lambda r, a, m: value, "mine:score", PROMPT, "x")
    shown = "'None'" if value is None else repr(value)
    assert str(caught.value) == (
        f"reward mine:score: returned no finite number on prompt sums/7 (found {shown}); "
        "return a float"
    )


def test_a_reward_function_that_raises_is_named_with_its_prompt_and_cause():
    def score(response: str, answer: str, metadata: str) -> float:
        return 1 / 0

    with pytest.raises(RewardError, match="mine:score: raised ZeroDivisionError on prompt") as e:
        grade(score, "mine:score", PROMPT, "x")
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_the_function_gets_response_answer_and_metadata():
    seen = []
    prompt = Prompt("p/0", PROMPT.token_ids, "?", answer="gold", metadata='{"a": 1}')
    grade(lambda *arguments: seen.append(arguments) or 1.0, "f", prompt, "text")
    assert seen == [("text", "gold", '{"a": 1}')]


def test_a_reward_is_loaded_by_its_import_path():
    path = "megatron_grpo.environments.rewards:last_number"
    assert load_reward(path) is last_number


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("last_number", "is not an import path"),
        (":f", "is not an import path"),
        ("module:", "is not an import path"),
        ("no_such_module_here:f", "importing no_such_module_here failed: ModuleNotFoundError"),
        ("broken_reward:f", "importing broken_reward failed: ZeroDivisionError"),
        ("math:no_such_function", "math has no function of that name"),
        ("math:pi", "math has no function of that name"),
        ("os.path:basename", "cannot be called with (response, answer, metadata)"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why_in_one_line(tmp_path, monkeypatch, path, problem):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError) as caught:
        load_reward(path)
    assert problem in str(caught.value) and path in str(caught.value)
    assert "\n" not in str(caught.value)
