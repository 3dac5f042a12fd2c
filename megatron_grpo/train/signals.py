"""Being asked to stop: SIGTERM, SIGUSR1 (a scheduler, ahead of its time limit) and Ctrl-C.

first signal    outside the steps there is nothing to save: raised on the spot. Among the steps
                it is noted, and the loop stops at the next place where the state is whole.
second signal   the process ends at once; a Ray cluster it started ends with it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_grpo.errors import RunStopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether the run was asked to stop, by what and when.

    Attributes:
        signal: its name, "" while nobody asked.
    """

    def __init__(self) -> None:
        self.signal = ""
        self._asked_s = 0.0
        self._among_steps = False

    def ask(self, name: str) -> None:
        """Note the wish to stop, as a signal of that name does.

        Raises:
            RunStopped: outside `among_steps`.
        """
        self.signal, self._asked_s = name, time.monotonic()
        if not self._among_steps:
            raise RunStopped(
                "train",
                f"stopped by {name} outside the steps",
                remedy="run the same command to go on",
            )

    def overdue(self, grace_s: float) -> bool:
        """Whether somebody asked longer ago than this."""
        return bool(self.signal) and time.monotonic() - self._asked_s >= grace_s

    @contextmanager
    def among_steps(self) -> Iterator[None]:
        """Inside the block a first signal is only noted."""
        self._among_steps = True
        try:
            yield
        finally:
            self._among_steps = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Listen inside the block. Only a main thread can; elsewhere nobody ever asks."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.signal:
            os._exit(128 + number)
        request.ask(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
