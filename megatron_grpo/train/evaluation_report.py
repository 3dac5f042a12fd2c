"""What an evaluation came to: metrics, a JSON file with every problem, tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.evaluation_scores import Estimate, Problem, score_problems
from megatron_grpo.train.metrics import MetricsLog

_SHOWN_PROBLEMS = 40


def report_evaluation(
    result: Evaluation,
    problems: Sequence[Problem],
    metrics: MetricsLog,
    console: Console,
    folder: Path,
) -> None:
    """During training: metrics.jsonl, evaluations/step_N.json and one line."""
    metrics.log(result.version, result.metrics())
    write_evaluation(result, problems, folder / "evaluations" / f"step_{result.version}.json")
    console.print(
        f"held-out accuracy after {result.version} steps: [bold]{result.accuracy:.3f}[/bold] "
        f"± {result.standard_error:.3f} ({result.problems} problems x {result.samples} samples)"
    )


def write_evaluation(result: Evaluation, problems: Sequence[Problem], path: Path) -> None:
    """Everything, with every sample of every problem, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    accuracy = Estimate(result.accuracy, result.standard_error)
    content = {
        "version": result.version,
        "problems": result.problems,
        "samples": result.samples,
        "accuracy": _interval(accuracy),
        **{name: _interval(score) for name, score in score_problems(problems).items()},
        "tokens_mean": result.mean_tokens,
        "truncated_fraction": result.truncated_fraction,
        "problem_results": [asdict(problem) for problem in problems],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def print_evaluation(
    result: Evaluation, problems: Sequence[Problem], console: Console, *, title: str
) -> None:
    """Scores with their 95% intervals, then the problems."""
    scores = Table(title=title, title_style="bold")
    for column in ("", "score", "95% interval"):
        scores.add_column(column, justify="right" if column else "left")
    rows = {f"accuracy, mean of {result.samples}": Estimate(result.accuracy, result.standard_error)}
    for name, score in score_problems(problems).items():
        rows[name.replace("_at_", "@")] = score
    for name, score in rows.items():
        scores.add_row(name, f"{score.value:.4f}", f"{score.low:.3f} to {score.high:.3f}")
    console.print(scores)
    console.print(
        f"{result.problems} problems; {result.mean_tokens:.0f} tokens per answer, "
        f"{result.truncated_fraction:.1%} truncated"
    )
    console.print(_problems(problems))


def _problems(problems: Sequence[Problem]) -> Table:
    """The hardest problems first."""
    table = Table(title="problems, hardest first", title_style="bold")
    for column in ("problem", "answer", "right", "tokens", "cut off", "most frequent answer"):
        right = column in ("right", "tokens", "cut off")
        table.add_column(column, justify="right" if right else "left", overflow="ellipsis")
    ordered = sorted(problems, key=lambda problem: problem.mean_reward)
    for problem in ordered[:_SHOWN_PROBLEMS]:
        samples = problem.samples
        answers = [sample.extracted for sample in samples if sample.extracted]
        table.add_row(
            problem.prompt_id,
            problem.answer[-30:],
            f"{sum(sample.right for sample in samples)}/{len(samples)}",
            f"{sum(sample.tokens for sample in samples) / len(samples):.0f}",
            str(sum(sample.truncated for sample in samples)),
            max(answers, key=answers.count)[:30] if answers else "",
        )
    if len(problems) > _SHOWN_PROBLEMS:
        table.caption = f"and {len(problems) - _SHOWN_PROBLEMS} more in the file"
    return table


def _interval(score: Estimate) -> dict[str, float]:
    return {
        "value": score.value,
        "standard_error": score.standard_error,
        "low": score.low,
        "high": score.high,
    }
