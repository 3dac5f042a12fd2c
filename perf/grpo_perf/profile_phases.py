"""Which span belongs to which phase of a step, and when a phase was worked on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from grpo_perf.intervals import Intervals, clip, difference, union
from grpo_perf.profile_run import Measured
from megatron_grpo.spans import Span

# What an actor does, by the name of its span; in the order of the tables.
RANK_PHASES = {
    "logprobs": "score",
    "reference_logprobs": "reference",
    "forward_backward": "train",
    "optimizer_step": "optimizer",
    "push_weights": "push",
    "begin_save": "checkpoint",
    "finish_save": "checkpoint",
}
ENGINE_PHASES = {"generate": "generate", "pull_weights": "push"}
# The training thread's phases, under the names of what the actors do meanwhile.
LOOP_PHASES = {
    "generate": "generate",
    "reference": "reference",
    "make_batch": "make batch",
    "forward_backward": "train",
    "optimizer": "optimizer",
    "push_weights": "push",
    "store": "store rollouts",
    "checkpoint": "checkpoint",
}


def loop_phase(span: str) -> str:
    """Of a span of the training thread; one this table does not know keeps its name."""
    return LOOP_PHASES.get(span, span.replace("_", " "))


def within(spans: Sequence[Span], names: Sequence[str], window: tuple[float, float]) -> Intervals:
    return clip(((s.start_s, s.end_s) for s in spans if s.name in names), window)


def activity(measured: Measured) -> dict[str, Intervals]:
    """When at least one actor worked on a phase."""
    window = measured.window_s
    found: dict[str, Intervals] = {}
    sources = [(RANK_PHASES, spans) for spans in measured.ranks.values()]
    sources += [(ENGINE_PHASES, working(spans)) for spans in measured.engines.values()]
    own = {"make_batch": "make batch", "store": "store rollouts"}
    sources += [(own, measured.loop), ({"grade": "grade"}, measured.grading)]
    for names, spans in sources:
        for span, phase in names.items():
            found[phase] = union([*found.get(phase, []), *within(spans, (span,), window)])
    return {phase: intervals for phase, intervals in found.items() if intervals}


def between_calls(engine: Sequence[Span]) -> Intervals:
    """When an engine had requests and was not asked to go on: the driver handled what had finished,
    or the call was on its way. Weight pulls are left out.
    """
    calls = sorted((s for s in engine if s.name == "generate"), key=lambda span: span.start_s)
    gaps = [
        (one.end_s, two.start_s)
        for one, two in itertools.pairwise(calls)
        if one.attrs.get("left", 0) > 0
    ]
    pulls = union((s.start_s, s.end_s) for s in engine if s.name == "pull_weights")
    return difference(union(gaps), pulls)


def working(engine: Sequence[Span]) -> list[Span]:
    """An engine's spans without the calls that found nothing to do."""
    return [s for s in engine if s.name != "generate" or s.attrs.get("steps", 0) > 0]
