"""Weights into a real vLLM engine of an untied model with biases: whole and proven, or an error."""

from __future__ import annotations

from dataclasses import replace

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
from rich.console import Console
from tiny import save_tiny, tiny_model
from weights.exchange import spec_of

from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_megatron
from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.disk import DiskSender

pytestmark = pytest.mark.slow

# 32 per head: vLLM's attention on a CPU has no kernel for 16.
MODEL = {"family": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}
FROZEN = frozenset(name for name in named(tiny_model(**MODEL)) if ".layers.0." in name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("untied"), **MODEL)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """Of a converted folder, which holds nothing vLLM reads: all it has was pushed."""
    converted = tmp_path_factory.mktemp("converted") / "megatron"
    to_megatron(HfFolder(folder), converted, Layout(), Console(quiet=True))
    engine = start_engine(converted)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def fleet(engine, folder):
    fleet = Fleet([engine], folder, frozen=FROZEN)
    yield fleet
    fleet.sender.close()


def test_an_exchange_in_another_dtype_is_refused_before_anyone_joins(fleet, engine):
    with pytest.raises(WeightExchangeError, match=r"carries bfloat16.*computes in float32"):
        engine.call("connect_weights", replace(fleet.exchange, dtype="bfloat16"), 0)


def test_an_untied_model_with_biases_is_the_pushed_one_after_every_push(engine, fleet):
    first, second = tiny_model(**MODEL), tiny_model(**MODEL, seed=1)
    asked = requests(8)
    for model, other in ((first, second), (second, first), (first, second)):
        fleet.sender.send_everything_next()
        fleet.push(model)
        done = engine.run(asked)
        assert mean_difference(model, asked, done, TEMPERATURE) < 1e-5
        assert mean_difference(other, asked, done, TEMPERATURE) > 0.1


def test_a_pushed_engine_is_bit_for_bit_one_that_started_with_these_weights(
    engine, fleet, tmp_path
):
    other = start_engine(save_tiny(tmp_path, **MODEL, seed=1))
    try:
        fleet.sender.send_everything_next()
        fleet.push(tiny_model(**MODEL, seed=1))
        other.call("probe_pretend_version", fleet.version)
        asked = requests(8) + requests(2, name="greedy", greedy=True)
        pushed, fresh = engine.run(asked), other.run(asked)
        for name, completion in pushed.items():
            assert completion.token_ids.tolist() == fresh[name].token_ids.tolist()
            assert (completion.behavior_logprobs == fresh[name].behavior_logprobs).all()
        held, loaded = engine.call("probe_holdings"), other.call("probe_holdings")
        assert held.keys() == loaded.keys() and len(held) > 12
        assert all(torch.equal(held[names], loaded[names]) for names in held)
    finally:
        other.stop()


def test_a_frozen_layer_is_not_sent_again_and_stays_what_it_was(engine, fleet):
    first, second = tiny_model(**MODEL), tiny_model(**MODEL, seed=1)
    fleet.sender.send_everything_next()
    fleet.push(first)
    fleet.push(second)
    mixed = tiny_model(**MODEL, seed=1)
    mixed.load_state_dict({name: named(first)[name] for name in FROZEN}, strict=False)
    asked = requests(8)
    done = engine.run(asked)
    assert mean_difference(mixed, asked, done, TEMPERATURE) < 1e-5
    assert mean_difference(second, asked, done, TEMPERATURE) > 0.01


def test_an_engine_that_comes_late_has_the_newest_weights_on_disk_when_it_has_joined(
    engine, fleet, folder, tmp_path
):
    first, second = tiny_model(**MODEL), tiny_model(**MODEL, seed=1)
    exchange = replace(fleet.exchange, backend="disk", folder=str(tmp_path))
    sender = DiskSender(tmp_path, exchange, spec_of(folder), 0)
    for version, model in ((40, first), (41, second)):
        sender.send(version, named(model))
    engine.call("connect_weights", exchange, 0)
    assert engine.call("version") == 41
    asked = requests(8)
    done = engine.run(asked)
    assert mean_difference(second, asked, done, TEMPERATURE) < 1e-5
    assert {int(v) for c in done.values() for v in c.versions} == {41}
    sender.send(42, named(first))
    engine.call("pull_weights", 42)
    assert mean_difference(first, asked, engine.run(asked), TEMPERATURE) < 1e-5


def test_i5_an_engine_that_got_half_a_push_refuses_all_work_afterwards(engine, folder):
    fleet = Fleet([engine], folder)
    tensors = named(tiny_model(**MODEL, seed=1))
    name = list(tensors)[20]
    tensors[name] = torch.ones(3)
    engine.begin("pull_weights", 99)
    with pytest.raises(WeightExchangeError, match=name):
        fleet.sender.send(99, tensors)
    with pytest.raises(WeightExchangeError, match=name):
        engine.end()
    for method, arguments in [
        ("submit", (requests(1),)),
        ("collect", (0.1,)),
        ("pull_weights", (1,)),
    ]:
        with pytest.raises(WeightExchangeError, match="pull of version 99"):
            engine.call(method, *arguments)
    fleet.sender.close()
