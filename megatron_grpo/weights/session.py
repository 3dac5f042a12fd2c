"""Where all ends of an exchange meet: who has joined, who has failed and why, who has taken what.

One store, hosted by policy rank 0. Data never goes through it; it is the side channel by which any
end tells all others that it gave up, which they read within `FAILURE_POLL_S` instead of sitting in
a collective until its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch.distributed import TCPStore

from megatron_grpo.errors import WeightExchangeError

FAILURE_POLL_S = 0.25
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 2e-5, 2e-3
_FAILED = "weights/failed"


class Session:
    """One end's view of the exchange; made when all have joined.

    Args:
        store: kept alive here.
        me: e.g. "policy rank 0".
        members: every end's name.
        agreed: what must be the same everywhere, e.g. the plan's digest.

    Raises:
        WeightExchangeError: somebody did not join within the deadline, or plans otherwise.
    """

    def __init__(
        self, store: TCPStore, me: str, members: Sequence[str], agreed: str, deadline_s: float
    ) -> None:
        self.store = store
        self.me = me
        self.deadline_s = deadline_s
        self.pushes = 0
        try:
            self._meet(members, agreed, time.monotonic() + deadline_s)
        except RuntimeError as error:
            raise WeightExchangeError(
                me,
                f"the store of the exchange is gone: {one_line(error)}",
                remedy="policy rank 0 has ended; see its log",
            ) from error

    def _meet(self, members: Sequence[str], agreed: str, until: float) -> None:
        self.store.set(f"weights/joined/{self.me}", agreed)
        waiting = list(members)
        while waiting := [m for m in waiting if not self.store.check([f"weights/joined/{m}"])]:
            if time.monotonic() > until:
                raise WeightExchangeError(
                    self.me,
                    f"{', '.join(waiting[:5])} did not join the weight exchange within "
                    f"{self.deadline_s:g} s",
                    remedy="see their logs; weights.deadline_s sets the limit",
                )
            time.sleep(0.01)
        for member in members:
            theirs = self.store.get(f"weights/joined/{member}").decode()
            if theirs != agreed:
                raise WeightExchangeError(
                    member,
                    f"has made another plan of the weights than {self.me}",
                    found=theirs,
                    remedy="both sides must load the same model under one config",
                )

    def fail(self, cause: str) -> None:
        """Tell everybody; only the first cause is kept."""
        with suppress(RuntimeError):  # the store is gone, and with it the place to say so
            self.store.compare_set(_FAILED, "", cause)

    def failure(self) -> str:
        """Why somebody gave up, "" if nobody has.

        Raises RuntimeError if the store, and so the process that hosts it, is gone.
        """
        return self.store.get(_FAILED).decode() if self.store.check([_FAILED]) else ""

    def lost(self, where: str, error: RuntimeError) -> WeightExchangeError:
        """A broken connection is often the consequence of a failure that has been reported."""
        with suppress(RuntimeError):
            if cause := self.failure():
                return gave_up(where, cause)
        return WeightExchangeError(
            where,
            f"connection lost: {one_line(error)}",
            remedy="a process of the exchange has ended; see its log",
        )

    def begin(self, version: int) -> None:
        """This end takes part in the next push, of this version."""
        self.pushes += 1
        self.store.set(self._key("begun", self.me), str(version))

    def take(self) -> None:
        """This end has the weights of the push in use."""
        self.store.set(self._key("taken", self.me), "1")
        self.store.add(self._key("taken", "count"), 1)

    def wait_taken(self, version: int, members: Sequence[str], until: float) -> None:
        """Until all these members have taken the push.

        Raises:
            WeightExchangeError: somebody failed, or had not at the deadline; names them.
        """
        taken = self._key("taken", "count")
        self.wait(
            lambda: self.store.add(taken, 0) >= len(members),
            f"{self.me}, version {version}",
            "taken",
            version,
            until,
            members,
        )

    def wait(
        self,
        done: Callable[[], bool],
        where: str,
        what: str,
        version: int,
        until: float,
        members: Sequence[str],
    ) -> None:
        """Until `done`. Polls, for no store and no backend wakes up for a failure elsewhere.

        Args:
            what: the mark, "begun" or "taken", whose absence tells who is late.

        Raises:
            WeightExchangeError: somebody failed (says why), or the deadline passed (names who of
                `members` is late), or the store or a connection is gone.
        """
        pause = _SHORTEST_SLEEP_S
        next_check = time.monotonic() + FAILURE_POLL_S
        try:
            while not done():
                now = time.monotonic()
                if now > until:
                    raise self.late(where, what, version, members)
                if now > next_check:
                    if cause := self.failure():
                        raise gave_up(where, cause)
                    next_check = now + FAILURE_POLL_S
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP_S)
        except RuntimeError as error:
            raise self.lost(where, error) from error

    def _key(self, what: str, whose: str) -> str:
        return f"weights/push {self.pushes}/{what}/{whose}"

    def late(
        self, where: str, what: str, version: int, members: Sequence[str]
    ) -> WeightExchangeError:
        """The error of a deadline, naming who is behind."""
        names = [m for m in members if not self.store.check([self._key(what, m)])]
        who = f"; {', '.join(names[:5])} had not {what} version {version}" if names else ""
        return WeightExchangeError(
            where,
            f"not done within {self.deadline_s:g} s{who}",
            remedy="see the logs of the other ranks; weights.deadline_s sets the limit",
        )


def gave_up(where: str, cause: str) -> WeightExchangeError:
    return WeightExchangeError(where, f"the other side gave up: {cause}")


def one_line(error: BaseException) -> str:
    """The first line of a library's message, which may carry a C++ stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
