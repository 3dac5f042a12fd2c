"""Weights into a real vLLM engine of an untied model with biases: whole, or an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generation.fleet import (
    TEMPERATURE,
    WEIGHTS,
    Fleet,
    mean_difference,
    named,
    requests,
    start_engine,
)
from tiny import save_tiny, tiny_model
from weights.exchange import manifest_of

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.rendezvous import Rendezvous
from megatron_grpo.weights.specs import SenderSpec, TensorSpec

pytestmark = pytest.mark.slow

# 32 per head: vLLM's attention on a CPU has no kernel for 16.
MODEL = {"family": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = start_engine(save_tiny(tmp_path_factory.mktemp("untied"), **MODEL))
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def fleet(engine):
    fleet = Fleet([engine], tiny_model(**MODEL))
    yield fleet
    fleet.sender.close()


def test_a_manifest_that_is_not_the_whole_model_is_refused_before_anyone_joins(engine):
    whole = manifest_of(named(tiny_model(**MODEL)))
    norm = "model.norm.weight"
    cases = [
        ([s for s in whole if s.name != norm], norm),
        ([*whole, TensorSpec("model.extra", (2,), "float32")], "model.extra"),
        ([replace(s, dtype="bfloat16") if s.name == norm else s for s in whole], norm),
        ([replace(s, shape=(63,)) if s.name == norm else s for s in whole], norm),
    ]
    for manifest, name in cases:
        senders = (SenderSpec(Rendezvous("127.0.0.1", 1), tuple(manifest)),)
        with pytest.raises(WeightExchangeError, match=name):
            engine.call("connect_weights", senders, 0, 1, WEIGHTS, "gloo")


def test_an_untied_model_with_biases_is_the_pushed_one_after_every_push(engine, fleet):
    first, second = tiny_model(**MODEL), tiny_model(**MODEL, seed=1)
    asked = requests(8)
    for model, other in ((first, second), (second, first), (first, second)):
        fleet.push(model)
        done = engine.run(asked)
        assert mean_difference(model, asked, done, TEMPERATURE) < 1e-5
        assert mean_difference(other, asked, done, TEMPERATURE) > 0.1


def test_i5_an_engine_that_got_half_a_push_refuses_all_work_afterwards(engine, fleet):
    tensors = named(tiny_model(**MODEL, seed=1))
    wrong = [(name, torch.ones(3) if i == 9 else t) for i, (name, t) in enumerate(tensors)]
    engine.begin("pull_weights", 99)
    with pytest.raises(WeightExchangeError, match=wrong[9][0]):
        fleet.sender.send(99, iter(wrong))
    with pytest.raises(WeightExchangeError, match=wrong[9][0]):
        engine.end()
    for method, arguments in [
        ("submit", (requests(1),)),
        ("collect", (0.1,)),
        ("pull_weights", (1,)),
    ]:
        with pytest.raises(WeightExchangeError, match="pull of version 99"):
            engine.call(method, *arguments)
