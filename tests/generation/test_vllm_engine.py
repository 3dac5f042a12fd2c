"""Real vLLM engines on a tied model, held against plain Hugging Face; two of them, one sender."""

from __future__ import annotations

import json

import numpy as np
import pytest
from generation.fleet import (
    MAX_MODEL_TOKENS,
    TEMPERATURE,
    Fleet,
    differences,
    greedy_continuation,
    logits,
    mean_difference,
    requests,
    start_engine,
)
from tiny import save_tiny, tiny_model

from megatron_grpo.config import SamplingConfig
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import GenerationRequest

pytestmark = pytest.mark.slow

STOP = {2, 129}
TRAP = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3}
TRAP |= {"max_new_tokens": 5, "eos_token_id": [2, 129], "do_sample": True}
MODEL = {"family": "llama", "tied": True, "head_dim": 32}


@pytest.fixture(scope="module")
def old_model():
    return tiny_model(**MODEL)


@pytest.fixture(scope="module")
def new_model():
    return tiny_model(**MODEL, seed=1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, old_model):
    folder = save_tiny(tmp_path_factory.mktemp("tied"), **MODEL)
    (folder / "generation_config.json").write_text(json.dumps(TRAP))
    engines = [start_engine(folder) for _ in range(2)]
    with pytest.raises(RolloutError, match="no weights of the policy yet") as refusal:
        engines[0].call("submit", requests(1))
    assert "-1" in str(refusal.value)
    assert engines[0].call("version") == -1
    fleet = Fleet(engines, folder)
    yield fleet
    fleet.stop()


@pytest.fixture
def engine(fleet, old_model):
    """The first engine, under the old weights."""
    fleet.push(old_model)
    return fleet.engines[0]


def test_a1_behavior_logprobs_are_of_the_tempered_full_vocabulary(engine, old_model):
    asked = requests(16)
    done = engine.run(asked)
    assert mean_difference(old_model, asked, done, TEMPERATURE) < 1e-5
    # The check has power: without the temperature the difference is large.
    assert mean_difference(old_model, asked, done, 1.0) > 0.1


def test_b5_a_tied_model_has_new_embedding_and_head_after_a_push(fleet, old_model, new_model):
    for model, other in ((new_model, old_model), (old_model, new_model)):
        (report, _) = fleet.push(model)
        assert report.version == fleet.version and report.num_tensors == 20
        asked = requests(8)
        for engine in fleet.engines:
            done = engine.run(asked)
            assert mean_difference(model, asked, done, TEMPERATURE) < 1e-5
            assert mean_difference(other, asked, done, TEMPERATURE) > 0.1
            assert all((c.versions == fleet.version).all() for c in done.values())
            assert engine.call("version") == fleet.version


def test_a2_a_restricted_support_is_refused_before_any_engine():
    with pytest.raises(ValueError, match="top_p"):
        SamplingConfig(top_p=0.8)
    with pytest.raises(ValueError, match="top_k"):
        SamplingConfig(top_k=20)
    assert issubclass(ConfigError, ValueError)


def test_a3_and_n1_vllm_gets_our_parameters_and_ids_and_nothing_of_the_checkpoints(engine):
    asked = requests(8, max_new_tokens=64)
    greedy = requests(1, name="greedy", max_new_tokens=64, greedy=True)
    engine.call("submit", [*asked, *greedy])
    held = engine.call("probe_parameters")
    for request in [*asked, *greedy]:
        told = held[request.request_id]
        assert told["prompt"] == request.prompt_ids.tolist()
        assert told["temperature"] == (0.0 if request.greedy else TEMPERATURE)
        assert (told["top_p"], told["top_k"], told["min_p"]) == (1.0, 0, 0.0)
        assert told["repetition_penalty"] == 1.0
        assert (told["presence_penalty"], told["frequency_penalty"]) == (0.0, 0.0)
        assert (told["max_tokens"], told["min_tokens"]) == (64, 0)
        assert told["stop_token_ids"] == [2, 129] and told["eos_token_id"] is None
        assert not told["stop"] and not told["logit_bias"] and not told["bad_words"]
        assert request.greedy or told["seed"] == request.seed
    done = {}
    while len(done) < 9:
        done |= {c.request_id: c for c in engine.call("collect", 5.0)}
    # The checkpoint's limit of 5 tokens is not ours.
    assert any(len(c.token_ids) == 64 and c.finish_reason == "length" for c in done.values())


def test_every_stop_token_of_the_list_ends_a_completion_and_is_its_last_token(engine):
    done = engine.run(requests(64, max_new_tokens=150)).values()
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for completion in done:
        stops = [i for i, token in enumerate(completion.token_ids) if int(token) in STOP]
        if completion.finish_reason == "stop":
            assert stops == [len(completion.token_ids) - 1]
        else:
            assert stops == [] and len(completion.token_ids) == 150
    assert {int(c.token_ids[-1]) for c in done if c.finish_reason == "stop"} == STOP


