"""A profile as tables in the terminal and as profile.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_perf.microbenchmark import Speeds
from grpo_perf.profile_report import ActorRow, Report


def write_json(
    report: Report,
    predicted: Mapping[str, float],
    speeds: Mapping[str, Sequence[Speeds]],
    path: Path,
) -> None:
    """With what the micro-benchmark measured, by "ranks" and "engines"."""
    values = {**asdict(report), "mean_step_s": report.mean_step_s, "predicted_s": dict(predicted)}
    values["speeds"] = {name: [asdict(one) for one in each] for name, each in speeds.items()}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def show_report(report: Report, predicted: Mapping[str, float], console: Console) -> None:
    """Print the tables.

    Args:
        predicted: seconds per step by phase, of those that a model exists for.
    """
    _show_phases(report, predicted, console)
    _show_actors("policy ranks, seconds per step", report.ranks, console)
    if report.engines:
        _show_actors("engines, seconds per step", report.engines, console)
    _show_use(report, console)


def _show_phases(report: Report, predicted: Mapping[str, float], console: Console) -> None:
    step = report.mean_step_s
    table = Table(
        title=f"{report.name}, {report.layout}: {report.steps} steps, {step:.2f} s each",
        title_style="bold",
    )
    headings = ("phase", "s per step", "of step", "busy s", "exposed s", "overlapped s")
    for heading in (*headings, *(("predicted s", "error") if predicted else ())):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for row in report.phases:
        cells = [f"{row.loop_s:.3f}", f"{row.loop_s / step:.1%}"] if row.loop_s else ["", ""]
        cells += [f"{v:.3f}" if v else "" for v in (row.busy_s, row.exposed_s, row.overlapped_s)]
        if row.name in predicted:
            guess, seen = predicted[row.name], row.loop_s or row.busy_s
            cells += [f"{guess:.3f}", f"{guess / seen - 1:+.0%}" if seen else ""]
        table.add_row(row.name, *cells)
    rest = report.unaccounted_s
    table.add_row("not accounted for", f"{rest:.3f}", f"{rest / step:.1%}", style="dim")
    table.add_row("step", f"{step:.3f}", "100.0%", style="bold")
    console.print(table)


def _show_actors(title: str, rows: Sequence[ActorRow], console: Console) -> None:
    table = Table(title=title)
    phases = [p for p in rows[0].seconds if any(row.seconds[p] > 0 for row in rows)]
    for heading in ("", *phases, "idle", "peak memory"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        cells = [f"{row.seconds[phase]:.3f}" for phase in phases]
        memory = f"{row.peak_bytes / 2**20:,.0f} MiB"
        table.add_row(row.name, *cells, f"{row.idle_s:.3f}", memory)
    console.print(table)


def _show_use(report: Report, console: Console) -> None:
    train, generation = report.training, report.generation
    table = Table(title="use of the hardware", show_header=False)

    def peaks(shares: tuple[float, float]) -> str:
        return f"{shares[0]:.1%} of the vendor's peak, {shares[1]:.1%} of the measured one"

    rows = [
        ("operations of the model", f"{train.model_flops / 1e12:.3f} TFLOP a step"),
        ("recomputed on top", f"{train.recomputed_flops / 1e12:.3f} TFLOP a step"),
        ("saved by shared beginnings", f"{train.saved_by_sharing:.1%}"),
        ("MFU of training", peaks(train.mfu)),
        ("HFU of training", peaks(train.hfu)),
        ("MFU of the step", peaks(train.step_mfu)),
        ("pipeline bubble", f"{train.bubble:.1%} of the ranks' training time"),
        ("waiting for the slowest replica", f"{train.straggler_loss:.1%} of the same"),
        ("padding", f"{train.padding_loss:.1%} of the operations"),
    ]
    if generation is not None:
        rows += [
            (
                "generation",
                f"{generation.tokens_per_s:.0f} tokens/s in {generation.decode_steps:.0f} "
                f"engine steps of {generation.mean_batch:.0f} tokens",
            ),
            (
                "memory reads of generation",
                f"{generation.bandwidth:.1%} of the measured speed "
                f"({generation.bytes_read / 1e9:.2f} GB a step)",
            ),
            ("operations of generation", f"{generation.operations:.1%} of the measured speed"),
            ("waiting for the slowest engine", f"{generation.tail_loss:.1%} of generation"),
        ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
