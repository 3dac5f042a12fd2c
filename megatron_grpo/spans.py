"""What a process did and when: a light record that is always kept, for `megatron-grpo profile`.

    with spans("forward"): ...       one Span; a microsecond or two
    spans.read()                     all of them, in Unix time, comparable between processes

Spans are timed by the monotonic clock and told in Unix time by one offset taken at `read`: on one
machine all processes share both clocks; between machines they agree as well as their time service.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

# Newest kept: a step of a rank leaves four per micro-batch, so this is hundreds of steps.
KEPT_SPANS = 50_000


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a process did.

    Attributes:
        start_s, end_s: Unix time.
        attrs: numbers that belong to it, e.g. {"steps": 12} or {"peak_bytes": 3e9}.
    """

    name: str
    start_s: float
    end_s: float
    attrs: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class SpanRecorder:
    """Keeps the newest spans of one process. Appending is safe from any thread.

    >>> spans = SpanRecorder()
    >>> with spans("decode") as attrs:
    ...     attrs["steps"] = 3
    >>> [(span.name, span.attrs) for span in spans.read()]
    [('decode', {'steps': 3})]
    """

    def __init__(self, kept: int = KEPT_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=kept)
        self._before_read: list[Callable[[], None]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, float]]:
        """Record a block, also one that raises; yields the span's attrs."""
        attrs: dict[str, float] = {}
        start = time.monotonic()
        try:
            yield attrs
        finally:
            self._spans.append(Span(name, start, time.monotonic(), attrs))

    def add(self, name: str, start_monotonic: float, end_monotonic: float) -> None:
        """Record what was timed elsewhere."""
        self._spans.append(Span(name, start_monotonic, end_monotonic))

    def before_read(self, action: Callable[[], None]) -> None:
        """Called by `read` first, for times that are known later, such as a GPU's."""
        self._before_read.append(action)

    def read(self) -> list[Span]:
        """All spans that are kept, in the order they ended. They stay."""
        for action in self._before_read:
            action()
        offset = time.time() - time.monotonic()
        return [
            replace(span, start_s=span.start_s + offset, end_s=span.end_s + offset)
            for span in self._spans.copy()
        ]


@runtime_checkable
class Recording(Protocol):
    """An object with a record of its own, which its host adds to."""

    spans: SpanRecorder