def test_a_seeded_request_gives_the_same_tokens_whatever_else_is_in_the_batch(engine):
    asked = requests(24)
    together = engine.run(asked)
    for request in asked[:6]:
        alone = engine.run([request])[request.request_id]
        assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()
    same_prompt = engine.run(requests(8, prompt=10, name="p"))
    assert len({tuple(c.token_ids.tolist()) for c in same_prompt.values()}) == 8


def test_two_engines_under_the_same_weights_answer_alike(fleet, engine):
    asked = requests(12)
    first, second = (one.run(asked) for one in fleet.engines)
    for name, completion in first.items():
        assert completion.token_ids.tolist() == second[name].token_ids.tolist()
        np.testing.assert_allclose(
            completion.behavior_logprobs, second[name].behavior_logprobs, atol=1e-6
        )


def test_greedy_requests_take_the_most_likely_token_in_a_mixed_batch(engine, old_model):
    greedy = requests(4, name="greedy", greedy=True)
    done = engine.run([*requests(4), *greedy])
    for request in greedy:
        completion = done[request.request_id]
        best = logits(old_model, request.prompt_ids, completion.token_ids).argmax(-1)
        assert completion.token_ids.tolist() == best.tolist()
    assert mean_difference(old_model, greedy, done, 1.0) < 1e-5


def test_samples_follow_the_distribution(engine, old_model):
    """4,000 first tokens of one prompt: chi-square over the ten likeliest ids and the rest."""
    prompt = np.array([5, 6, 7], np.int32)
    asked = [GenerationRequest(f"x{i}", prompt, i, 1) for i in range(4000)]
    drawn = np.array([c.token_ids[0] for c in engine.run(asked).values()])
    scores = logits(old_model, prompt, np.array([0])) / TEMPERATURE
    probs = scores.softmax(-1)[0].numpy()
    likely = np.argsort(-probs)[:10]
    expected = np.append(probs[likely], 1 - probs[likely].sum()) * len(drawn)
    counts = np.array([(drawn == token).sum() for token in likely])
    observed = np.append(counts, len(drawn) - counts.sum())
    assert ((observed - expected) ** 2 / expected).sum() < 29.6  # 0.999 quantile at 10 degrees


def test_b1_a_cached_prefix_is_dropped_with_its_weights(fleet, engine, new_model):
    one, again, after = (
        requests(1, name=name, prompt=100, greedy=True, max_new_tokens=24)[0]
        for name in ("one", "again", "after")
    )
    assert engine.call("probe_cached_tokens", one) == 0
    assert engine.call("probe_cached_tokens", again) == 96  # three whole blocks of 32
    fleet.push(new_model)
    assert engine.call("probe_cached_tokens", after) == 0
    done = engine.run([one])["one0"]  # from the cache of the new weights
    expected = greedy_continuation(new_model, one.prompt_ids, 24, STOP)
    assert done.token_ids.tolist() == expected.tolist()
    assert next(differences(new_model, [one], {"one0": done}, 1.0)).max() < 1e-4


def test_b1_a_request_in_flight_goes_on_under_the_new_weights_on_its_own_prefix(
    fleet, engine, old_model, new_model
):
    asked = requests(3, prompt=70, max_new_tokens=100)
    asked += requests(1, name="greedy", prompt=70, max_new_tokens=100, greedy=True)
    engine.call("submit", asked)
    cut = engine.call("probe_step_until", "greedy0", 20)
    assert cut == 20
    fleet.push(new_model)
    done = {}
    while len(done) < 4:
        done |= {c.request_id: c for c in engine.call("collect", 5.0)}
    old, new = fleet.version - 1, fleet.version
    spanning = [r for r in asked if len(done[r.request_id].token_ids) > cut]
    assert len(spanning) >= 2
    for request in spanning:
        completion = done[request.request_id]
        expected = np.where(np.arange(len(completion.token_ids)) < cut, old, new)
        assert completion.versions.tolist() == expected.tolist()
        temperature = 1.0 if request.greedy else TEMPERATURE
        before = next(differences(old_model, [request], done, temperature))[:cut]
        after = next(differences(new_model, [request], done, temperature))[cut:]
        assert before.max() < 1e-4 and after.max() < 1e-4
    greedy = done["greedy0"].token_ids
    prefix = np.concatenate([asked[3].prompt_ids, greedy[:cut]])
    expected = greedy_continuation(new_model, prefix, 100 - cut, STOP)
    assert greedy[cut:].tolist() == expected.tolist()


