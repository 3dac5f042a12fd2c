"""Megatron's timing hooks become spans: one forward and one backward per micro-batch and chunk."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from megatron_ranks import rank_pool
from tiny import save_tiny

SLACK_S = 2e-3  # two clocks, read one after the other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "chunks"),
    [({}, 1), ({"pipeline": 2}, 1), ({"pipeline": 2, "virtual_pipeline": 2}, 2)],
    ids=["one rank", "two stages", "two stages of two chunks"],
)
def test_every_forward_and_backward_is_recorded_inside_the_call(
    parallel: dict[str, int], chunks: int, tmp_path: Path
) -> None:
    from megatron_cases import LENGTHS, Case, random_sequences
    from timer_cases import spans_case

    folder = save_tiny(tmp_path / "model", num_hidden_layers=4)
    case = Case(folder, parallel, random_sequences(LENGTHS))
    world = parallel.get("pipeline", 1)
    for microbatches, start, end, spans in rank_pool().run(world, spans_case, case, tmp_path):
        counts = Counter(name for name, _, _ in spans)
        assert microbatches > 1
        assert counts["forward"] == counts["backward"] == microbatches * chunks
        assert (counts["exchange"] > 0) == (world > 1)
        compute = sorted(s for s in spans if s[0] in ("forward", "backward"))
        assert all(start - SLACK_S <= a < b <= end + SLACK_S for _, a, b in compute)
        in_time = sorted((a, b) for _, a, b in compute)
        assert all(one[1] <= two[0] for one, two in pairwise(in_time)), "computed twice at once"
