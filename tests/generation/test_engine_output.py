"""What an engine returns is looked up by id and validated, never taken by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_grpo.errors import RolloutError
from megatron_grpo.generation.engine_output import completion, sampled_logprobs, token_versions


@dataclass
class Entry:
    logprob: float | None


def test_a4_the_sampled_tokens_entry_is_taken_not_the_first():
    position = {512: Entry(-0.10), 880: Entry(-2.30)}
    assert sampled_logprobs("r", [880], [position]).tolist() == [np.float32(-2.30)]
    assert sampled_logprobs("r", [512], [position]).tolist() == [np.float32(-0.10)]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a4_a_token_without_a_finite_logprob_raises_naming_request_and_token(bad):
    entries = [{7: Entry(-0.5)}, {8: Entry(bad)}, {9: Entry(-0.7)}]
    with pytest.raises(RolloutError, match=r"request r: token 1 \(id 8\)"):
        sampled_logprobs("r", [7, 8, 9], entries)


def test_a4_a_position_that_lacks_the_sampled_id_raises():
    with pytest.raises(RolloutError, match=r"request r: token 0 \(id 5\)"):
        sampled_logprobs("r", [5], [{6: Entry(-0.1)}])
    with pytest.raises(RolloutError, match=r"request r: token 0 \(id 5\)"):
        sampled_logprobs("r", [5], [None])


def test_a4_tokens_without_logprobs_raise_naming_the_request():
    with pytest.raises(RolloutError, match="request r: has 2 tokens but log-probabilities for 0"):
        sampled_logprobs("r", [5, 6], [])


def test_every_token_has_the_version_of_its_span():
    assert token_versions("r", 5, [("3", 0, 2), ("4", 2, 5)]).tolist() == [3, 3, 4, 4, 4]
    for spans in ([], [("3", 0, 4)], [("3", 1, 5)], [("-1", 0, 5)]):
        with pytest.raises(RolloutError, match="request r: has tokens without a weight version"):
            token_versions("r", 5, spans)


def test_a_completion_keeps_ids_order_and_reason_and_an_aborted_one_may_be_empty():
    one = completion("r", [4, 5], [{4: Entry(-1.0)}, {5: Entry(-2.0)}], [("0", 0, 2)], "stop")
    assert one.token_ids.tolist() == [4, 5] and one.behavior_logprobs.tolist() == [-1.0, -2.0]
    assert one.finish_reason == "stop" and one.versions.tolist() == [0, 0]
    assert len(completion("r", [], [], [], "abort").token_ids) == 0
    with pytest.raises(RolloutError, match="unknown reason"):
        completion("r", [], [], [], "repetition")
