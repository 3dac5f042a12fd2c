"""From the spans of a measured run to the numbers that explain it. Pure; see docs/profiling.md."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_perf.flops import training_flops, utilisation
from grpo_perf.hardware import Hardware
from grpo_perf.intervals import clip, intersection, length, union
from grpo_perf.profile_phases import (
    ENGINE_PHASES,
    LOOP_PHASES,
    RANK_PHASES,
    activity,
    between_calls,
    loop_phase,
    within,
    working,
)
from grpo_perf.profile_rates import Rates, measure_rates
from grpo_perf.profile_run import Measured
from grpo_perf.step_work import TrainingWork, generation_work, training_work
from megatron_grpo.config import MegatronPolicyConfig, RunConfig, VllmGeneratorConfig
from megatron_grpo.spans import Span

LEAST_SHOWN_S = 1e-4
BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Seconds per step of one phase.

    Attributes:
        loop_s: the training thread spent in it; these add up to the step.
        busy_s: at least one actor worked on it.
        exposed_s: of busy_s, while nothing else ran: what would be saved if it were free.
        overlapped_s: the rest of busy_s.
    """

    name: str
    loop_s: float
    busy_s: float
    exposed_s: float
    overlapped_s: float


@dataclass(frozen=True, slots=True)
class ActorRow:
    """Seconds per step of one actor.

    Attributes:
        seconds: by what it did; of a rank, "train" is split into forward, backward and waiting.
        peak_bytes: of host memory on a CPU, of the device's on a GPU.
    """

    name: str
    seconds: Mapping[str, float]
    idle_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Training:
    """Of the policy over all measured steps; shares are between 0 and 1.

    Attributes:
        model_flops, recomputed_flops: per step, shared beginnings counted once.
        saved_by_sharing: operations that sharing beginnings saved.
        padding_loss: of the operations that ran, those on padding and filler.
        bubble: of the ranks' training time, waiting for another stage.
        straggler_loss: of the training time, waiting for the slowest replica.
        mfu, hfu: of training; step_mfu: of the whole step; by (vendor's, measured) peak.
    """

    model_flops: float
    recomputed_flops: float
    saved_by_sharing: float
    padding_loss: float
    bubble: float
    straggler_loss: float
    mfu: tuple[float, float]
    hfu: tuple[float, float]
    step_mfu: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """Of the engines over all measured steps.

    Attributes:
        decode_steps: per step of the run, all engines together.
        tokens_per_s: sampled per second of generation.
        bytes_read: weights and cache, per step of the run.
        bandwidth, operations: shares of the measured memory read rate and matrix rate.
        tail_loss: of the time engines generate, waiting for the slowest engine.
    """

    decode_steps: float
    mean_batch: float
    tokens_per_s: float
    bytes_read: float
    bandwidth: float
    operations: float
    tail_loss: float


@dataclass(frozen=True, slots=True)
class Report:
    """A profile, explained. Seconds are per step."""

    name: str
    layout: str
    steps: int
    step_s: tuple[float, ...]
    phases: tuple[PhaseRow, ...]
    unaccounted_s: float
    ranks: tuple[ActorRow, ...]
    engines: tuple[ActorRow, ...]
    training: Training
    generation: Generation | None
    rates: Rates | None

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / self.steps


def make_report(measured: Measured, hardware: Hardware) -> Report:
    window, steps = measured.window_s, measured.steps
    ends = measured.step_ends_s
    accounted = {
        loop_phase(span): length(within(measured.loop, (span,), window)) / steps
        for span in dict.fromkeys(span.name for span in measured.loop)
    }
    step_s = tuple(end - start for start, end in itertools.pairwise(ends))
    ranks = [_rank_row(name, spans, measured) for name, spans in measured.ranks.items()]
    engines = [_engine_row(name, spans, measured) for name, spans in measured.engines.items()]
    return Report(
        name=measured.config.name,
        layout=policy_of(measured.config).parallel.describe(),
        steps=steps,
        step_s=step_s,
        phases=_phase_rows(measured, accounted),
        unaccounted_s=sum(step_s) / steps - sum(accounted.values()),
        ranks=tuple(ranks),
        engines=tuple(engines),
        training=_training(measured, hardware, sum(step_s)),
        generation=_generation(measured) if measured.engines else None,
        rates=measure_rates(measured, accounted, sum(step_s) / steps) if measured.engines else None,
    )


def policy_of(config: RunConfig) -> MegatronPolicyConfig:
    """The policy's section; only Megatron is profiled."""
    assert config.policy.type == "megatron"
    return config.policy


def _phase_rows(measured: Measured, accounted: Mapping[str, float]) -> tuple[PhaseRow, ...]:
    active, steps = activity(measured), measured.steps
    rows = []
    order = ["generate", "grade", "reference", "score", *LOOP_PHASES.values(), *accounted]
    for name in dict.fromkeys(order):
        loop_s = accounted.get(name, 0.0)
        mine = active.get(name, [])
        others = union(part for n, parts in active.items() if n != name for part in parts)
        busy = length(mine) / steps
        overlapped = length(intersection(mine, others)) / steps
        if loop_s >= LEAST_SHOWN_S or busy:
            rows.append(PhaseRow(name, loop_s, busy, busy - overlapped, overlapped))
    return tuple(rows)


def _rank_row(name: str, spans: list[Span], measured: Measured) -> ActorRow:
    window, steps = measured.window_s, measured.steps
    seconds = {}
    for span, phase in RANK_PHASES.items():
        mine = within(spans, (span,), window)
        if phase == "train":
            forward, backward = (
                length(intersection(within(spans, (part,), window), mine))
                for part in ("forward", "backward")
            )
            seconds["forward"], seconds["backward"] = forward, backward
            seconds["wait in train"] = length(mine) - forward - backward
        else:
            seconds[phase] = seconds.get(phase, 0.0) + length(mine)
    return _actor_row(name, seconds, spans, measured, steps)


