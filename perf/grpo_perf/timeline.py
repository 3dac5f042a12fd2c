"""What every actor did when, as rows of coloured bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_perf.intervals import clip
from grpo_perf.profile_phases import ENGINE_PHASES, RANK_PHASES, loop_phase, working
from grpo_perf.profile_run import Measured
from megatron_grpo.spans import Span

# Okabe and Ito's palette (2008), told apart by colour-blind readers too; waiting is pale.
COLOURS = {
    "wait for rollouts": "#b3d1e6",
    "generate": "#0072b2",
    "grade": "#000000",
    "reference": "#cc79a7",
    "score": "#cc79a7",
    "make batch": "#7f7f7f",
    "train": "#f3cf9c",
    "forward": "#009e73",
    "backward": "#d55e00",
    "optimizer": "#f0e442",
    "push": "#56b4e9",
    "store rollouts": "#b8860b",
    "checkpoint": "#8c564b",
}
LEGEND = {"train": "train (ranks: waiting)"}
# The training thread waits while engines generate, or goes on because they are ahead of it.
_WAIT = {"generate": "wait for rollouts"}
OTHER = "#c7c7c7"


@dataclass(frozen=True, slots=True)
class Bar:
    """Seconds from the start of the window."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One actor. Later bars lie on top of earlier ones."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    title: str
    seconds: float
    step_ends_s: tuple[float, ...]
    lanes: tuple[Lane, ...]

    @property
    def phases(self) -> list[str]:
        """That occur, in the legend's order."""
        seen = {bar.phase for lane in self.lanes for bar in lane.bars}
        return [phase for phase in COLOURS if phase in seen] + sorted(seen - set(COLOURS))

    def colour(self, phase: str) -> str:
        return COLOURS.get(phase, OTHER)


def make_timeline(measured: Measured) -> Timeline:
    start, end = measured.window_s
    inside = {"forward": "forward", "backward": "backward"}
    loop = {span.name: loop_phase(span.name) for span in measured.loop} | _WAIT
    lanes = [_lane("training loop", measured.loop, [loop], measured)]
    if measured.grading:
        lanes.append(_lane("grading", measured.grading, [{"grade": "grade"}], measured))
    for name, spans in measured.ranks.items():
        lanes.append(_lane(name, spans, [RANK_PHASES, inside], measured))
    for name, spans in measured.engines.items():
        lanes.append(_lane(name, working(spans), [ENGINE_PHASES], measured))
    return Timeline(
        title=f"{measured.config.name}: {measured.steps} steps, {end - start:.1f} s",
        seconds=end - start,
        step_ends_s=tuple(when - start for when in measured.step_ends_s),
        lanes=tuple(lanes),
    )


def _lane(
    name: str, spans: Sequence[Span], layers: Sequence[dict[str, str]], measured: Measured
) -> Lane:
    window = measured.window_s
    bars = []
    for names in layers:
        for span in spans:
            if span.name in names:
                bars += [
                    Bar(names[span.name], start - window[0], end - window[0])
                    for start, end in clip([(span.start_s, span.end_s)], window)
                ]
    return Lane(name, tuple(bars))
