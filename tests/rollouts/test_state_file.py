"""What a source leaves behind comes back from disk to the last bit, or is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.rollout_store import assert_same_fields
from samples import make_rollout

from megatron_grpo.errors import CheckpointError
from megatron_grpo.protocols import SourceState
from megatron_grpo.rollouts.state_file import ARRAYS_FILE, read_source_state, write_source_state
from megatron_grpo.types import PartialRollout, Reward, StartedGroup

PARTIAL = PartialRollout(
    index=1,
    token_ids=np.array([7, 8, 9], np.int32),
    loss_mask=np.array([True, False, True]),
    behavior_logprobs=np.array([-0.5, 0, -0.1], np.float32),
    versions=np.array([3, -1, 4], np.int32),
    texts=("7", "half a pair \ud83d"),
    turn_start=2,
    requests=3,
    generate_s=0.1,
)
DONE = replace(
    make_rollout([1, 2], [5, 6, 7], rollout_id="g4.1/0", version=3),
    reward=Reward(0.25, "why \u221a2", "1/3"),
    seed=2**31 - 1,
    text="5 6 7",
    generate_s=1.5,
)
STATE = SourceState(
    9,
    4,
    "data",
    pending=((4, 1), (7, 0)),
    groups=(StartedGroup(4, 1, (DONE,), (PARTIAL,)), StartedGroup(7, 0)),
    replaced=2,
)


def test_a_state_comes_back_to_the_last_bit(tmp_path):
    write_source_state(STATE, tmp_path)
    found = read_source_state(tmp_path)
    assert replace(found, groups=()) == replace(STATE, groups=())
    first, second = found.groups
    assert (first.position, first.attempt, second) == (4, 1, STATE.groups[1])
    assert_same_fields(first.done[0], DONE)
    assert_same_fields(first.partial[0], PARTIAL)


def test_a_state_without_groups_comes_back(tmp_path):
    write_source_state(SourceState(0, -1, "data"), tmp_path)
    assert read_source_state(tmp_path) == SourceState(0, -1, "data")


@pytest.mark.parametrize("tokens", [7, 9])
def test_arrays_of_another_state_are_refused(tmp_path, tokens):
    write_source_state(STATE, tmp_path)
    with np.load(tmp_path / ARRAYS_FILE) as arrays:
        names = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
        ids, masks, logprobs, versions = (np.resize(arrays[name], tokens) for name in names)
    np.savez(
        tmp_path / ARRAYS_FILE,
        token_ids=ids,
        loss_mask=masks,
        behavior_logprobs=logprobs,
        versions=versions,
    )
    with pytest.raises(CheckpointError, match=r"source.npz: does not belong to its source.json"):
        read_source_state(tmp_path)
