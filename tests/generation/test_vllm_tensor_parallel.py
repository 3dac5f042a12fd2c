"""Engines of two workers: vLLM's own processes, each with its part of every push."""

from __future__ import annotations

import pytest
from generation.fleet import (
    CONFIG,
    TEMPERATURE,
    Fleet,
    mean_difference,
    requests,
    start_engine,
)
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

pytestmark = pytest.mark.slow

DENSE = {"family": "llama", "tied": True, "head_dim": 32}
EXPERTS = {"family": "qwen3_moe", "num_hidden_layers": 3}  # layer 1 is dense


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_both_workers_of_an_engine_hold_their_part_of_the_pushed_weights(tmp_path, model):
    folders = [save_tiny(tmp_path / str(seed), **model, seed=seed) for seed in (0, 1)]
    config = CONFIG.model_copy(update={"tensor": 2})
    engine = start_engine(folders[0], config)
    try:
        first, second = (tiny_model(**model, seed=seed) for seed in (0, 1))
        states = [load_file(folder / "model.safetensors") for folder in folders]
        fleet = Fleet([engine], folders[0], workers=2)
        for state, right, wrong in ((states[0], first, second), (states[1], second, first)):
            fleet.push_tensors(state)
            asked = requests(6)
            done = engine.run(asked)
            assert mean_difference(right, asked, done, TEMPERATURE) < 1e-5
            assert mean_difference(wrong, asked, done, TEMPERATURE) > 0.05
        running = requests(2, prompt=40, max_new_tokens=100)
        engine.call("submit", running)
        engine.call("abort", ["r0"])
        reasons = {}
        while len(reasons) < 2:
            reasons |= {c.request_id: c.finish_reason for c in engine.call("collect", 5.0)}
        assert reasons["r0"] == "abort" and reasons["r1"] in ("length", "stop")
        fleet.sender.close()
    finally:
        engine.stop()
