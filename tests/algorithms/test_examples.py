"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "megatron_grpo.algorithms.advantages",
        "megatron_grpo.algorithms.dpo",
        "megatron_grpo.algorithms.losses",
        "megatron_grpo.algorithms.packing",
        "megatron_grpo.batch",
        "megatron_grpo.generation.reference",
        "megatron_grpo.policy.reference",
        "megatron_grpo.policy.schedules",
        "megatron_grpo.weights.in_process",
    ],
)
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
