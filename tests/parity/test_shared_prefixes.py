"""Groups whose prompt is computed once give the gradients of sequences computed one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_oracle import Oracle, relative
from megatron_cases import Case, merged, random_sequences, step_case
from megatron_ranks import one, rank_pool
from tiny import save_tiny, tiny_model

from megatron_grpo.algorithms.packing import TokenSequence

OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05}


def groups(*sizes: tuple[int, tuple[int, ...]]) -> tuple[TokenSequence, ...]:
    """(prompt tokens, response tokens of each rollout) -> sequences with the group's prompt."""
    made: list[TokenSequence] = []
    for number, (prompt, responses) in enumerate(sizes):
        members = random_sequences([(prompt, n) for n in responses], seed=number)
        shared = members[0].token_ids[:prompt]
        for member in members:
            tokens = np.concatenate([shared, member.token_ids[prompt:]]).astype(np.int32)
            made.append(replace(member, token_ids=tokens, group=number))
    return tuple(made)


# Equal and unequal responses, one of a single token, a group that does not fit one micro-batch of
# 64, and a prompt too short to be worth sharing.
SEQUENCES = groups((12, (3, 3, 3)), (20, (1, 9, 4)), (30, (8, 2)), (3, (5, 4)))


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", {}),
        ("qwen3", {"tensor": 2}),
        ("qwen2", {"pipeline": 2}),
        ("llama", {"data": 2}),
        ("qwen3", {"tensor": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_shared_prompts_change_no_number(
    tmp_path: Path, family: Any, parallel: dict[str, int]
) -> None:
    folder = save_tiny(tmp_path / "model", family, tied=True)
    world = int(np.prod(list(parallel.values()) or [1]))
    policy = {"optimizer": OPTIMIZER, "distributed_optimizer": False}
    case = Case(folder, parallel, SEQUENCES, 0.7, microbatch_tokens=64, policy=policy)
    results = rank_pool().run(world, step_case, case, tmp_path)
    oracle = Oracle(tiny_model(family, tied=True), 0.7)
    scores = oracle.scores(SEQUENCES)
    for index, values in (pair for r in results for pair in r["logprobs"]):
        np.testing.assert_allclose(values, scores[index], atol=1e-4)
    want = oracle.backward(SEQUENCES, case.loss)
    assert one([r["stats"][0].loss for r in results]) == pytest.approx(want["loss"], rel=1e-5)
    assert relative(merged(results, "gradients"), oracle.gradients()) < 1e-5
    norm = one([r["updates"][0].grad_norm for r in results])
    assert norm == pytest.approx(oracle.step(OPTIMIZER), rel=1e-5)
    after = {n: p.detach().numpy() for n, p in oracle.model.named_parameters()}
    assert relative(merged(results, "weights"), after) < 1e-5