def _engine_row(name: str, spans: list[Span], measured: Measured) -> ActorRow:
    busy = working(spans)
    seconds = {
        phase: length(within(busy, (span,), measured.window_s))
        for span, phase in ENGINE_PHASES.items()
    }
    seconds["between calls"] = length(clip(between_calls(spans), measured.window_s))
    return _actor_row(name, seconds, spans, measured, measured.steps)


def _actor_row(
    name: str, seconds: Mapping[str, float], spans: list[Span], measured: Measured, steps: int
) -> ActorRow:
    start, end = measured.window_s
    inside = [s for s in spans if s.end_s > start and s.start_s < end]
    peak = max((s.attrs.get("peak_bytes", 0.0) for s in inside), default=0.0)
    return ActorRow(
        name=name,
        seconds={phase: total / steps for phase, total in seconds.items()},
        idle_s=(end - start - sum(seconds.values())) / steps,
        peak_bytes=measured.device_bytes.get(name, peak),
    )


def _training(measured: Measured, hardware: Hardware, total_s: float) -> Training:
    config = policy_of(measured.config)
    works = [
        training_work(
            batch,
            shares_prefixes=measured.shape.keep_groups,
            equal_length=config.parallel.virtual_pipeline > 1,
        )
        for _, batch in measured.work
    ]
    needed, whole, computed = (_forward_flops(works, which, measured) for which in range(3))
    flops = training_flops(needed, config.recompute, fused_head=True)
    train_s = length(within(measured.loop, ("forward_backward",), measured.window_s))
    world = config.parallel.world_size
    cores = world if measured.device_bytes else world * config.threads_per_rank
    peaks = (
        hardware.bf16_flops_per_s * cores,
        sum(speeds.flops_per_s for speeds in measured.rank_speeds),
    )

    def shares(operations: float, seconds: float) -> tuple[float, float]:
        vendor, own = (utilisation(operations, seconds, 1, peak) for peak in peaks)
        return vendor, own

    ran = training_flops(computed, config.recompute, fused_head=True)
    bubble, straggler = _waiting(measured, config)
    return Training(
        model_flops=flops.model / measured.steps,
        recomputed_flops=flops.recomputed / measured.steps,
        saved_by_sharing=1 - needed.total / whole.total,
        padding_loss=1 - needed.total / computed.total,
        bubble=bubble,
        straggler_loss=straggler,
        mfu=shares(flops.model, train_s),
        hfu=shares(ran.hardware, train_s),
        step_mfu=shares(flops.model, total_s),
    )


def _forward_flops(works: Sequence[TrainingWork], which: int, measured: Measured):
    """Of one forward pass over all steps; which: needed, whole, computed."""
    counts = [(work.needed, work.whole, work.computed)[which] for work in works]
    return sum(counts[1:], counts[0]).flops(measured.model)


def _waiting(measured: Measured, config: MegatronPolicyConfig) -> tuple[float, float]:
    """(bubble, straggler loss) as shares of the ranks' training time."""
    parallel = config.parallel
    stage_ranks = parallel.world_size // parallel.pipeline
    window = measured.window_s
    computing, training = [], 0.0
    for spans in measured.ranks.values():
        mine = within(spans, ("forward_backward",), window)
        training += length(mine)
        computing.append(intersection(within(spans, ("forward", "backward"), window), mine))
    waited = 1 - sum(length(busy) for busy in computing) / training if training else 0.0
    lost = 0.0
    ends = measured.step_ends_s
    for step in itertools.pairwise(ends):
        busy = [length(intersection(intervals, [step])) for intervals in computing]
        for first in range(0, len(busy), stage_ranks):  # ranks of a stage are neighbours
            peers = busy[first : first + stage_ranks]
            lost += sum(max(peers) - one for one in peers)
    straggler = lost / training if training else 0.0
    bubble = max(0.0, waited - straggler) if parallel.pipeline > 1 else 0.0
    return bubble, straggler


def _generation(measured: Measured) -> Generation | None:
    config = measured.config.engines
    assert isinstance(config, VllmGeneratorConfig)
    window, steps = measured.window_s, measured.steps
    busy = [within(working(spans), ("generate",), window) for spans in measured.engines.values()]
    seconds = sum(length(intervals) for intervals in busy)
    if seconds == 0:
        return None
    decode_steps = sum(
        span.attrs["steps"]
        for spans in measured.engines.values()
        for span in working(spans)
        if span.name == "generate" and window[0] <= span.end_s <= window[1]
    )
    work = generation_work(group for groups, _ in measured.work for group in groups)
    width = BYTES_OF[measured.dtype]
    read = work.bytes_read(measured.model, decode_steps, width, width)
    # Mean over the engines of what each can do, times its workers.
    speeds = measured.engine_speeds
    bytes_per_s = sum(s.read_bytes_per_s for s in speeds) / len(speeds) * config.tensor
    flops_per_s = sum(s.decode_flops_per_s for s in speeds) / len(speeds) * config.tensor
    somebody = length(union(part for intervals in busy for part in intervals))
    return Generation(
        decode_steps=decode_steps / steps,
        mean_batch=work.sampled_tokens / decode_steps,
        tokens_per_s=work.sampled_tokens / somebody,
        bytes_read=read / steps,
        bandwidth=read / seconds / bytes_per_s,
        operations=work.flops(measured.model) / seconds / flops_per_s,
        tail_loss=1 - seconds / (len(busy) * somebody),
    )
