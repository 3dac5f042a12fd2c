"""Pictures of sweeps. The one module of this package that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from grpo_perf.scenario import Point


def plot_sweeps(
    sizes: Sequence[Point], splits: Sequence[Point], gpus: int, title: str, path: Path
) -> None:
    """Throughput against cluster size (with the perfect line), and against the policy's share."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    xs = [point.x for point in sizes]
    ys = [point.result.tokens_per_s for point in sizes]
    left.plot(xs, ys, "o-", label="best plan, simulated")
    if sizes:
        perfect = [ys[0] * x / xs[0] for x in xs]
        left.plot(xs, perfect, ":", color="grey", label="perfect scaling")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="GPUs, the same rollouts a step",
        ylabel="trained tokens per second",
    )
    left.set_xticks(xs, [f"{x:.0f}" for x in xs], rotation=45)
    left.minorticks_off()
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    left.grid(alpha=0.3)
    shares = [100 * point.x for point in splits]
    right.plot(shares, [point.result.tokens_per_s for point in splits], "o-", label="tokens/s")
    right.set(
        xlabel=f"share of {gpus} GPUs that trains, %",
        ylabel="trained tokens per second",
        ylim=(0, None),
    )
    idle = right.twinx()
    for label, style, values in (
        ("policy idle", "C1s--", [point.result.policy_idle for point in splits]),
        ("engines idle", "C2^--", [point.result.engine_idle for point in splits]),
    ):
        idle.plot(shares, [100 * v for v in values], style, label=label)
    idle.set(ylabel="idle, %", ylim=(0, 100))
    lines = [*right.get_lines(), *idle.get_lines()]
    labels = ["tokens/s", "policy idle", "engines idle"]
    right.legend(lines, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
