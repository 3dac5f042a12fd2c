"""The speeds of a measured run, as the simulator takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_perf.intervals import clip, length
from grpo_perf.profile_phases import between_calls, within, working
from grpo_perf.profile_run import Measured


@dataclass(frozen=True, slots=True)
class Rates:
    """What the simulator needs to play this run, or another like it.

    Attributes:
        policy_s: of the training thread per step, waiting for rollouts and the push left out.
        grade_s: of one call of the environment.
        decode_step_s, decode_sequence_s: an engine step takes the first plus the second times its
            sequences, fitted to the engines' spans.
        policy_idle: share of the time the training thread waited for rollouts.
        engine_idle: share of the time engines had no request, or pulled weights.
    """

    policy_s: float
    push_s: float
    grade_s: float
    decode_step_s: float
    decode_sequence_s: float
    policy_idle: float
    engine_idle: float


def measure_rates(measured: Measured, accounted: Mapping[str, float], step_s: float) -> Rates:
    window = measured.window_s
    waited, push = accounted["generate"] + accounted.get("drain", 0.0), accounted["push"]
    grading = [s for s in measured.grading if window[0] <= s.start_s <= window[1]]
    decoding = [
        span
        for spans in measured.engines.values()
        for span in working(spans)
        if span.name == "generate" and window[0] <= span.start_s <= window[1]
    ]
    gaps = busy = 0.0
    for spans in measured.engines.values():
        mine = length(clip(between_calls(spans), window))
        gaps += mine
        busy += length(within(working(spans), ("generate",), window)) + mine
    # A simulated engine goes on as long as it has requests: what passes between two calls is spread
    # over the steps.
    stretch = busy / (busy - gaps) if busy > gaps else 1.0
    per_step, per_sequence = fit_decode(
        [(s.attrs["steps"], s.attrs["sequences"], s.seconds * stretch) for s in decoding]
    )
    return Rates(
        policy_s=step_s - waited - push,
        push_s=push,
        grade_s=sum(s.seconds for s in grading) / len(grading) if grading else 0.0,
        decode_step_s=per_step,
        decode_sequence_s=per_sequence,
        policy_idle=waited / step_s,
        engine_idle=1 - busy / (len(measured.engines) * (window[1] - window[0])),
    )


def fit_decode(spans: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(seconds per step, seconds per sequence of a step), neither negative, by least squares over
    (steps, sequences of all of them, seconds).

    >>> fit_decode([(2, 4, 10.0), (1, 10, 13.0)])
    (3.0, 1.0)
    """
    xx = sum(x * x for x, _, _ in spans)
    yy = sum(y * y for _, y, _ in spans)
    xy = sum(x * y for x, y, _ in spans)
    xs = sum(x * s for x, _, s in spans)
    ys = sum(y * s for _, y, s in spans)
    rank = xx * yy - xy * xy
    if rank > 1e-6 * xx * yy:
        step, sequence = (xs * yy - ys * xy) / rank, (ys * xx - xs * xy) / rank
        if step >= 0 and sequence >= 0:
            return step, sequence
    # Batches of one size, or so noisy that one term came out negative: all by the sequence.
    return 0.0, ys / yy if yy else 0.0
