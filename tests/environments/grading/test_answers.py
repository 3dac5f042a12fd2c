"""The table of answers.jsonl, graded as a mathematician would; each row says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from math_verify import parse, verify

from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.environments.grading.extract import extract
from megatron_grpo.environments.grading.pool import GraderPool

ROWS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").open()]


def test_every_answer_of_the_table_is_graded_as_a_mathematician_would(capsys):
    with GraderPool(GradingConfig(workers=2)) as pool:
        verdicts = pool.grade([(row["response"], row["answer"]) for row in ROWS])
    wrong = [
        f"{row['response']!r} for {row['answer']!r}: {verdict.reason} ({row['why']})"
        for row, verdict in zip(ROWS, verdicts)
        if verdict.reward != row["reward"]
    ]
    plain = sum(_plain(row["response"], row["answer"]) == row["reward"] for row in ROWS)
    with capsys.disabled():
        print(f"\ngraded right of {len(ROWS)}: ours {len(ROWS) - len(wrong)}, math-verify {plain}")
    assert not wrong, "\n".join(wrong)
    assert len(ROWS) >= 150 and plain < len(ROWS)


def _plain(response: str, answer: str) -> float:
    """math-verify as its own documentation uses it."""
    return float(verify(parse(f"${answer}$"), parse(response)))


@pytest.mark.parametrize(
    ("response", "text", "problem"),
    [
        ("\\boxed{5} no, \\boxed{7}", "7", ""),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}", ""),
        ("\\boxed{\\text{\\}}}", "\\text{\\}}", ""),
        ("\\boxed{12", "", "unclosed box"),
        ("\\fbox{3}", "3", ""),
        ("The answer is 5.", "5", ""),
        ("<think>\\boxed{5}</think> So we are done now.", "", "no answer"),
        ("<think>\\boxed{5}", "", "unfinished thinking"),
    ],
)
def test_f3_the_rule_which_box_counts(response, text, problem):
    found = extract(response)
    assert (found.text, found.problem) == (text, problem)
