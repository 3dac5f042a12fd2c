"""Plans: legal, fitting, ranked; and what is said where nothing fits."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from grpo_perf.efficiencies import stored_efficiencies
from grpo_perf.hardware import hardware_named
from grpo_perf.model_shape import model_named
from grpo_perf.plan_output import plan_yaml
from grpo_perf.planner import PlanRequest, legal_layouts, make_plans

from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigError

ROOT = Path(__file__).parents[2]
QWEN = PlanRequest(
    model=model_named("Qwen3-30B-A3B"),
    hardware=hardware_named("h100"),
    gpus=32,
    sequences=512,
    mean_tokens=2000,
    max_tokens=4096,
)


def test_every_layout_is_legal_and_uses_every_gpu_and_none_comes_twice() -> None:
    layouts = list(legal_layouts(QWEN, 32))
    described = [layout.describe() for layout in layouts]
    assert len(described) == len(set(described)) > 100
    for layout in layouts:
        layout.check_model(QWEN.model.shape)
        assert layout.world_size == 32
    assert {layout.context for layout in layouts} == {1}  # the context is short
    long = replace(QWEN, max_tokens=65536)
    assert {layout.context for layout in legal_layouts(long, 32)} == {1, 2, 4}


def test_plans_fit_are_ranked_and_beat_what_a_worse_split_gives() -> None:
    result = make_plans(QWEN, stored_efficiencies())
    times = [plan.step.step_s for plan in result.plans]
    assert times == sorted(times) and 1 < len(times) <= 10
    for plan in result.plans:
        assert plan.policy_memory.total <= 80e9 and plan.engine_bytes <= 80e9
        assert plan.work.gpus == 32
    assert result.dropped and all(drop.needed_bytes > 80e9 for drop in result.dropped)
    assert all("GPU with" in drop.remedy for drop in result.dropped)
    forced = make_plans(replace(QWEN, shares=(0.75,), colocated=False), stored_efficiencies())
    assert forced.plans[0].step.step_s >= times[0]
    assert forced.plans[0].work.policy_gpus == 24


def test_latency_ranks_by_both_sides_and_staleness_zero_leaves_synchronous_plans() -> None:
    quick = make_plans(replace(QWEN, objective="latency"), stored_efficiencies())
    latencies = [plan.latency_s for plan in quick.plans]
    assert latencies == sorted(latencies)
    alone = make_plans(replace(QWEN, staleness=0), stored_efficiencies())
    assert all(plan.work.colocated and plan.work.staleness == 0 for plan in alone.plans)


def test_a_model_too_large_is_refused_with_the_closest_layout_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"no layout fits into 80 GB; the closest, .* needs") as e:
        make_plans(replace(QWEN, model=model_named("DeepSeek-V3"), gpus=16), stored_efficiencies())
    assert "more GPUs" in str(e.value)


def test_a_thousand_gpus_are_planned_in_two_seconds_of_one_core() -> None:
    request = replace(QWEN, model=model_named("Qwen3-235B-A22B"), gpus=1024, sequences=4096)
    start = time.process_time()
    result = make_plans(request, stored_efficiencies())
    assert time.process_time() - start < 2.0
    assert result.considered > 300


def test_the_yaml_is_taken_in_by_a_run_config(tmp_path: Path) -> None:
    request = replace(QWEN, model=model_named("SmolLM2-135M-Instruct"), gpus=8)
    plan = make_plans(request, stored_efficiencies()).plans[0]
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    (tmp_path / "run.yaml").write_text(
        f"extends: [{ROOT / 'configs/quickstart.yaml'}, plan.yaml]\n"
    )
    run = load_config(tmp_path / "run.yaml")
    assert run.policy.type == "megatron" and run.policy.parallel == plan.work.parallel
    assert run.engines.type == "vllm" and run.engines.engines == plan.work.engines
    assert run.rollouts.max_staleness == plan.work.staleness


PROGRAM = """
import sys
sys.argv = ["megatron-grpo", *{arguments!r}]
from megatron_grpo.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
heavy = {{"torch", "numpy", "ray", "transformers", "vllm", "megatron", "zarr", "matplotlib"}}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--model", "Qwen3-30B-A3B", "--gpus", "16"], ["layouts considered", "TP"]),
        (
            ["simulate", "--model", "SmolLM2-135M-Instruct", "--gpus", "8", "--steps", "3",
             "--sequences", "64", "--context", "256", "--lengths", "constant:100"],
            ["steps per hour", "goodput"],
        ),
    ],
)  # fmt: skip
def test_both_commands_answer_without_loading_anything_heavy(
    arguments: list[str], words: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arguments=arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": ".:perf:launch:kernels", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    for word in words:
        assert word in done.stdout


def test_plan_writes_its_table_and_reports_a_wrong_question(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from megatron_grpo.cli import app

    table = ROOT / "perf/grpo_perf/published_step_times.csv"
    out = tmp_path / "out.csv"
    assert (
        CliRunner().invoke(app, ["plan", "--table", str(table), "--out", str(out)]).exit_code == 0
    )
    assert out.read_text().splitlines()[0] == table.read_text().splitlines()[0]
    assert len(out.read_text().splitlines()) == 10
    wrong = CliRunner().invoke(app, ["plan", "--model", "Qwen3-30B-A3B"])
    assert isinstance(wrong.exception, ConfigError) and "--gpus" in str(wrong.exception)
