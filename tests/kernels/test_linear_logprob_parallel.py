"""linear_logprob over a tensor-parallel group of gloo processes, against the one-process oracle."""

import itertools

import pytest
from logprob_oracle import Case
from logprob_workers import GlooWorld, run_cases

GRID = [
    Case(dtype, temperature, entropy, ignored, tied, chunk, sequence_parallel, bias=not tied)
    for dtype, temperature, entropy, ignored, tied, chunk, sequence_parallel in itertools.product(
        ["fp32", "bf16"],
        [0.5, 1.0, 1.7, "per token"],
        [True, False],
        ["first", "last", "all"],
        [False, True],
        [1, 5, None],
        [False, True],
    )
]


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_every_rank_agrees_with_the_oracle_on_values_and_its_share_of_the_gradients(
    gloo_world: GlooWorld, group_size: int, dtype: str, chunk: int | None
) -> None:
    cases = [case for case in GRID if case.dtype == dtype and case.chunk == chunk]
    assert len(cases) == 96
    for rank, wrong in gloo_world.run(run_cases, group_size, cases).items():
        assert not wrong, f"rank {rank}: {wrong[:5]} and {len(wrong)} in all"
