"""Weights of a mixture of experts into a real vLLM engine, whose CPU kernels pad and pack them."""

from __future__ import annotations

import pytest
import torch
from generation.fleet import (
    TEMPERATURE,
    Fleet,
    mean_difference,
    named,
    requests,
    start_engine,
)
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

pytestmark = pytest.mark.slow

# Experts of width 48, which the kernels pad to 64; layer 1 is dense.
MODEL = {"family": "qwen3_moe", "num_hidden_layers": 3}
EXPERTS = ".layers.0."


def test_a_pushed_engine_of_experts_is_bit_for_bit_one_that_started_with_these_weights(tmp_path):
    folders = [save_tiny(tmp_path / str(seed), **MODEL, seed=seed) for seed in (0, 1)]
    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    frozen = frozenset(name for name in old if EXPERTS in name)
    pushed, fresh = start_engine(folders[0]), start_engine(folders[1])
    try:
        fleet = Fleet([pushed], folders[0], frozen=frozen)
        for state in (new, old, new):  # packed storage is written again and again
            fleet.sender.send_everything_next()
            fleet.push_tensors(state)
        fresh.call("probe_pretend_version", fleet.version)
        asked = requests(6) + requests(6, name="greedy", greedy=True)
        got, expected = pushed.run(asked), fresh.run(asked)
        for name, completion in got.items():
            assert completion.token_ids.tolist() == expected[name].token_ids.tolist()
            assert (completion.behavior_logprobs == expected[name].behavior_logprobs).all()
        held, loaded = pushed.call("probe_holdings"), fresh.call("probe_holdings")
        assert held.keys() == loaded.keys()
        assert all(torch.equal(held[names], loaded[names]) for names in held)
        # Of an oracle, too: both engines could be wrong together.
        sampled = requests(6)
        models = [tiny_model(**MODEL, seed=seed) for seed in (0, 1)]
        assert mean_difference(models[1], sampled, got, TEMPERATURE) < 1e-5
        assert mean_difference(models[0], sampled, got, TEMPERATURE) > 0.05

        # Experts that are not sent keep their kernel and their weights.
        fleet.push_tensors(old)
        mixed = tiny_model(**MODEL, seed=0)
        mixed.load_state_dict(
            {n: t for n, t in named(models[1]).items() if EXPERTS in n}, strict=False
        )
        got = pushed.run(sampled)
        assert mean_difference(mixed, sampled, got, TEMPERATURE) < 1e-5
        fleet.sender.close()
    finally:
        pushed.stop()
        fresh.stop()
