"""The planned tensors of a model are those of its checkpoint; planning needs no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_perf.model_shape import model_named, read_architecture
from grpo_perf.planned_weights import planned_weights
from tiny import save_tiny
from weights.exchange import spec_of, state_of

from megatron_grpo.weights.tables import planned_tensors

CONFIG = """
name: planned
steps: 1
model: {{path: {folder}}}
task: {{type: reasoning_gym, name: basic_arithmetic, rows: 40, heldout_rows: 8}}
policy: {{type: megatron, parallel: {{tensor: 2, pipeline: 2, data: 1024}}}}
generator: {{type: vllm, engines: 64, tensor: 2}}
"""


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("qwen2", False),
        ("qwen3", False),
        ("qwen3_moe", False),
        ("deepseek_v3", False),
    ],
)
def test_b5_every_tensor_of_a_checkpoint_is_planned_once_in_its_shape(tmp_path, family, tied):
    folder = save_tiny(tmp_path, family, tied=tied)
    table = planned_tensors(spec_of(folder))
    assert {t.name: t.shape for t in table} == {
        name: tuple(tensor.shape) for name, tensor in state_of(folder).items()
    }
    assert len({t.name for t in table}) == len(table)


def plan_weights(*arguments: str) -> str:
    """What the command prints, run where importing torch would show."""
    code = (
        "import sys; from megatron_grpo.cli import app\n"
        "try:\n    app(['plan-weights', *sys.argv[1:]])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_four_thousand_ranks_are_planned_by_the_command_without_torch(tmp_path: Path):
    folder = save_tiny(tmp_path / "model", "qwen3")
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=folder))
    text = plan_weights(str(config))
    assert "4096 policy ranks (TP2 PP2 DP1024) -> 64 engines of 2 workers" in text
    # qwen3 tiny: 2 layers of 64 x (128 + 64 + 64 + 128) and 3 x 64 x 128, two of 130 x 64, and
    # norms of 64, 64, 32, 32 a layer and one of 64; 2 bytes each
    size = 2 * (2 * (64 * 384 + 3 * 64 * 128 + 192) + 2 * 130 * 64 + 64)
    assert f"sent {size / 1000:.2f} kB of a model of {size / 1000:.2f} kB" in text


def test_a_thousand_by_a_thousand_ranks_are_planned_for_a_model_given_by_name(tmp_path: Path):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path / "nowhere"))
    layout = "{tensor: 8, pipeline: 1, sequence: true, expert: 64, expert_tensor: 1, data: 128}"
    text = plan_weights(
        str(config),
        "--model=DeepSeek-V3",
        f"policy.parallel={layout}",
        "generator={type: vllm, engines: 64, tensor: 16, expert: true}",
        "cluster.gpus_per_rank=1",
    )
    assert "1024 policy ranks" in text and "64 engines of 16 workers" in text
    # 671.03 billion parameters (its authors' count, without the extra prediction layer) of 2 bytes
    assert "sent 1.34 TB of a model of 1.34 TB" in text
    assert float(re.search(r"planned in ([\d.]+) s", text)[1]) < 20


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-30B-A3B", "DeepSeek-R1-Distill-Qwen-1.5B"])
def test_a_model_of_which_only_the_shape_is_known_is_planned_to_the_last_parameter(name):
    model = model_named(name)
    table = planned_weights(model)
    assert sum(t.extent * t.index_elements for t in table) == model.num_parameters
    assert len({t.name for t in table}) == len(table)


def test_a_shape_and_a_config_json_plan_the_same_tensors(tmp_path):
    folder = save_tiny(tmp_path, "qwen3_moe")
    fields = ("shape", "axis", "place", "layer", "expert", "vocabulary", "heads", "tied")

    def facts(table):
        return sorted(repr([getattr(tensor, name) for name in fields]) for tensor in table)

    assert facts(planned_weights(read_architecture(folder))) == facts(
        planned_tensors(spec_of(folder))
    )
