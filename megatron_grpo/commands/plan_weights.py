"""`plan-weights`: what a weight push will move, before there is a GPU. Needs no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console

if TYPE_CHECKING:
    from megatron_grpo.weights.plan_report import PlanCost


def plan_weights(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="a known model's name (DeepSeek-V3) or a folder with a config.json, instead of "
            "CONFIG's; of any family that `plan` knows"
        ),
    ] = None,
    link_gbytes: Annotated[
        float, typer.Option(min=0.001, help="of one rank's link in one direction, in GB/s")
    ] = 50.0,
    item_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="of one weight on the engines; by default what CONFIG says, 2 "
            "where it leaves it open",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="most ranks and links to list")] = 8,
) -> None:
    """Who sends which bytes of CONFIG's or --model's model to which engine workers at every push.

    Prints the bytes of ranks, workers and links, the largest sender, and the time on links of a
    given speed. Plans thousands of ranks in seconds; reads only the model's config.json, or not
    even that: [bold]plan-weights CONFIG --model DeepSeek-V3 policy.parallel.expert=64[/bold].
    """
    from grpo_perf.model_shape import model_named
    from grpo_perf.planned_weights import planned_weights

    from megatron_grpo.config import load_config
    from megatron_grpo.conversion.config_json import read_model_spec
    from megatron_grpo.errors import ConfigError
    from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
    from megatron_grpo.weights.plan import make_plan
    from megatron_grpo.weights.plan_report import plan_cost
    from megatron_grpo.weights.tables import planned_tensors

    run = load_config(config, overrides or [])
    if run.policy.type != "megatron" or run.engines.type != "vllm":
        raise ConfigError(
            "policy.type", "has weights to plan only if it is megatron", found=run.policy.type
        )
    if model is None:
        spec = read_model_spec(run.model.folder / "config.json")
        shape, tensors = spec.shape, planned_tensors(spec)
    else:
        architecture = model_named(model)
        shape, tensors = architecture.shape, planned_weights(architecture)
    run.policy.parallel.check_model(shape)
    policy = PolicyLayout.of(run.policy.parallel, shape.num_layers)
    fleet = FleetLayout.of(run.engines, shape.num_layers)
    size = item_bytes or (4 if run.engines.dtype == "float32" else 2)
    started = time.perf_counter()
    plan = make_plan(tensors, policy, fleet, size)
    cost = plan_cost(plan, link_gbytes * 1e9)
    seconds = time.perf_counter() - started

    console = wide_console()
    console.print(
        f"{policy.num_ranks} policy ranks ({run.policy.parallel.describe()}) -> "
        f"{fleet.engines} engines of {fleet.workers} workers, {len(plan.tensors)} tensors, "
        f"{len(plan.transfers)} transfers over {len(cost.links)} links, planned in {seconds:.2f} s"
    )
    console.print(
        f"sent {_size(cost.sent_bytes)} of a model of {_size(cost.model_bytes)}; largest sender "
        f"{_size(max(cost.sender_bytes.values()))}, {cost.imbalance:.2f} x the mean; "
        f"predicted {cost.seconds:.3f} s at {link_gbytes:g} GB/s, bound by {cost.bound_by}"
    )
    _show_largest(cost, rows, console)


def _show_largest(cost: PlanCost, rows: int, console: Console) -> None:
    from rich.table import Table

    ranks = Table("policy rank", "sends", title="largest senders")
    for rank in sorted(cost.sender_bytes, key=lambda r: -cost.sender_bytes[r])[:rows]:
        ranks.add_row(str(rank), _size(cost.sender_bytes[rank]))
    workers = Table("worker of each engine", "receives", title="workers")
    for worker, num_bytes in enumerate(cost.worker_bytes[:rows]):
        workers.add_row(str(worker), _size(num_bytes))
    links = Table("policy rank", "workers of each engine", "bytes", title="largest links")
    for rank, dest, num_bytes in cost.links[:rows]:
        links.add_row(str(rank), _places(dest), _size(num_bytes))
    for table in (ranks, workers, links):
        console.print(table)


def _size(num_bytes: int) -> str:
    """
    >>> _size(1_500_000)
    '1.50 MB'
    """
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.2f} {unit}"


def _places(dest: tuple[int, ...]) -> str:
    """
    >>> _places((0, 1, 2, 3, 4)), _places((3,))
    ('0, 1, ... 4', '3')
    """
    if len(dest) <= 4:
        return ", ".join(map(str, dest))
    return f"{dest[0]}, {dest[1]}, ... {dest[-1]}"
