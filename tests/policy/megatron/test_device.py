"""Device choices that need no GPU to check."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.megatron.device import choose_transformer_engine, compute_dtype

CPU = torch.device("cpu")


def test_named_dtypes_pass_and_auto_on_cuda_is_bfloat16() -> None:
    assert compute_dtype("float32", torch.device("cuda", 0)) == torch.float32
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    assert compute_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16


def test_transformer_engine_is_never_chosen_on_a_cpu_and_insisting_is_an_error() -> None:
    assert choose_transformer_engine("auto", CPU) is False
    assert choose_transformer_engine("off", CPU) is False
    with pytest.raises(ConfigError, match=r"policy\.transformer_engine: needs a CUDA device"):
        choose_transformer_engine("on", CPU)
