"""Groups read back from a store, step by step: the source of replays."""

from __future__ import annotations

from megatron_grpo.protocols import RolloutStore, SourceState
from megatron_grpo.types import RolloutGroup


class StoredSource:
    """Implements protocols.GroupSource. What was trained on is what comes, whatever the weights.

    Args:
        store: of the run.
        first_step: whose groups come first.
    """

    def __init__(self, store: RolloutStore, first_step: int) -> None:
        self._store = store
        self._step = first_step

    def next_groups(self) -> list[RolloutGroup]:
        """Raises RolloutError where the store ends."""
        groups = self._store.read(self._step)
        self._step += 1
        return groups

    def pause(self) -> None:
        """Nothing is in flight."""

    def published(self, version: int) -> None:
        """Nothing waits for weights."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> SourceState:
        return SourceState(self._step, self._step - 1, "store")

    def restore(self, state: SourceState) -> None:
        self._step = state.next_prompt

    def close(self) -> None:
        """Nothing is held open."""
