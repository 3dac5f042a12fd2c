"""A Megatron checkpoint seen by Hugging Face names: nothing of it is lost in silence."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import save_tiny

from megatron_grpo.conversion import read_ahead
from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import SINGLE, HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.conversion.torch_dist import Stored
from megatron_grpo.errors import CheckpointError

QUIET = Console(quiet=True)


def converted(tmp_path: Path, family: Any, **changes: Any) -> Path:
    source = HfFolder(save_tiny(tmp_path / "hf", family, **changes))
    to_megatron(source, tmp_path / "megatron", Layout(), QUIET)
    return tmp_path / "megatron"


@pytest.mark.parametrize(
    ("family", "layers", "field", "value", "lost"),
    [
        ("llama", 2, "tie_word_embeddings", True, r"1 tensors.*'output_layer\.weight'"),
        ("qwen2", 2, "model_type", "llama", r"1 tensors.*linear_qkv\.bias"),
        ("qwen3", 2, "model_type", "llama", r"2 tensors.*k_layernorm.*q_layernorm"),
        ("qwen3_moe", 3, "num_hidden_layers", 2, r"9 tensors.*decoder\.layers\.2\."),
        ("deepseek_v3", 3, "num_hidden_layers", 2, r"15 tensors.*decoder\.layers\.2\."),
    ],
)
def test_tensors_that_config_json_says_nothing_of_are_named(
    tmp_path: Path, family: str, layers: int, field: str, value: Any, lost: str
) -> None:
    folder = converted(tmp_path, family, num_hidden_layers=layers)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, field: value}))
    with pytest.raises(CheckpointError, match=lost):
        MegatronFolder(folder)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
def test_layers_of_multi_token_prediction_are_left_out_of_the_family_that_has_them(
    tmp_path: Path, family: str, monkeypatch: Any, caplog: Any
) -> None:
    folder = converted(tmp_path, family)
    stored = MegatronFolder(folder)._stored
    more = {
        "mtp.layers.0.eh_proj.weight": Stored((64, 128), torch.float32, ()),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": Stored((64,), torch.float32, ()),
    }
    monkeypatch.setattr(
        "megatron_grpo.conversion.megatron_folder.read_index", lambda path: {**stored, **more}
    )
    if family == "qwen2":
        with pytest.raises(CheckpointError, match=r"1 tensors.*'mtp\.layers\.0\.eh_proj\.weight'"):
            MegatronFolder(folder)
        return
    MegatronFolder(folder)
    assert "1 tensors of multi-token prediction are left out" in caplog.text


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_is_dropped_before_the_next_large_one_is_read(
    tmp_path: Path, monkeypatch: Any, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 0)  # every tensor is a large one
    folder = converted(tmp_path, "qwen2")
    read, given, alive = MegatronFolder.read, [], []

    def watched(self: MegatronFolder, name: str) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in given))
        given.append(weakref.ref(value := read(self, name)))
        return value

    monkeypatch.setattr(MegatronFolder, "read", watched)
    to_hugging_face(MegatronFolder(folder), tmp_path / "back", QUIET, dtype)
    assert alive == [0] * len(load_file(tmp_path / "hf" / SINGLE))
