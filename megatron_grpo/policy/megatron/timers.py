"""Megatron's own timing hooks, recorded as spans: every forward, backward and exchange between
stages.

Megatron calls `timers(name).start()` and `.stop()` around them. On a GPU the host runs ahead of the
kernels, so events are recorded in the stream and read later.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from megatron_grpo.spans import KEPT_SPANS, SpanRecorder

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}
EXCHANGE = "exchange"


class SpanTimers:
    """What TransformerConfig.timers wants. Names that are of no use here are timed by nobody."""

    def __init__(self, spans: SpanRecorder, device: torch.device) -> None:
        clock = _HostClock(spans) if device.type == "cpu" else _StreamClock(spans)
        self._timers = {name: _Timer(span, clock) for name, span in _COMPUTE.items()}
        self._exchange = _Timer(EXCHANGE, clock)
        self._nobody = _Nobody()

    def __call__(self, name: str, log_level: int = 0) -> _Timer | _Nobody:
        if name in self._timers:
            return self._timers[name]
        return self._exchange if "recv" in name or "send" in name else self._nobody


class _HostClock:
    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans

    def enter(self, name: str) -> float:
        return time.monotonic()

    def leave(self, name: str, start: Any) -> None:
        self._spans.add(name, start, time.monotonic())


class _StreamClock:
    """CUDA events, turned into the host's time when the spans are read; and NVTX ranges."""

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans
        self._waiting: deque[tuple[str, Any, Any]] = deque(maxlen=KEPT_SPANS)
        spans.before_read(self._settle)

    def enter(self, name: str) -> torch.cuda.Event:
        torch.cuda.nvtx.range_push(name)
        return _recorded_event()

    def leave(self, name: str, start: Any) -> None:
        self._waiting.append((name, start, _recorded_event()))
        torch.cuda.nvtx.range_pop()

    def _settle(self) -> None:
        # Against an event of now: elapsed times are 32-bit milliseconds and coarse over hours.
        mark = _recorded_event()
        torch.cuda.synchronize()
        mark_s = time.monotonic()
        while self._waiting:
            name, start, stop = self._waiting.popleft()
            begin, end = (mark_s - event.elapsed_time(mark) / 1e3 for event in (start, stop))
            self._spans.add(name, begin, end)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Timer:
    def __init__(self, name: str, clock: _HostClock | _StreamClock) -> None:
        self._name = name
        self._clock = clock
        self._started: Any = None

    def start(self, barrier: bool = False) -> None:
        self._started = self._clock.enter(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._clock.leave(self._name, self._started)


class _Nobody:
    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...
