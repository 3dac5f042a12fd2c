"""Exported folders are the policy's weights, bit for bit, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_cases as cases
import pytest
import torch
from megatron_cases import LENGTHS, Case, random_sequences
from megatron_ranks import rank_pool
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

SEQUENCES = random_sequences(LENGTHS)
EXPERT_LAYOUTS = [
    {"data": 2, "expert": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
    {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    {"tensor": 2, "sequence": True, "data": 2, "expert": 2},
]


@pytest.mark.parametrize("parallel", EXPERT_LAYOUTS)
def test_b3_every_expert_is_exported_once_bitwise(tmp_path: Path, parallel: dict[str, Any]) -> None:
    experts_everywhere: dict[str, Any] = {"mlp_only_layers": []}  # each stage needs some
    changes = experts_everywhere if "pipeline" in parallel else {}
    case = Case(save_tiny(tmp_path / "model", "qwen3_moe", **changes), parallel, SEQUENCES)
    world = case.config.parallel.world_size
    source = load_file(case.folder / "model.safetensors")
    target = tmp_path / "out"
    rank_pool().run(world, cases.export_case, case, tmp_path, target)
    files = [load_file(file) for file in sorted(target.glob("*.safetensors"))]
    exported = {name: tensor for file in files for name, tensor in file.items()}
    assert sum(len(file) for file in files) == len(exported) == len(source)
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "parallel",
    [{}, {"tensor": 2, "pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2, "data": 2}],
    ids=["TP1", "TP2 PP2", "PP2 VPP2 DP2"],
)
def test_export_of_untrained_weights_is_bitwise_the_source(
    tmp_path: Path, parallel: dict[str, Any], dtype: torch.dtype
) -> None:
    model = tiny_model("qwen3", tied=dtype == torch.float32, num_hidden_layers=4).to(dtype)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    case = Case(tmp_path / "source", parallel, SEQUENCES)
    target = tmp_path / "out" / "step-1"
    rank_pool().run(case.config.parallel.world_size, cases.export_case, case, tmp_path, target)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    want = model.state_dict()
    assert set(loaded.state_dict()) == set(want)
    assert all(torch.equal(t, want[n]) for n, t in loaded.state_dict().items())
    stored = {n for file in target.glob("*.safetensors") for n in load_file(file)}
    assert stored == set(load_file(tmp_path / "source" / "model.safetensors"))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["step-1"]
