"""Groups read from a data set instead of sampled: the source of SFT and DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.protocols import SourceState
from megatron_grpo.rollouts.sources import PromptOrder
from megatron_grpo.types import Rollout, RolloutGroup


class DataSource:
    """Implements protocols.GroupSource. Rows come in epochs, each shuffled by the run's seed.

    The same row has another group id every time it comes, and the same prompt id. Its versions are
    those of the weights it is about to train: data has no age.

    Args:
        groups: all training rows.
        fingerprint: of the data set.
    """

    def __init__(
        self, groups: Sequence[RolloutGroup], groups_per_step: int, seed: int, fingerprint: str
    ) -> None:
        if groups_per_step > len(groups):
            raise ConfigError(
                "rollouts.groups_per_step",
                f"is more than the {len(groups)} training rows",
                found=groups_per_step,
                remedy="take smaller steps, or give more rows",
            )
        self._groups = list(groups)
        self._per_step = groups_per_step
        self._order = PromptOrder(len(groups), seed)
        self._fingerprint = fingerprint
        self._next = 0
        self._version = -1
        self._taken = True

    def next_groups(self) -> list[RolloutGroup]:
        if self._taken:
            raise RolloutError(
                "data",
                f"was asked twice under version {self._version}",
                remedy="call published after every step",
            )
        positions = range(self._next, self._next + self._per_step)
        self._next += self._per_step
        self._taken = True
        return [self._at(position) for position in positions]

    def pause(self) -> None:
        """Nothing is generated."""

    def metrics(self) -> dict[str, float]:
        return {}

    def published(self, version: int) -> None:
        self._version = version
        self._taken = False

    def state(self) -> SourceState:
        return SourceState(self._next, self._version, self._fingerprint)

    def restore(self, state: SourceState) -> None:
        """Go on from a saved position; call it before the first `published`.

        Raises:
            RolloutError: the position belongs to other data.
        """
        if state.fingerprint != self._fingerprint:
            raise RolloutError(
                "data",
                f"changed since the position was saved: fingerprint {self._fingerprint[:12]}",
                found=state.fingerprint[:12],
                remedy="restore the file and the task's settings, or start a new run",
            )
        self._next = state.next_prompt

    def close(self) -> None:
        """Nothing is held open."""

    def _at(self, position: int) -> RolloutGroup:
        group = self._groups[self._order.row(position)]
        group_id = f"{position}/{group.group_id}"
        rollouts = tuple(
            self._turn(rollout, group_id, place) for place, rollout in enumerate(group.rollouts)
        )
        return replace(group, group_id=group_id, rollouts=rollouts)

    def _turn(self, rollout: Rollout, group_id: str, place: int) -> Rollout:
        versions = np.where(rollout.loss_mask, self._version, -1).astype(np.int32)
        return replace(
            rollout, rollout_id=f"{group_id}/{place}", group_id=group_id, versions=versions
        )
