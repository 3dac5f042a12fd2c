"""Fit the efficiencies to published step times, and say how well they predict what they never saw.

    python -m grpo_perf.fit [TABLE.csv] [--write] [--out FILE]

The table that ships, published_step_times.csv, holds GRPO step times of NVIDIA NeMo RL 0.6
(performance summary in its documentation; averages of five steps, Megatron-Core and vLLM).
Maximum a posteriori in the logarithm of every efficiency: squared relative errors of the step time
(10% counts as one) plus squared distances from what published systems reach. There are nearly as
many constants as rows, so the priors are what keeps the constants physical. Printed beside the fit:
each row predicted from constants fitted without it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_perf.cost_model import ModelCounts, predict_step
from grpo_perf.efficiencies import (
    Efficiencies,
    EfficiencyFile,
    Record,
    read_efficiency_file,
    stored_path,
)
from grpo_perf.table import TableRow, parse_row, read_table, workload_of
from grpo_perf.workload import Workload
from megatron_grpo.errors import ConfigError

ERROR_UNIT = 0.10
_SWEEPS = 200
_FIRST_STEP, _LAST_STEP = 0.25, 1e-4


@dataclass(frozen=True, slots=True)
class Example:
    """A workload with its measured seconds."""

    id: str
    work: Workload
    counts: ModelCounts
    measured_s: float

    def predicted_s(self, eff: Efficiencies) -> float:
        return predict_step(self.work, eff, self.counts).step_s


def published_table() -> Path:
    """The table that ships with this package."""
    return Path(str(files("grpo_perf").joinpath("published_step_times.csv")))


def examples_from(rows: Sequence[TableRow]) -> list[Example]:
    """Rows with a measured time."""
    examples = []
    for row in rows:
        if row.step_time_s is None:
            raise ConfigError(
                f"row {row.id}: step_time_s", "is needed to fit", remedy="leave the row out"
            )
        work = workload_of(row)
        examples.append(Example(row.id, work, ModelCounts.of(work.model), row.step_time_s))
    return examples


def minimise(loss: Callable[[list[float]], float], start: Sequence[float]) -> list[float]:
    """Coordinate search with halving steps: no derivatives, since the slower of two sides counts.

    After every sweep the whole movement is tried once more, which follows narrow valleys.
    """
    point, best, step = list(start), loss(list(start)), _FIRST_STEP
    for _ in range(_SWEEPS):
        before = list(point)
        for axis in range(len(point)):
            for sign in (1.0, -1.0):
                trial = list(point)
                trial[axis] += sign * step
                value = loss(trial)
                if value < best:
                    point, best = trial, value
                    break
        further = [2 * now - old for now, old in zip(point, before, strict=True)]
        value = loss(further)
        if value < best:
            point, best = further, value
        if point == before:
            step /= 2
            if step < _LAST_STEP:
                break
    return point


def fit(examples: Sequence[Example], records: dict[str, Record]) -> Efficiencies:
    """The most probable efficiencies under priors and examples."""
    free = [name for name, record in records.items() if record.spread > 0]
    fixed = {name: record.expected for name, record in records.items()}

    def at(point: Sequence[float]) -> Efficiencies:
        values = {name: min(1.0, math.exp(v)) for name, v in zip(free, point, strict=True)}
        return Efficiencies.model_validate(fixed | values)

    def loss(point: list[float]) -> float:
        eff = at(point)
        total = 0.0
        for name, value in zip(free, point, strict=True):
            # Above 1 there is nothing physical; min() in `at` keeps the prediction defined there.
            record = records[name]
            total += ((value - math.log(record.expected)) / record.spread) ** 2
            total += 1e4 * max(0.0, value) ** 2
        for example in examples:
            error = math.log(example.predicted_s(eff) / example.measured_s)
            total += (error / ERROR_UNIT) ** 2
        return total

    return at(minimise(loss, [math.log(fixed[name]) for name in free]))


def leave_one_out(examples: Sequence[Example], records: dict[str, Record]) -> list[float]:
    """Relative error of each row under constants fitted without it."""
    errors = []
    for index, example in enumerate(examples):
        others = [*examples[:index], *examples[index + 1 :]]
        errors.append(example.predicted_s(fit(others, records)) / example.measured_s - 1)
    return errors


def report(
    examples: Sequence[Example], eff: Efficiencies, errors: Sequence[float], console: Console
) -> None:
    """Every row with both errors and the term that dominates it."""
    table = Table("row", "model", "measured s", "fitted s", "error", "left out", "dominated by")
    for example, error in zip(examples, errors, strict=True):
        step = predict_step(example.work, eff, example.counts)
        phase, term, seconds = step.bottleneck
        table.add_row(
            example.id,
            f"{example.work.model.name} {example.work.hardware.name}",
            f"{example.measured_s:.1f}",
            f"{step.step_s:.1f}",
            f"{step.step_s / example.measured_s - 1:+.1%}",
            f"{error:+.1%}",
            f"{phase}.{term} {seconds:.0f} s",
        )
    console.print(table)
    fitted = [example.predicted_s(eff) / example.measured_s - 1 for example in examples]
    console.print(
        f"median absolute error: fitted {statistics.median(map(abs, fitted)):.1%}, "
        f"left out {statistics.median(map(abs, errors)):.1%}"
    )


def stored_fit(
    current: EfficiencyFile, eff: Efficiencies, table: str, rows: int, loo: float
) -> EfficiencyFile:
    """The file with new values; origins of fixed ones are kept."""
    values = eff.model_dump()
    origin = f"fitted to {rows} rows of {table}, median absolute leave-one-out error {loo:.1%}"
    records = {
        name: record.model_copy(
            update={"value": round(values[name], 4)}
            | ({"origin": origin} if record.spread > 0 else {})
        )
        for name, record in current.records.items()
    }
    return current.model_copy(update={"records": records})


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the efficiencies of the cost model.")
    parser.add_argument("table", type=Path, nargs="?", default=published_table())
    parser.add_argument("--out", type=Path, help="where to write; the package's file with --write")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    current = read_efficiency_file()
    _, rows = read_table(arguments.table)
    examples = examples_from([parse_row(row, arguments.table.name) for row in rows])
    eff = fit(examples, current.records)
    errors = leave_one_out(examples, current.records)
    console = Console(width=110)
    report(examples, eff, errors, console)
    for name, value in eff.model_dump().items():
        console.print(f"{name:18} {value:.4f}  (expected {current.records[name].expected})")
    target = arguments.out or (stored_path() if arguments.write else None)
    if target is not None:
        loo = statistics.median(map(abs, errors))
        new = stored_fit(current, eff, arguments.table.name, len(examples), loo)
        target.write_text(json.dumps(new.model_dump(), indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {target}")


if __name__ == "__main__":
    main()
