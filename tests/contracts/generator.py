"""What every protocols.Generator must do, held against the plain Hugging Face model.

Subclass it, name the class Test..., and give the fixtures `generator` (made once per class from
`source`, with TEMPERATURE, STOP_TOKEN_IDS and MAX_MODEL_TOKENS) and `publish` (pushes a folder's
weights into it under a version). `source` and `other` are tiny models of the same shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Generator, PullReport
from megatron_grpo.types import Completion, GenerationRequest

TEMPERATURE = 0.7
STOP_TOKEN_IDS = tuple(range(0, 130, 4))
MAX_MODEL_TOKENS = 64
DEADLINE_S = 60.0
NAMES = itertools.count()

Publish = Callable[[Path, int], PullReport]


def request(
    prompt_ids: Sequence[int] = (5, 6, 7), seed: int = 0, tokens: int = 8, greedy: bool = False
) -> GenerationRequest:
    name = f"request-{next(NAMES)}"
    return GenerationRequest(name, np.array(prompt_ids, np.int32), seed, tokens, greedy)


def finish(generator: Generator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Submit, wait for all, return in the order asked."""
    generator.submit(requests)
    found: dict[str, Completion] = {}
    while len(found) < len(requests):
        for completion in generator.collect(DEADLINE_S):
            assert completion.request_id not in found
            found[completion.request_id] = completion
    return [found[one.request_id] for one in requests]


