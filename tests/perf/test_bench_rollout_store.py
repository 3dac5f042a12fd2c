"""The store's bench, scaled down: what it must show holds already for 20 steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "perf" / "bench" / "bench_rollout_store.py"


def test_the_store_is_small_and_appends_cost_the_same_late_as_early():
    arguments = ["--steps", "20", "--rollouts", "64", "--reads", "5", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)
    assert row["size_ratio"] < 1.2
    assert row["append_s_last_tenth"] < 5 * row["append_s_first_tenth"] + 0.1
    assert row["peak_growth_bytes"] < 100 << 20
