"""What a started Megatron rank records while it trains; run by `megatron_ranks`."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_cases import Case, running


def spans_case(
    rank: int, world: int, case: Case, folder: Path
) -> tuple[int, float, float, list[tuple[str, float, float]]]:
    """(micro-batches, start and end of the call, spans that it left)."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        start = time.time()
        policy.forward_backward(mine, case.temperature, case.loss)
        spans = [(span.name, span.start_s, span.end_s) for span in policy.spans.read()]
        return len(mine), start, time.time(), spans
