"""What every protocols.RolloutStore must do. Subclass it, name the class Test..., give `store`.

`reopen` makes another store on the same data, as another process would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from samples import make_group, make_groups, make_rollout

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import RolloutStore
from megatron_grpo.types import Prompt, Reward, RolloutGroup


def odd_groups() -> list[RolloutGroup]:
    """Everything a field can hold that is easily lost: unicode, -0.0, long seeds, dialogues,
    aborts.
    """
    rollout = make_rollout([5, 6], [7, 8, 9, 2], rollout_id="g9.1/0", finish_reason="abort")
    mask = np.array([False, False, True, True, False, True])
    rollout = replace(
        rollout,
        loss_mask=mask,
        behavior_logprobs=np.array([0, 0, -0.1, -0.0, 0, -1e-30], np.float32),
        versions=np.array([-1, -1, 3, 4, -1, 5], np.int32),
        reward=Reward(0.1, reason="timed out: \u221a2 \U0001f600", extracted="\\frac{1}{3}"),
        seed=2**62 - 1,
        text='half a pair \ud83d, a quote ", a\nline and a \x00',
        generate_s=0.1,
    )
    prompt = Prompt("t/\u00e9", np.array([5, 6], np.int32), "caf\u00e9?", "1/3", '{"a": [1]}')
    return [RolloutGroup("g9.1", prompt, (rollout,), '{"b": 2}'), make_group([0.5, -1.5])]


def assert_same_groups(found: list[RolloutGroup], wanted: list[RolloutGroup]) -> None:
    """Equal to the last bit, types included."""
    assert [group.group_id for group in found] == [group.group_id for group in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.metadata == other.metadata
        assert_same_fields(one.prompt, other.prompt)
        for rollout, original in zip(one.rollouts, other.rollouts, strict=True):
            assert_same_fields(rollout, original)


def assert_same_fields(found: object, wanted: object) -> None:
    for name in type(wanted).__slots__:
        one, other = getattr(found, name), getattr(wanted, name)
        assert type(one) is type(other), name
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype, name
            assert one.tobytes() == other.tobytes(), name
        else:
            assert one == other, name


class RolloutStoreContract:
    @pytest.fixture
    def store(self) -> RolloutStore:
        raise NotImplementedError("give the store under test, empty")

    @pytest.fixture
    def reopen(self) -> Callable[[], RolloutStore]:
        raise NotImplementedError("give a function that opens the same data again")

    def test_an_empty_store_has_no_steps(self, store):
        assert store.steps() == []
        with pytest.raises(RolloutError, match=r"holds no such step .*none.*found 1"):
            store.read(1)

    def test_what_is_read_equals_what_was_appended_to_the_last_bit(self, store, reopen):
        steps = {1: make_groups(seed=1), 2: odd_groups(), 5: make_groups(5, 2, seed=5)}
        for step, groups in steps.items():
            store.append(step, groups)
        for opened in (store, reopen()):
            assert opened.steps() == [1, 2, 5]
            for step in (5, 1, 2):
                assert_same_groups(opened.read(step), steps[step])

    def test_a_reader_sees_new_steps_while_another_store_appends(self, store, reopen):
        reader = reopen()
        for step in range(1, 4):
            store.append(step, make_groups(seed=step))
            assert reader.steps() == list(range(1, step + 1))
            assert_same_groups(reader.read(step), make_groups(seed=step))
            assert_same_groups(reader.read(1), make_groups(seed=1))

    def test_appending_goes_on_after_reopening(self, store, reopen):
        store.append(1, make_groups(seed=1))
        again = reopen()
        again.append(2, make_groups(seed=2))
        assert again.steps() == [1, 2]
        assert_same_groups(reopen().read(1), make_groups(seed=1))
        assert_same_groups(reopen().read(2), make_groups(seed=2))

    def test_a_step_without_groups_is_a_step(self, store):
        store.append(1, [])
        store.append(2, make_groups(seed=2))
        assert store.read(1) == []
        assert_same_groups(store.read(2), make_groups(seed=2))

    @pytest.mark.parametrize("step", [3, 2])
    def test_steps_come_in_order_and_once(self, store, step):
        store.append(3, make_groups())
        with pytest.raises(RolloutError, match=f"already holds steps up to 3 .found {step}."):
            store.append(step, make_groups())
        assert store.steps() == [3]

    def test_an_unknown_step_is_an_error_that_says_what_there_is(self, store):
        store.append(2, make_groups())
        store.append(4, make_groups())
        with pytest.raises(RolloutError, match=r"steps: 2 to 4\) \(found 3\)"):
            store.read(3)
