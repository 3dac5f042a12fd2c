"""What a run on data came to: summary.json for machines, a short table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_grpo.config import RunConfig
from megatron_grpo.train.heldout import HeldoutLoss
from megatron_grpo.train.records import TRAINING_PHASES, StepRecord, rate


@dataclass(frozen=True, slots=True)
class DataSummary:
    """Written to summary.json. `heldout_*` are statistics of the same rows before and after."""

    name: str
    algorithm: str
    policy_backend: str
    layout: str
    policy_dtype: str
    seed: int
    steps: int
    rows: int
    rows_left_out: Mapping[str, int]
    heldout_rows: int
    heldout_loss_before: float
    heldout_loss_after: float
    heldout_before: Mapping[str, float]
    heldout_after: Mapping[str, float]
    trained_tokens: int
    trained_tokens_per_s: float
    wall_s: float
    seconds: Mapping[str, float]


def summarize_data(
    config: RunConfig,
    layout: str,
    dtype: str,
    rows: int,
    left_out: Mapping[str, int],
    records: Sequence[StepRecord],
    evaluations: Sequence[HeldoutLoss],
    wall_s: float,
    rest: Mapping[str, float],
) -> DataSummary:
    """Combine the records of a finished run.

    Args:
        rows: for training.
        left_out: reason -> rows that are not used.
        rest: seconds of phases outside the steps.
    """
    seconds: dict[str, float] = {}
    for part in [record.seconds for record in records] + [rest]:
        for phase, spent in part.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    trained = sum(record.trained_tokens for record in records)
    before, after = evaluations[0], evaluations[-1]
    return DataSummary(
        name=config.name,
        algorithm=config.algorithm.type,
        policy_backend=config.policy.type,
        layout=layout,
        policy_dtype=dtype,
        seed=config.seed,
        steps=len(records),
        rows=rows,
        rows_left_out=left_out,
        heldout_rows=after.rows,
        heldout_loss_before=before.loss,
        heldout_loss_after=after.loss,
        heldout_before=before.means,
        heldout_after=after.means,
        trained_tokens=trained,
        trained_tokens_per_s=rate(trained, seconds, TRAINING_PHASES),
        wall_s=wall_s,
        seconds={phase: round(spent, 3) for phase, spent in seconds.items()},
    )


def said_left_out(left_out: Mapping[str, int]) -> str:
    """
    >>> said_left_out({"too long": 2})
    ', left out: 2 too long'
    """
    if not left_out:
        return ""
    return ", left out: " + ", ".join(f"{count} {reason}" for reason, count in left_out.items())


def write_data_summary(summary: DataSummary, path: Path) -> None:
    path.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def print_data_summary(summary: DataSummary, console: Console, folder: Path) -> None:
    table = Table(
        title=f"{summary.name}: {summary.steps} steps, {summary.layout}", title_style="bold"
    )
    for heading in (f"{summary.heldout_rows} held-out rows", "before", "after"):
        table.add_column(heading, justify="left" if not table.columns else "right")
    rows = {"loss": (summary.heldout_loss_before, summary.heldout_loss_after)}
    rows |= {n: (v, summary.heldout_after[n]) for n, v in summary.heldout_before.items()}
    for name, (before, after) in rows.items():
        table.add_row(name.replace("_", " "), f"{before:.4f}", f"[bold]{after:.4f}[/bold]")
    console.print(table)
    console.print(
        f"trained {summary.trained_tokens_per_s:.0f} tokens/s; {summary.wall_s:.0f} s in all; "
        f"{summary.rows} training rows{said_left_out(summary.rows_left_out)}"
    )
    console.print(f"everything is in [bold]{folder}[/bold]")
