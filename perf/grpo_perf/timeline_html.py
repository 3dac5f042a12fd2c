"""The timeline as one HTML file that needs nothing else: every actor, zoom, every bar's seconds."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo_perf.timeline import LEGEND, Timeline

_LANE_PX = 28
_HEAD_PX = 8


def write_timeline(timeline: Timeline, path: Path) -> None:
    templates = Environment(
        loader=PackageLoader("grpo_perf"), autoescape=True, undefined=StrictUndefined
    )
    text = templates.get_template("timeline.html.j2").render(
        timeline=timeline, legend=LEGEND, lane_px=_LANE_PX, head_px=_HEAD_PX
    )
    path.write_text(text + "\n", encoding="utf-8")
