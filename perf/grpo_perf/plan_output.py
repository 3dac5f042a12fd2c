"""Plans for people: a table in the terminal, and the YAML that a run config extends."""

from __future__ import annotations

import io
import math

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from grpo_perf.planner import Plan, PlanResult
from grpo_perf.workload import Workload
from megatron_grpo.config.base import Value


def plan_yaml(plan: Plan) -> str:
    """The plan as the sections of a run config that it decides, for `extends:`."""
    work = plan.work
    policy: dict[str, Value] = {
        "type": "megatron",
        "parallel": dict(work.parallel.model_dump()),
        "recompute": work.recompute,
        "microbatch_tokens": _microbatch(work),
    }
    sections: dict[str, Value] = {
        "policy": policy,
        "generator": {
            "type": "vllm",
            "engines": work.engines,
            "tensor": work.engine_tensor,
            **({"colocated": True} if work.colocated else {}),
            "max_model_tokens": int(work.max_tokens),
            "max_concurrent": max(1, min(plan.concurrent, work.sequences)),
        },
        "rollouts": {"max_staleness": work.staleness},
        "cluster": {"gpus_per_rank": 1},
    }
    stream = io.StringIO()
    place = "policy and engines take turns" if work.colocated else "policy and engines side by side"
    stream.write(f"# {plan.describe()}: {place}.\n")
    stream.write(f"# Predicted: {plan.step.step_s:.1f} s a step.\n")
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(sections, stream)
    return stream.getvalue()


def _microbatch(work: Workload) -> int:
    multiple = work.parallel.sequence_multiple
    return math.ceil(work.microbatch_tokens / multiple) * multiple


def show_plans(result: PlanResult, console: Console, dropped: int = 3) -> None:
    """The best plans with memory and bottleneck, and what came closest to fitting."""
    table = Table(
        "",
        "policy",
        "recompute",
        "engines",
        "step s",
        "tok/s/GPU",
        "policy GB",
        "engine GB",
        "bottleneck",
    )
    for index, plan in enumerate(result.plans, 1):
        phase, term, seconds = plan.step.bottleneck
        work = plan.work
        place = "same GPUs" if work.colocated else f"{work.engine_gpus} GPUs"
        table.add_row(
            str(index),
            work.parallel.describe(),
            work.recompute,
            f"{work.engines} x TP{work.engine_tensor}, {place}",
            f"{plan.step.step_s:.1f}",
            f"{plan.step.tokens_per_s_per_gpu:.0f}",
            f"{plan.policy_memory.total / 1e9:.0f}",
            f"{plan.engine_bytes / 1e9:.0f}",
            f"{phase}.{term} {seconds:.0f} s",
        )
    console.print(table)
    console.print(f"{result.considered} layouts considered, {len(result.dropped)} do not fit.")
    for drop in result.dropped[:dropped]:
        console.print(
            f"  {drop.layout}: {drop.needed_bytes / 1e9:.0f} GB of "
            f"{drop.device_bytes / 1e9:.0f}, most of it {drop.largest}; needs {drop.remedy}"
        )