def expected_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], completion: Completion
) -> torch.Tensor:
    """[N] of the completion's tokens, by one pass over the whole sequence."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / TEMPERATURE
    scores = logits - logits.logsumexp(-1, keepdim=True)
    return scores.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


class GeneratorContract:
    """See the module's docstring. `tolerance` is absolute, of a log-probability in fp32."""

    tolerance = 1e-4

    @pytest.fixture(scope="class")
    def source(self, tmp_path_factory) -> Path:
        return save_tiny(tmp_path_factory.mktemp("source"), "qwen2", seed=0)

    @pytest.fixture(scope="class")
    def other(self, tmp_path_factory) -> Path:
        return save_tiny(tmp_path_factory.mktemp("other"), "qwen2", seed=1)

    @pytest.fixture(scope="class")
    def generator(self) -> Generator:
        raise NotImplementedError("give the generator under test, made from `source`")

    @pytest.fixture(scope="class")
    def publish(self) -> Publish:
        raise NotImplementedError("give a function (folder, version) -> PullReport")

    @pytest.fixture(scope="class")
    def versions(self):
        return itertools.count(1)

    @pytest.fixture
    def version(self, publish, source, versions) -> int:
        """The weights of `source` are in use, under this version."""
        version = next(versions)
        publish(source, version)
        return version

    @pytest.fixture
    def model(self, source) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def test_a1_log_probabilities_are_the_trainers_at_the_temperature(
        self, generator, version, model
    ):
        prompts = [[5], [6, 7, 8], list(range(10, 40))]
        requests = [request(prompt, seed) for prompt in prompts for seed in range(3)]
        for one, completion in zip(requests, finish(generator, requests), strict=True):
            expected = expected_logprobs(model, one.prompt_ids.tolist(), completion)
            torch.testing.assert_close(
                torch.from_numpy(completion.behavior_logprobs),
                expected,
                rtol=0,
                atol=self.tolerance,
            )

    def test_samples_follow_the_models_distribution(self, generator, version, model):
        # 400 first tokens: the share of the 10 likeliest ids is within 4 standard errors.
        with torch.no_grad():
            probs = torch.softmax(model(torch.tensor([[5, 6, 7]])).logits[0, -1] / TEMPERATURE, -1)
        top = probs.topk(10)
        completions = finish(generator, [request(seed=seed, tokens=1) for seed in range(400)])
        hits = sum(int(c.token_ids[0]) in top.indices.tolist() for c in completions)
        share = float(top.values.sum())
        assert abs(hits / 400 - share) < 4 * (share * (1 - share) / 400) ** 0.5

    def test_a_seed_decides_its_completion_whatever_else_is_in_flight(self, generator, version):
        alone = finish(generator, [request(seed=3)])[0]
        crowd = [request((9, 9, 9, 9, 9), seed=s, tokens=5) for s in range(4)]
        together = finish(generator, [*crowd, request(seed=3), request(seed=4)])
        assert together[4].token_ids.tolist() == alone.token_ids.tolist()
        assert together[5].token_ids.tolist() != alone.token_ids.tolist()

    def test_greedy_takes_the_likeliest_token_whatever_the_seed(self, generator, version, model):
        requests = [request(seed=seed, greedy=True, tokens=4) for seed in (1, 2)]
        one, two = finish(generator, requests)
        assert one.token_ids.tolist() == two.token_ids.tolist()
        ids = torch.tensor([[5, 6, 7, *one.token_ids.tolist()]])
        with torch.no_grad():
            likeliest = model(ids).logits[0, 2:-1].argmax(-1)
        assert one.token_ids.tolist() == likeliest.tolist()

    def test_completions_end_at_a_stop_token_or_at_the_budget_and_say_which(
        self, generator, version
    ):
        completions = finish(generator, [request(seed=seed, tokens=4) for seed in range(24)])
        for completion in completions:
            ids = completion.token_ids.tolist()
            assert not set(ids[:-1]) & set(STOP_TOKEN_IDS)
            if completion.finish_reason == "stop":
                assert ids[-1] in STOP_TOKEN_IDS
            else:
                assert completion.finish_reason == "length"
                assert len(ids) == 4 and ids[-1] not in STOP_TOKEN_IDS
        assert {c.finish_reason for c in completions} == {"stop", "length"}

    def test_a_budget_of_one_gives_one_token(self, generator, version):
        assert [len(c.token_ids) for c in finish(generator, [request(tokens=1)])] == [1]

    def test_g1_a_long_prompt_shortens_the_budget_and_a_full_one_is_refused(
        self, generator, version
    ):
        # 62 of 64 tokens leave room for 2; 64 leave none.
        prompt = [5] * (MAX_MODEL_TOKENS - 2)
        completion = finish(generator, [request(prompt, tokens=50)])[0]
        assert 1 <= len(completion.token_ids) <= 2
        with pytest.raises(RolloutError, match="request-"):
            generator.submit([request([5] * MAX_MODEL_TOKENS, tokens=50)])
        with pytest.raises(RolloutError):
            generator.collect(1.0)  # nothing of it was queued

    def test_new_weights_are_in_use_once_published_and_tokens_carry_their_version(
        self, generator, publish, other, version, versions
    ):
        before = finish(generator, [request(range(5, 40), seed=1)])[0]
        assert before.versions.tolist() == [version] * len(before.token_ids)
        newer = next(versions)
        report = publish(other, newer)
        assert (report.version, generator.version) == (newer, newer)
        after = finish(generator, [request(range(5, 40), seed=1)])[0]
        assert after.versions.tolist() == [newer] * len(after.token_ids)
        new_model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
        # b1: the same prompt again; a cache of the old weights would show here.
        expected = expected_logprobs(new_model, range(5, 40), after)
        torch.testing.assert_close(
            torch.from_numpy(after.behavior_logprobs), expected, rtol=0, atol=self.tolerance
        )

    def test_aborted_requests_come_out_and_the_rest_goes_on(self, generator, version):
        kept, dropped = request(seed=1), request(seed=2, tokens=40)
        generator.submit([kept, dropped])
        generator.abort([dropped.request_id, "never submitted"])
        found: dict[str, Completion] = {}
        while len(found) < 2:
            found |= {c.request_id: c for c in generator.collect(DEADLINE_S)}
        assert found[dropped.request_id].finish_reason == "abort"
        assert len(found[dropped.request_id].token_ids) < 40
        assert found[kept.request_id].finish_reason in ("stop", "length")

    def test_an_id_in_flight_is_not_taken_twice(self, generator, version):
        one = request(tokens=30)
        generator.submit([one])
        with pytest.raises(RolloutError, match=one.request_id):
            generator.submit([one])
        generator.abort([one.request_id])
        generator.collect(DEADLINE_S)

    def test_collecting_with_nothing_in_flight_raises_at_once(self, generator, version):
        with pytest.raises(RolloutError, match="nothing is in flight"):
            generator.collect(DEADLINE_S)

    def test_the_deadline_names_the_oldest_request(self, generator, version):
        first, second = request(tokens=40), request(tokens=40, seed=1)
        generator.submit([first, second])
        with pytest.raises(RolloutError, match=first.request_id):
            generator.collect(0.0)
        generator.abort([first.request_id, second.request_id])
        left = 2
        while left:
            left -= len(generator.collect(DEADLINE_S))
