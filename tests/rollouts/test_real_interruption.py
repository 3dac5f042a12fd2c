"""Rollouts of a real model cut off by a push and resumed, held against plain Hugging Face."""

from __future__ import annotations

import numpy as np
import torch
from contracts.generator import expected_logprobs
from rollouts.fakes import FakeEnvironment, decode, make_prompt
from tiny import save_tiny, tiny_model

from megatron_grpo.config import ReferenceGeneratorConfig
from megatron_grpo.generation.reference import ReferenceGenerator
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.types import Completion
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

TEMPERATURE = 0.7


def test_tokens_before_and_after_a_resumption_have_the_logprobs_of_their_own_weights(tmp_path):
    folder = save_tiny(tmp_path, "qwen2", seed=0)
    channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=20)
    generator = ReferenceGenerator(
        folder, ReferenceGeneratorConfig(), TEMPERATURE, [129], channel.receivers[0]
    )
    models = [tiny_model("qwen2", seed=seed).eval() for seed in range(2)]

    def push(version: int) -> None:
        pull = generator.pull_weights(version)
        with torch.no_grad():
            channel.sender.send(version, models[version].named_parameters())
        pull.result(20)

    push(0)
    made = Collector(FakeEnvironment(), generator, decode, seed=3, deadline_s=20)
    made.start(
        [GroupRequest("short", make_prompt(1), 1, 4), GroupRequest("long", make_prompt(2), 1, 12)]
    )
    [short] = made.commit(made.receive())  # four rounds of one token each
    made.interrupt()
    assert made.commit(made.receive()) == []
    push(1)
    made.go_on(oldest_allowed=0)
    [long] = made.commit(made.receive())
    generator.close()
    assert short.group_id == "short" and long.group_id == "long"
    [rollout] = long.rollouts
    versions = rollout.versions[2:]
    cut = int((versions == 0).sum())
    assert 3 <= cut <= 5 and versions.tolist() == [0] * cut + [1] * (12 - cut)
    whole = Completion("", rollout.token_ids[2:], rollout.behavior_logprobs[2:], versions, "length")
    old, new = (
        expected_logprobs(
            m,
            [1, 12],
            whole,
        )
        for m in models
    )
    wanted = torch.where(torch.arange(12) < cut, old, new).numpy()
    np.testing.assert_allclose(whole.behavior_logprobs, wanted, atol=1e-5)
    assert np.abs(old - new).max() > 0.1  # the check has power
