"""One engine of two workers: vLLM's own processes, each a receiver of every push."""

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
from tiny import save_tiny, tiny_model

pytestmark = pytest.mark.slow

MODEL = {"family": "llama", "tied": True, "head_dim": 32}


def test_both_workers_of_an_engine_hold_their_part_of_the_pushed_weights(tmp_path):
    engine = start_engine(save_tiny(tmp_path, **MODEL), CONFIG.model_copy(update={"tensor": 2}))
    try:
        first, second = tiny_model(**MODEL), tiny_model(**MODEL, seed=1)
        fleet = Fleet([engine], first, workers=2)
        for model, other in ((first, second), (second, first)):
            fleet.push(model)
            asked = requests(6)
            done = engine.run(asked)
            assert mean_difference(model, asked, done, TEMPERATURE) < 1e-5
            assert mean_difference(other, asked, done, TEMPERATURE) > 0.1
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