@pytest.mark.parametrize(("rule", "tokens"), [("finish", 40), ("abort", 20)])
def test_requests_in_flight_finish_or_stop_under_the_old_weights_where_the_config_says_so(
    fleet, engine, old_model, new_model, rule, tokens
):
    old = fleet.version
    asked = requests(3, prompt=70, max_new_tokens=40, greedy=True)
    engine.call("submit", asked)
    engine.call("probe_step_until", "r0", 20)
    engine.call("probe_running_requests", rule)
    try:
        fleet.push(new_model)
    finally:
        engine.call("probe_running_requests", "keep")
    done = {c.request_id: c for c in engine.call("collect", 5.0)}
    expected = greedy_continuation(old_model, asked[0].prompt_ids, tokens, STOP).tolist()
    assert len(done) == 3 and engine.call("in_flight") == []
    for completion in done.values():
        assert completion.token_ids.tolist() == expected
        assert (completion.finish_reason == "abort") is (rule == "abort")
        assert (completion.versions == old).all()
    after = engine.run(requests(1, name="after", prompt=70, greedy=True, max_new_tokens=8))
    expected = greedy_continuation(new_model, asked[0].prompt_ids, 8, STOP).tolist()
    assert after["after0"].token_ids.tolist() == expected


def test_kept_caches_serve_their_own_requests_only(fleet, engine, old_model, new_model):
    asked = requests(1, name="kept", prompt=70, max_new_tokens=60, greedy=True)
    engine.call("probe_running_requests", "keep_cache")
    try:
        engine.call("submit", asked)
        cut = engine.call("probe_step_until", "kept0", 20)
        fleet.push(new_model)
        [fresh] = requests(1, name="fresh", prompt=70, max_new_tokens=8, greedy=True)
        assert engine.call("probe_cached_tokens", fresh) == 0
        done = {c.request_id: c for c in engine.call("collect", 5.0)}
        while "kept0" not in done:
            done |= {c.request_id: c for c in engine.call("collect", 5.0)}
    finally:
        engine.call("probe_running_requests", "keep")
    kept = done["kept0"]
    assert len(kept.token_ids) > cut
    assert set(kept.versions[:cut]) == {fleet.version - 1}
    assert set(kept.versions[cut:]) == {fleet.version}
    # The new weights on the old weights' keys and values: near neither model.
    assert next(differences(old_model, asked, done, 1.0))[:cut].max() < 1e-4
    assert next(differences(new_model, asked, done, 1.0))[cut:].max() > 1e-3


def test_an_aborted_request_comes_out_with_what_it_has_and_the_others_finish(engine, old_model):
    asked = requests(4, prompt=8, max_new_tokens=120, greedy=True)
    late = requests(1, name="late")
    engine.call("submit", asked)
    engine.call("probe_step_until", "r0", 10)
    engine.call("submit", late)
    engine.call("abort", ["r0", "late0", "never asked"])
    done = {}
    while len(done) < 5:
        done |= {c.request_id: c for c in engine.call("collect", 5.0)}
    assert done["r0"].finish_reason == "abort"
    assert done["r0"].token_ids.tolist() == done["r1"].token_ids[:10].tolist()
    assert mean_difference(old_model, asked, done, 1.0) < 1e-5
    assert done["late0"].finish_reason == "abort" and len(done["late0"].token_ids) == 0
    assert {done[f"r{i}"].finish_reason for i in (1, 2, 3)} <= {"length", "stop"}
    assert engine.call("in_flight") == [] and engine.call("collect", 0.1) == []


def test_g1_a_budget_is_cut_to_what_fits_and_a_prompt_that_fills_the_model_is_refused(engine):
    def sized(name, tokens, budget):
        prompt = np.full(tokens, 7, np.int32)
        return GenerationRequest(name, prompt, seed=0, max_new_tokens=budget, greedy=True)

    limit = MAX_MODEL_TOKENS
    done = engine.run([sized("cut", limit - 4, 64), sized("one", limit - 1, 64), sized("ok", 3, 2)])
    assert {n: len(c.token_ids) for n, c in done.items()} == {"cut": 4, "one": 1, "ok": 2}
    assert {c.finish_reason for c in done.values()} == {"length"}
    for bad, problem in [
        (sized("full", limit, 1), f"1 to {limit - 1} tokens"),
        (sized("long", limit + 1, 1), f"1 to {limit - 1} tokens"),
        (sized("broke", 3, 0), "budget of at least 1"),
        (GenerationRequest("odd", np.array([130], np.int32), 0, 4), "vocabulary of 130"),
        (GenerationRequest("neg", np.array([-1], np.int32), 0, 4), "vocabulary of 130"),
        (sized("fine", 3, 4), "in flight already"),
    ]:
        with pytest.raises(RolloutError, match=problem) as error:
            engine.call("submit", [sized("fine", 3, 4), bad])
        assert f"request {bad.request_id}" in str(error.value)
    # A refused batch leaves nothing behind.
    assert engine.call("in_flight") == []
