"""Run every benchmark, write one JSON, and compare its ratios with perf/baselines.

    python perf/bench/gate.py [--out runs/bench.json] [--trl-python PYTHON] [--only NAME] [--list]
        [--update]

A ratio compares two things measured side by side in one run (ours against the plain way, or against
another library), so it holds on a busy or a different machine where seconds do not. What got worse
by more than its tolerance is printed and the exit status is 1; so it is where a benchmark fails,
after the others have run. One that BENCHES does not know is run, and said not to be compared.
`--update` makes the results the new baselines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "perf/baselines"
FOLDERS = (ROOT / "kernels/bench", ROOT / "perf/bench")
DEADLINE_S = 1800
Row = Mapping[str, object]


class BenchError(Exception):
    """A benchmark ended without its rows; says how."""


@dataclass(frozen=True)
class Ratio:
    """Which way is better, and by how much a run may differ from the next."""

    better: Literal["lower", "higher"]
    tolerance: float

    def worse(self, now: float, before: float) -> bool:
        """
        >>> Ratio("lower", 0.25).worse(1.3, 1.0), Ratio("higher", 0.25).worse(0.85, 1.0)
        (True, False)
        """
        change = now / before if self.better == "lower" else before / now
        return change > 1 + self.tolerance


@dataclass(frozen=True)
class Bench:
    """One script; `--json` makes it print a row or a list of rows, and nothing else.

    Attributes:
        keys: fields that tell its rows apart.
        needs_trl: runs another interpreter, one with TRL.
    """

    arguments: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    needs_trl: bool = False


BENCHES: Mapping[str, Bench] = {
    "bench_linear_logprob": Bench(
        ("--shape", "256,256,8192", "--repeats", "5", "--clock", "cpu", "--threads", "1"),
        ("shape", "dtype"),
        {
            "time_ratio_to_naive": Ratio("lower", 0.4),
            "time_ratio_to_floor": Ratio("lower", 0.4),
            "extra_peak_ratio_to_naive": Ratio("lower", 0.05),  # bytes do not wobble
        },
    ),
    "bench_vs_trl": Bench(
        (),
        ("dtype", "completions"),
        {"ratio": Ratio("higher", 0.3)},
        needs_trl=True,
    ),
    "bench_weight_exchange": Bench(
        (),
        ("model", "engines"),
        {
            "ratio_to_bare_broadcast": Ratio("higher", 0.3),
            "extra_peak_buckets": Ratio("lower", 0.25),
        },
    ),
    "bench_checkpoint": Bench(
        (),
        ("model",),
        {"stall_share": Ratio("lower", 1.0)},  # of a synchronous save; a few hundredths
    ),
    "bench_convert": Bench(
        ("--layers", "2", "--vocab", "8192"),
        ("what",),
        {"speed_of_copying": Ratio("higher", 0.6)},
    ),
    "bench_rollout_store": Bench(
        ("--steps", "60", "--reads", "10"),
        ("steps", "rollouts_per_step"),
        {"size_ratio": Ratio("lower", 0.05)},  # against one compressed file
    ),
    "bench_overlap": Bench(
        (),
        ("dtype", "completions"),
        {
            "speedup": Ratio("higher", 0.15),
            # An idle share near 0 has no ratio worth comparing.
            "trainer_busy_share_ahead": Ratio("higher", 0.1),
        },
    ),
    "bench_profile_overhead": Bench(
        (),
        ("microbatches",),
        # A record of a few hundred microseconds; twice of it would not be seen in a step.
        {
            "record_ratio_to_step": Ratio("lower", 1.0),
            "time_ratio_to_unrecorded": Ratio("lower", 0.1),
        },
    ),
}


@dataclass(frozen=True)
class Change:
    """One ratio of one row beside its baseline."""

    bench: str
    row: str
    name: str
    now: float
    before: float
    worse: bool


def scripts() -> dict[str, Path]:
    """Every benchmark there is, by name."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("bench_*.py"))}


def run_bench(path: Path, bench: Bench, trl: Path | None) -> list[Row]:
    command = [sys.executable, str(path), *bench.arguments, "--json"]
    if bench.needs_trl:
        command += ["--trl-python", str(trl)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"not done after {DEADLINE_S} s") from None
    if done.returncode:
        raise BenchError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    return rows_of(json.loads(done.stdout))


def rows_of(value: object) -> list[Row]:
    return list(value) if isinstance(value, list) else [value]  # type: ignore[list-item]


def compare(name: str, bench: Bench, rows: Sequence[Row], baseline: Sequence[Row]) -> list[Change]:
    """Ratios of rows that both have. A ratio that is missing or null on either side (the other
    library was not installed) compares to nothing."""

    def identity(row: Row) -> str:
        return ", ".join(str(row[key]) for key in bench.keys)

    before = {identity(row): row for row in baseline}
    changes = []
    for row in rows:
        old = before.get(identity(row), {})
        for ratio_name, ratio in bench.ratios.items():
            now, then = row.get(ratio_name), old.get(ratio_name)
            if isinstance(now, int | float) and isinstance(then, int | float):
                worse = ratio.worse(now, then)
                changes.append(Change(name, identity(row), ratio_name, now, then, worse))
    return changes


def show(changes: Sequence[Change], skipped: Sequence[str], console: Console) -> None:
    table = Table(title="ratios against perf/baselines")
    for heading in ("benchmark", "row", "ratio", "now", "baseline", ""):
        table.add_column(heading, justify="right" if heading in ("now", "baseline") else "left")
    for change in changes:
        verdict = "[bold red]worse[/bold red]" if change.worse else "ok"
        cells = (change.bench, change.row, change.name, f"{change.now:.3f}", f"{change.before:.3f}")
        table.add_row(*cells, verdict)
    console.print(table)
    for line in skipped:
        console.print(f"[yellow]not run:[/yellow] {line}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench.json")
    parser.add_argument("--trl-python", type=Path, help="of an environment with TRL")
    parser.add_argument("--only", action="append", choices=sorted(scripts()), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names of the benchmarks")
    parser.add_argument("--update", action="store_true", help="make the results the baselines")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = scripts()
    if options.list:
        console.print("\n".join(found))
        return 0
    results: dict[str, list[Row]] = {}
    changes: list[Change] = []
    skipped: list[str] = []
    failed = False
    for name in options.only or found:
        bench = BENCHES.get(name, Bench())
        if bench.needs_trl and (options.trl_python is None or not options.trl_python.exists()):
            skipped.append(f"{name}, for want of TRL: make bench-trl, or --trl-python")
            continue
        console.print(f"[dim]{name} ...[/dim]")
        try:
            results[name] = run_bench(found[name], bench, options.trl_python)
        except BenchError as error:
            console.print(f"[bold red]{name} failed:[/bold red] {escape(str(error))}")
            failed = True
            continue
        baseline = BASELINES / f"{name}.json"
        if not bench.ratios:
            skipped.append(f"comparison of {name}: perf/bench/gate.py names no ratio of it")
        elif options.update:
            baseline.write_text(json.dumps(results[name], indent=2) + "\n", encoding="utf-8")
        elif baseline.exists():
            changes += compare(
                name, bench, results[name], rows_of(json.loads(baseline.read_text()))
            )
        else:
            skipped.append(f"comparison of {name}, which has no baseline yet: --update")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    show(changes, skipped, console)
    return 1 if failed or any(change.worse for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
