"""Gradings per second of ordinary answers.

    python perf/bench/bench_grading.py [--workers 2] [--count 4000] [--json]

The answers are those of tests/environments/grading/answers.jsonl with a length typical of a worked
solution in front, in the proportions of MATH: four of five are plain numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.environments.grading.numbers import exact
from megatron_grpo.environments.grading.pool import GraderPool

TABLE = Path(__file__).parents[2] / "tests/environments/grading/answers.jsonl"
SOLUTION = "We add both sides and simplify, which leaves one unknown. " * 60


def ordinary(count: int) -> list[tuple[str, str]]:
    """Pairs in a fixed order: of every five, four whose gold is a plain number and one other."""
    rows = [json.loads(line) for line in TABLE.open(encoding="utf-8")]
    rows = [row for row in rows if "boxed" in row["response"]]
    numbers = [row for row in rows if exact(row["answer"]) is not None]
    others = [row for row in rows if exact(row["answer"]) is None]
    picked = [
        others[i // 5 % len(others)] if i % 5 == 4 else numbers[i % len(numbers)]
        for i in range(count)
    ]
    return [(SOLUTION + row["response"], row["answer"]) for row in picked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    items = ordinary(arguments.count)
    with GraderPool(GradingConfig(workers=arguments.workers)) as pool:
        pool.grade(items[:20])
        started = time.perf_counter()
        verdicts = pool.grade(items)
        seconds = time.perf_counter() - started
    result = {
        "gradings": len(verdicts),
        "gradings_per_s": round(len(verdicts) / seconds, 1),
        "workers": arguments.workers,
        "correct": sum(verdict.reward for verdict in verdicts),
        "slowest_s": max(verdict.seconds for verdict in verdicts),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:>15} {value}")


if __name__ == "__main__":
    main()
