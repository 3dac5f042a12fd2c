"""The next part is read while the last is used; large parts only when their turn comes."""

from __future__ import annotations

import threading

import pytest

from megatron_grpo.conversion.read_ahead import AHEAD_BYTES, read_ahead


def test_the_next_item_is_read_while_the_last_is_used() -> None:
    second_is_read = threading.Event()

    def read(item: int) -> int:
        if item == 2:
            second_is_read.set()
        return 10 * item

    stream = read_ahead([(1, 1), (1, 2), (1, 3)], read)
    assert next(stream) == (1, 10)
    assert second_is_read.wait(10)
    assert list(stream) == [(2, 20), (3, 30)]


def test_no_more_than_one_value_waits() -> None:
    read: list[int] = []
    stream = read_ahead([(1, item) for item in range(5)], lambda item: read.append(item))
    next(stream)
    next(stream)
    assert set(read) <= {0, 1, 2}
    stream.close()
    assert set(read) <= {0, 1, 2}


def test_a_large_item_is_read_when_its_turn_comes() -> None:
    read: list[str] = []
    items = [(1, "small"), (AHEAD_BYTES + 1, "large"), (1, "last")]
    stream = read_ahead(items, lambda item: read.append(item))
    next(stream)
    assert read == ["small"]
    assert [item for item, _ in stream] == ["large", "last"]
    assert read == ["small", "large", "last"]


def test_an_error_comes_at_the_turn_of_its_item() -> None:
    def read(item: int) -> int:
        if item == 1:
            raise ValueError("broken")
        return item

    stream = read_ahead([(1, 0), (1, 1), (1, 2)], read)
    assert next(stream) == (0, 0)
    with pytest.raises(ValueError, match="broken"):
        next(stream)
