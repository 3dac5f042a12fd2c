"""Reading the next part of a checkpoint while the last one is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")

# Larger parts are read when their turn comes, so that two of them are never in memory.
AHEAD_BYTES = 256 << 20


def read_ahead(
    items: Sequence[tuple[int, Item]], read: Callable[[Item], Value]
) -> Iterator[tuple[Item, Value]]:
    """Every item with what `read` makes of it, in order; at most one value is waiting.

    Args:
        items: (bytes of its value, item).

    Raises:
        What `read` raises, when the item's turn comes.
    """
    waiting: Future[Value] | None = None
    with ThreadPoolExecutor(1) as thread:
        for index, (_, item) in enumerate(items):
            value = read(item) if waiting is None else waiting.result()
            waiting = None
            if index + 1 < len(items) and items[index + 1][0] <= AHEAD_BYTES:
                waiting = thread.submit(read, items[index + 1][1])
            yield item, value
            del value
