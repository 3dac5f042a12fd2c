"""The gate compares ratios by row, and knows every benchmark there is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gate", ROOT / "perf/bench/gate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_worse_beyond_its_tolerance_in_its_own_direction(gate):
    slower = gate.Ratio("lower", 0.25)
    assert slower.worse(1.26, 1.0) and not slower.worse(1.24, 1.0) and not slower.worse(0.1, 1.0)
    faster = gate.Ratio("higher", 0.25)
    assert faster.worse(0.79, 1.0) and not faster.worse(0.81, 1.0) and not faster.worse(9.0, 1.0)


def test_rows_are_compared_with_the_row_of_the_same_keys_and_nothing_else(gate):
    bench = gate.Bench((), ("shape",), {"ratio": gate.Ratio("lower", 0.1)})
    rows = [
        {"shape": [1], "ratio": 2.0, "seconds": 99.0},
        {"shape": [2], "ratio": 1.0},
        {"shape": [3], "ratio": 5.0},  # new: nothing to compare with
        {"shape": [4], "ratio": None},  # the other side was not run
    ]
    baseline = [
        {"shape": [1], "ratio": 1.0, "seconds": 1.0},
        {"shape": [2], "ratio": 1.05},
        {"shape": [4], "ratio": 1.0},
    ]
    changes = gate.compare("b", bench, rows, baseline)
    assert [(c.row, c.now, c.before, c.worse) for c in changes] == [
        ("[1]", 2.0, 1.0, True),
        ("[2]", 1.0, 1.05, False),
    ]


def test_stored_baselines_hold_the_keys_and_a_ratio_of_every_row_that_is_compared(gate):
    for name, bench in gate.BENCHES.items():
        path = gate.BASELINES / f"{name}.json"
        rows = gate.rows_of(json.loads(path.read_text())) if path.exists() else []
        for row in rows:
            assert set(bench.keys) <= set(row), (name, row)
            assert not bench.ratios or any(row.get(ratio) for ratio in bench.ratios), (name, row)


def test_the_exit_status_says_what_happened(gate, tmp_path, monkeypatch, capsys):
    script = tmp_path / "bench_fake.py"
    script.write_text('import json; print(json.dumps({"n": 1, "ratio": 2.0}))')
    monkeypatch.setattr(gate, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(gate, "BASELINES", tmp_path)
    table = {"bench_fake": gate.Bench((), ("n",), {"ratio": gate.Ratio("lower", 0.1)})}
    monkeypatch.setattr(gate, "BENCHES", table)
    out = ["--out", str(tmp_path / "out.json")]
    assert gate.main([*out, "--update"]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "bench_fake": [{"n": 1, "ratio": 2.0}]
    }
    assert gate.main(out) == 0
    (tmp_path / "bench_fake.json").write_text('[{"n": 1, "ratio": 1.0}]')
    assert gate.main(out) == 1
    monkeypatch.setattr(gate, "BENCHES", {})
    assert gate.main(out) == 0
    assert "gate.py names no ratio of it" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(gate, "BENCHES", table)
    script.write_text("raise SystemExit('no model')")
    (tmp_path / "bench_good.py").write_text('print("[]")')
    assert gate.main(out) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "bench_fake failed: exit status 1: no model" in told and "bench_good ..." in told
    assert json.loads((tmp_path / "out.json").read_text()) == {"bench_good": []}
