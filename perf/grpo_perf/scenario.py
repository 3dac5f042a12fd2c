"""From a plan to a simulation, and sweeps over cluster sizes and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_perf.cost_model import ModelCounts, decode_step_terms
from grpo_perf.efficiencies import Efficiencies
from grpo_perf.lengths import Lengths
from grpo_perf.planner import POLICY_SHARES, Plan, PlanRequest, make_plans
from grpo_perf.simulation import SimulationConfig, SimulationResult
from grpo_perf.simulator import DecodeSeconds, simulate
from megatron_grpo.errors import ConfigError

# Enough to leave the start behind; a sweep simulates many clusters.
SWEEP_STEPS = 6
MAX_GPUS = 4096


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a plan does not say.

    Attributes:
        group_size: rollouts per prompt; groups of a step follow from the plan's sequences.
        mtbf_hours: mean time between failures of one node; None: none fails.
    """

    lengths: Lengths
    steps: int = 50
    group_size: int = 8
    oversampling: float = 1.0
    grade_s: float = 1.0
    mtbf_hours: float | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated plan of a sweep."""

    x: float
    plan: Plan
    result: SimulationResult


def decode_seconds(plan: Plan, lengths: Lengths, eff: Efficiencies) -> DecodeSeconds:
    """Seconds of a decode step of one of the plan's engines, by sequences in its batch."""
    work = plan.work
    counts = ModelCounts.of(work.model)
    context = work.prompt_tokens + lengths.mean / 2

    def seconds(sequences: int) -> float:
        terms = decode_step_terms(
            work.model,
            counts,
            work.hardware,
            eff,
            tensor=work.engine_tensor,
            pipeline=work.engine_pipeline,
            precision=work.precision,
            sequences=sequences,
            context_tokens=context,
        )
        return sum(terms.values()) / eff.busy

    return seconds


def simulation_of(plan: Plan, conditions: Conditions) -> SimulationConfig:
    """The plan's side as seconds, under these conditions."""
    work, step = plan.work, plan.step
    push = next(phase for phase in step.phases if phase.name == "push").seconds
    nodes = math.ceil(work.gpus / work.hardware.devices_per_node)
    share = work.policy_gpus / work.gpus
    return SimulationConfig(
        steps=conditions.steps,
        engines=work.engines,
        max_concurrent=max(1, plan.concurrent),
        groups_per_step=max(1, work.sequences // conditions.group_size),
        group_size=conditions.group_size,
        max_staleness=work.staleness,
        oversampling=conditions.oversampling,
        colocated=work.colocated,
        policy_s=(step.policy_s - push) / step.busy,
        push_s=push / step.busy,
        grade_s=conditions.grade_s,
        nodes=nodes,
        policy_nodes=max(1, min(nodes, round(nodes * share))),
        mtbf_hours=conditions.mtbf_hours,
        seed=conditions.seed,
    )


def run_plan(plan: Plan, conditions: Conditions, eff: Efficiencies) -> SimulationResult:
    return simulate(
        simulation_of(plan, conditions),
        conditions.lengths,
        decode_seconds(plan, conditions.lengths, eff),
    )


def sweep_gpus(
    request: PlanRequest, conditions: Conditions, eff: Efficiencies, most: int = MAX_GPUS
) -> list[Point]:
    """The best plan at every power of two of nodes up to `most` GPUs, simulated; sizes at which
    nothing fits, or at which replicas outnumber sequences, are left out.
    """
    short = replace(conditions, steps=min(conditions.steps, SWEEP_STEPS))
    points = []
    gpus = request.hardware.devices_per_node
    while gpus <= most:
        points += _point(replace(request, gpus=gpus), float(gpus), short, eff)
        gpus *= 2
    return points


def sweep_split(
    request: PlanRequest,
    conditions: Conditions,
    eff: Efficiencies,
    shares: Sequence[float] = POLICY_SHARES,
) -> list[Point]:
    """The best plan for each share of the GPUs that trains, at the request's cluster size."""
    short = replace(conditions, steps=min(conditions.steps, SWEEP_STEPS))
    points = []
    for share in shares:
        one = replace(request, shares=(share,), colocated=False)
        points += _point(one, share, short, eff)
    return points


def _point(
    request: PlanRequest, x: float, conditions: Conditions, eff: Efficiencies
) -> list[Point]:
    try:
        plan = make_plans(request, eff, keep=1).plans[0]
    except ConfigError:
        return []  # nothing fits: no point in the plot
    return [Point(x, plan, run_plan(plan, conditions, eff))]
