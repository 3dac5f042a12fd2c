"""The tiles of linear_logprob, and what they take of the memory."""

import itertools

import pytest
import torch
from grpo_kernels import linear_logprob
from grpo_kernels.chunked import plan_chunk


def test_chunks_follow_the_memory_budget() -> None:
    """2048 x 151936: 2.5% of the fp32 logits is 31 MB, so 3776 columns with all tokens whole."""
    chunk = plan_chunk(2048, 151936, bytes_per_column=0)
    assert (chunk.tokens, chunk.vocab) == (2048, 3776)
    long = plan_chunk(1 << 20, 151936, bytes_per_column=0)
    assert long.tokens * long.vocab * 4 <= 256 << 20
    assert long.vocab >= 1024
    assert plan_chunk(1, 10, bytes_per_column=0).vocab == 10


@pytest.mark.parametrize("added", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("chunk_tokens", [None, 1])
def test_few_tokens_of_a_large_vocabulary_keep_to_the_memory_budget(
    added: bool, chunk_tokens: int | None
) -> None:
    """Whether a block of the weight gradient is summed beside its destination or straight in it."""
    hidden_TD, weight_VD = torch.randn(2, 512).bfloat16(), torch.randn(65536, 512).bfloat16()
    weight_VD.requires_grad_()
    buffer = torch.zeros_like(weight_VD) if added else None
    logprob_T, _ = linear_logprob(
        hidden_TD,
        weight_VD,
        torch.tensor([7, 65535]),
        main_grad=buffer,
        chunk_tokens=chunk_tokens,
        with_entropy=False,
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        logprob_T.sum().backward()
    log = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(
        itertools.accumulate(e.nbytes() for e in sorted(log, key=lambda event: event.start_ns()))
    )
    peak = max(held)
    assert peak > 0
    returned = 0 if added else weight_VD.numel() * 2
    # 4 MiB for tiles and the block; a piece of a product, and what torch widens of it.
    assert peak - returned < 16 << 20
