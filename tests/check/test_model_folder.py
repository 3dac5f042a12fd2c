"""A model's folder as `check` sees it, for every family that converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_perf.model_shape import read_architecture
from safetensors.torch import load_file, save_file
from tiny import CLASSES, save_tiny

from megatron_grpo.check.model_folder import _check_weights
from megatron_grpo.conversion.hf_folder import SINGLE


@pytest.mark.parametrize("family", list(CLASSES))
def test_the_weights_of_every_family_are_counted_as_they_are(tmp_path: Path, family: Any) -> None:
    folder = save_tiny(tmp_path, family)
    (found,) = _check_weights("model.path", folder, read_architecture(folder))
    assert (found.level, found.where) == ("ok", "model.path"), found
    tensors = load_file(folder / SINGLE)
    beside = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    save_file({**tensors, **beside}, folder / SINGLE, metadata={"format": "pt"})
    (found,) = _check_weights("model.path", folder, read_architecture(folder))
    assert found.level == ("ok" if family == "deepseek_v3" else "problem")
