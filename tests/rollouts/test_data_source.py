"""Groups out of a data set: the contract, and epochs."""

from __future__ import annotations

import pytest
from contracts.group_source import GROUP_SIZE, GROUPS_PER_STEP, GroupSourceContract
from samples import make_groups

from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.protocols import SourceState
from megatron_grpo.rollouts.data_source import DataSource

ROWS = make_groups(num_groups=5, group_size=GROUP_SIZE)


def open_rows(seed: int = 1, fingerprint: str = "f") -> DataSource:
    return DataSource(ROWS, GROUPS_PER_STEP, seed, fingerprint)


class TestDataSource(GroupSourceContract):
    @pytest.fixture
    def open_source(self):
        return open_rows

    @pytest.fixture
    def publish(self):
        return lambda source, version: source.published(version)


def rows_of(source: DataSource, steps: int) -> list[str]:
    rows = []
    for version in range(steps):
        source.published(version)
        rows += [group.prompt.prompt_id for group in source.next_groups()]
    return rows


def test_every_epoch_has_every_row_once_in_another_order():
    rows = rows_of(open_rows(), 5)  # 10 groups, 2 epochs of 5
    assert sorted(rows[:5]) == sorted(rows[5:]) == sorted(g.prompt.prompt_id for g in ROWS)
    assert rows[:5] != rows[5:]
    assert rows_of(open_rows(seed=2), 5) != rows


def test_g3_a_position_of_other_data_is_refused():
    with pytest.raises(RolloutError, match="changed since the position was saved"):
        open_rows().restore(SourceState(2, 1, "another"))


def test_steps_larger_than_the_data_are_refused():
    with pytest.raises(ConfigError, match="more than the 5 training rows"):
        DataSource(ROWS, 6, 1, "f")
