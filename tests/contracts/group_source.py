"""What every protocols.GroupSource must do. Subclass it, name the class Test..., give
`open_source`.

`open_source()` makes a source of GROUPS_PER_STEP groups of GROUP_SIZE from the same data each time,
and `publish(source, version)` brings new weights into use and tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import GroupSource
from megatron_grpo.types import RolloutGroup

GROUPS_PER_STEP = 2
GROUP_SIZE = 3


def contents(groups: list[RolloutGroup]) -> list[tuple]:
    """Everything but timings."""
    return [
        (
            rollout.rollout_id,
            group.prompt.prompt_id,
            rollout.seed,
            rollout.token_ids.tolist(),
            rollout.behavior_logprobs.tolist(),
            rollout.reward,
        )
        for group in groups
        for rollout in group.rollouts
    ]


class GroupSourceContract:
    @pytest.fixture
    def open_source(self) -> Callable[[], GroupSource]:
        raise NotImplementedError("give a function that makes the source under test")

    @pytest.fixture
    def publish(self) -> Callable[[GroupSource, int], None]:
        raise NotImplementedError("give a function that publishes a version")

    def steps(self, source: GroupSource, publish, versions) -> list[list[tuple]]:
        taken = []
        for version in versions:
            publish(source, version)
            taken.append(contents(source.next_groups()))
        return taken

    def test_every_step_has_its_number_of_whole_groups_of_unique_ids(self, open_source, publish):
        source = open_source()
        seen: set[str] = set()
        for version in range(3):
            publish(source, version)
            groups = source.next_groups()
            assert len(groups) == GROUPS_PER_STEP
            for group in groups:
                assert len(group.rollouts) == GROUP_SIZE and group.group_id not in seen
                seen.add(group.group_id)
                for rollout in group.rollouts:
                    prompt = group.prompt.token_ids.tolist()
                    assert rollout.token_ids[: rollout.prompt_tokens].tolist() == prompt
                    assert set(rollout.versions[rollout.loss_mask].tolist()) == {version}
        source.close()

    def test_two_runs_take_the_same_steps(self, open_source, publish):
        one, two = open_source(), open_source()
        assert self.steps(one, publish, range(3)) == self.steps(two, publish, range(3))
        one.close()
        two.close()

    def test_h2_a_restored_source_goes_on_where_the_other_stopped(self, open_source, publish):
        straight = open_source()
        wanted = self.steps(straight, publish, range(4))
        straight.close()
        first = open_source()
        assert self.steps(first, publish, range(2)) == wanted[:2]
        state = first.state()
        first.close()
        assert state.next_prompt == 2 * GROUPS_PER_STEP and state.pending == ()
        second = open_source()
        second.restore(state)
        assert self.steps(second, publish, range(2, 4)) == wanted[2:]
        second.close()

    def test_asking_twice_without_publishing_is_an_error_and_no_hang(self, open_source, publish):
        source = open_source()
        with pytest.raises(RolloutError, match="published"):
            source.next_groups()
        publish(source, 0)
        source.next_groups()
        with pytest.raises(RolloutError, match="published"):
            source.next_groups()
        source.close()

    def test_closing_takes_seconds_at_most_and_may_come_at_any_time(self, open_source, publish):
        unused = open_source()
        unused.close()
        source = open_source()
        publish(source, 0)  # work has just begun
        started = time.monotonic()
        source.close()
        source.close()
        assert time.monotonic() - started < 5
