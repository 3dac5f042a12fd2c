"""The timeline as a picture (matplotlib)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from grpo_perf.timeline import LEGEND, Timeline

# More rows than a page can hold are left to the HTML version.
MOST_LANES = 40


def draw_timeline(timeline: Timeline, path: Path) -> None:
    lanes = timeline.lanes[:MOST_LANES]
    hidden = len(timeline.lanes) - len(lanes)
    figure = Figure(figsize=(13, 2.2 + 0.42 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        axes.axhspan(row - 0.5, row + 0.5, color="black" if row % 2 else "white", alpha=0.03, lw=0)
        for bar in lane.bars:
            axes.broken_barh(
                [(bar.start_s, bar.end_s - bar.start_s)],
                (row - 0.38, 0.76),
                facecolors=timeline.colour(bar.phase),
                edgecolors=timeline.colour(bar.phase),
                linewidth=0.3,  # so that the shortest can be seen
            )
    for number, end in enumerate(timeline.step_ends_s):
        axes.axvline(end, color="black", lw=0.8, ls=(0, (4, 3)))
        if number:
            middle = (timeline.step_ends_s[number - 1] + end) / 2
            axes.text(middle, -0.62, f"step {number}", ha="center", va="bottom", fontsize=10)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -1.05)
    axes.set_xlim(0, timeline.seconds)
    axes.set_xlabel("seconds since the end of the warm-up step")
    title = timeline.title + (f" ({hidden} more actors in timeline.html)" if hidden else "")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        Patch(color=timeline.colour(phase), label=LEGEND.get(phase, phase))
        for phase in timeline.phases
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)
