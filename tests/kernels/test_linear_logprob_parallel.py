"""linear_logprob on one process and over tensor-parallel groups of gloo, against the oracle."""

import pytest
from logprob_oracle import Case, full_grid
from logprob_workers import GlooWorld, compare_backends, run_cases

BATCH = {"chunked": 16, "triton": 4}


def assert_agreement(
    world: GlooWorld, group_size: int, cases: list[Case], backend: str = "chunked"
) -> None:
    # In batches, so that the deadline of one request stays far away on a busy machine.
    for start in range(0, len(cases), BATCH[backend]):
        batch = cases[start : start + BATCH[backend]]
        for rank, wrong in world.run(run_cases, group_size, batch, backend).items():
            assert not wrong, f"rank {rank}: {wrong[:5]} and {len(wrong)} in all"


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize(
    ("group_size", "sequence_parallel"),
    [(1, False), (2, False), (2, True), (4, False), (4, True)],
)
def test_every_rank_agrees_with_the_oracle_on_values_and_its_share_of_every_gradient(
    gloo_world: GlooWorld, group_size: int, sequence_parallel: bool, chunk: int | None
) -> None:
    cases = [case for case in full_grid(sequence_parallel) if case.chunk == chunk]
    assert len(cases) == 96
    assert_agreement(gloo_world, group_size, cases)


@pytest.mark.parametrize(("group_size", "sequence_parallel"), [(1, False), (2, False), (4, True)])
def test_interpreted_triton_kernels_agree_with_the_oracle(
    gloo_world: GlooWorld, group_size: int, sequence_parallel: bool
) -> None:
    """Interpreted cases are slow: every seventh, meeting all pairs of options, or every 19th."""
    cases = full_grid(sequence_parallel)[:: 7 if group_size == 1 else 19]
    assert_agreement(gloo_world, group_size, cases, "triton")


@pytest.mark.parametrize(("group_size", "sequence_parallel"), [(1, False), (2, True)])
def test_interpreted_triton_kernels_equal_chunked_to_the_rounding_of_fp32(
    gloo_world: GlooWorld, group_size: int, sequence_parallel: bool
) -> None:
    cases = [case for case in full_grid(sequence_parallel) if case.dtype == "fp32"][3::13]
    assert len(cases) >= 10
    for start in range(0, len(cases), BATCH["triton"]):
        batch = cases[start : start + BATCH["triton"]]
        for rank, wrong in gloo_world.run(compare_backends, group_size, batch).items():
            assert not wrong, f"rank {rank}: {wrong[:5]} and {len(wrong)} in all"
