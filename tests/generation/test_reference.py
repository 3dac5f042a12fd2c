"""The reference generator: the contract, and what is its own."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from contracts.generator import (
    MAX_MODEL_TOKENS,
    STOP_TOKEN_IDS,
    TEMPERATURE,
    GeneratorContract,
    finish,
    request,
)
from safetensors.torch import load_file
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from megatron_grpo.config import ReferenceGeneratorConfig
from megatron_grpo.errors import RolloutError, WeightExchangeError
from megatron_grpo.generation.reference import ReferenceGenerator, sample
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

CONFIG = ReferenceGeneratorConfig(max_model_tokens=MAX_MODEL_TOKENS, max_concurrent=4)


def make_generator(folder, stop_token_ids=STOP_TOKEN_IDS, deadline_s=10.0, manifest_of=None):
    manifest = hugging_face_manifest(manifest_of or folder)
    channel = InProcessChannel(manifest, deadline_s=deadline_s)
    [receiver] = channel.receivers
    return ReferenceGenerator(folder, CONFIG, TEMPERATURE, stop_token_ids, receiver), channel


def publish_with(generator, channel, folder, version):
    pull = generator.pull_weights(version)
    channel.sender.send(version, iter(load_file(folder / "model.safetensors").items()))
    return pull.result(10)


class TestReferenceGenerator(GeneratorContract):
    @pytest.fixture(scope="class")
    def made(self, source):
        generator, channel = make_generator(source)
        yield generator, channel
        generator.close()

    @pytest.fixture(scope="class")
    def generator(self, made):
        return made[0]

    @pytest.fixture(scope="class")
    def publish(self, made):
        return lambda folder, version: publish_with(*made, folder, version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.4076, -1.4076, -2.4076]),
        (0.5, [-0.1429, -2.1429, -4.1429]),
        (2.0, [-0.6803, -1.1803, -1.6803]),
    ],
)
def test_a1_a4_the_sampled_tokens_own_log_probability_by_hand(temperature, expected):
    found = {
        sample(torch.tensor([2.0, 1.0, 0.0]), temperature, torch.Generator().manual_seed(seed))
        for seed in range(300)
    }
    assert {token: round(logprob, 4) for token, logprob in found} == dict(enumerate(expected))


def test_a3_the_checkpoints_generation_config_changes_nothing(folder, tmp_path):
    plain, _ = make_generator(folder, ())
    trapped = save_tiny(tmp_path / "trapped")
    (trapped / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.3,'
        ' "max_new_tokens": 5, "eos_token_id": [7], "do_sample": true}'
    )
    other, _ = make_generator(trapped, ())
    [expected] = finish(plain, [request(seed=5, tokens=20)])
    [found] = finish(other, [request(seed=5, tokens=20)])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.behavior_logprobs.tolist() == expected.behavior_logprobs.tolist()
    assert len(found.token_ids) == 20


def test_before_the_first_pull_tokens_have_version_minus_one(folder):
    generator, _ = make_generator(folder)
    assert generator.version == -1
    [completion] = finish(generator, [request()])
    assert set(completion.versions.tolist()) == {-1}


def test_b1_weights_that_come_mid_completion_count_from_the_next_token(folder, tmp_path):
    other = save_tiny(tmp_path / "other", seed=1)
    generator, channel = make_generator(folder, ())
    publish_with(generator, channel, folder, 0)
    long = request(range(10, 30), tokens=12)
    marker = request((3,), seed=1, tokens=5)
    generator.submit([marker, long])  # they take turns: the marker's end is the middle of the other
    [first] = generator.collect(10.0)
    assert first.request_id == marker.request_id
    publish_with(generator, channel, other, 1)
    [completion] = generator.collect(10.0)
    old = completion.versions.tolist().count(0)
    assert completion.versions.tolist() == [0] * old + [1] * (12 - old)
    assert old in (4, 5)
    # Oracle: each token scored by the weights of its version over the whole prefix, no cache.
    ids = torch.tensor([[*range(10, 30), *completion.token_ids.tolist()]])
    for source, here in ((folder, slice(0, old)), (other, slice(old, 12))):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, 19:-1] / TEMPERATURE, -1)
        expected = scores.gather(-1, ids[0, 20:, None])[here, 0]
        found = torch.from_numpy(completion.behavior_logprobs)[here]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_abort_before_the_first_token_gives_an_empty_completion(folder):
    generator, _ = make_generator(folder)
    one = request()
    generator.submit([one])
    generator.abort([one.request_id])
    [completion] = generator.collect(1.0)
    assert (len(completion.token_ids), completion.finish_reason) == (0, "abort")
    assert completion.token_ids.dtype == np.int32


def test_a_refused_submit_queues_none_of_its_requests(folder):
    generator, _ = make_generator(folder)
    with pytest.raises(RolloutError, match="leave no room"):
        generator.submit([request(), request([5] * MAX_MODEL_TOKENS)])
    with pytest.raises(RolloutError, match="nothing is in flight"):
        generator.collect(1.0)


def test_requests_may_come_from_another_thread_while_one_collects(folder):
    generator, _ = make_generator(folder, ())
    generator.submit([request(seed=s, tokens=20) for s in range(4)])
    added = threading.Event()

    def add() -> None:
        generator.submit([request(seed=9, tokens=1)])
        added.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(add)
        count = 0
        while count < 5:
            count += len(generator.collect(30.0))
    assert added.is_set()


def test_a_failed_pull_leaves_the_old_weights_whole(folder, tmp_path):
    small = save_tiny(tmp_path / "small", num_hidden_layers=1)
    generator, channel = make_generator(folder, manifest_of=small)
    before = [p.detach().clone() for p in generator.model.parameters()]
    with pytest.raises(WeightExchangeError, match=r"do not fit.*layers\.1"):
        publish_with(generator, channel, small, 0)
    assert generator.version == -1
    for old, new in zip(before, generator.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_pull_that_nobody_feeds_ends_at_its_deadline(folder):
    generator, _ = make_generator(folder, deadline_s=0.2)
    with pytest.raises(WeightExchangeError, match=r"pushed nothing within 0\.2 s"):
        generator.pull_weights(0).result(10)


def test_the_log_probability_of_a_certain_token_is_zero_not_nan():
    token_id, logprob = sample(
        torch.tensor([0.0, 500.0, -math.inf]), 1.0, torch.Generator().manual_seed(0)
    )
    assert (token_id, logprob) == (1, 0.0)
