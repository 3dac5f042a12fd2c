"""Completions, transcripts and rewards are joined by ids, in whatever order they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts.fakes import FakeEnvironment, FakeGenerator, completion, decode, make_prompt

from megatron_grpo.errors import RolloutError
from megatron_grpo.rollouts.assembly import derived_seed
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.types import Observation, Prompt, Reward, RolloutGroup


def collector(generator, environment, **changes) -> Collector:
    return Collector(environment, generator, decode, **{"seed": 1, "deadline_s": 5.0, **changes})


def run(made: Collector, requests: list[GroupRequest]) -> list[RolloutGroup]:
    """All groups, in the order they became whole."""
    made.start(requests)
    groups: list[RolloutGroup] = []
    while made.num_groups:
        made.go_on(0)
        groups += made.commit(made.receive())
    return groups


def group_request(
    group_id: str, prompt: Prompt, size: int, max_new_tokens: int = 40
) -> GroupRequest:
    return GroupRequest(group_id, prompt, size, max_new_tokens)


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 10**6), min_size=16, max_size=16))
def test_f2_every_sample_keeps_its_own_reward_whatever_finishes_first(order):
    # Sample i of 16 answers i, in i + 1 tokens. Its reward says what was answered and for which
    # prompt.
    def answer(request):
        group, _, k = request.request_id.partition("/")
        sample = 4 * int(group.removeprefix("g")) + int(k)
        return completion(request, [sample] * (sample + 1))

    picks = iter(order)
    generator = FakeGenerator(answer, pick=lambda count: next(picks) % count)
    environment = FakeEnvironment(
        reply=lambda t: Reward(float(t.completion_texts[0].split()[0]), t.prompt.prompt_id)
    )
    prompts = [make_prompt(g, f"fake/{g}") for g in range(4)]
    requests = [group_request(f"g{g}", prompts[g], 4) for g in range(4)]
    groups = run(collector(generator, environment), requests)
    assert sorted(group.group_id for group in groups) == ["g0", "g1", "g2", "g3"]
    for group in groups:
        g = int(group.group_id[1:])
        assert group.prompt is prompts[g]
        for k, rollout in enumerate(group.rollouts):
            sample = 4 * g + k
            assert rollout.rollout_id == f"g{g}/{k}"
            assert rollout.reward == Reward(float(sample), f"fake/{g}")
            assert rollout.token_ids.tolist() == [1, g + 10] + [sample] * (sample + 1)


def test_g2_two_rows_with_the_same_prompt_are_two_groups_with_their_own_answers():
    one, two = (
        Prompt(name, np.array([5], np.int32), "?", gold)
        for name, gold in (("a/0", "1"), ("b/0", "2"))
    )
    generator = FakeGenerator(pick=lambda count: count - 1)
    groups = run(
        collector(generator, FakeEnvironment()),
        [group_request("g0", one, 4), group_request("g1", two, 4)],
    )
    rewards = {group.group_id: group.rewards.tolist() for group in groups}
    assert rewards == {"g0": [1.0] * 4, "g1": [2.0] * 4}


def test_d4_a_rollout_holds_prompt_and_completion_with_masks_and_logprobs_in_place():
    generator = FakeGenerator(lambda r: completion(r, [30, 2], version=5))
    [group] = run(collector(generator, FakeEnvironment()), [group_request("g3", make_prompt(4), 1)])
    [rollout] = group.rollouts
    assert rollout.token_ids.tolist() == [1, 14, 30, 2]
    assert rollout.loss_mask.tolist() == [False, False, True, True]
    assert rollout.behavior_logprobs.tolist() == [0, 0, -3.0, np.float32(-0.2)]
    assert rollout.versions.tolist() == [-1, -1, 5, 5]
    assert (rollout.prompt_tokens, rollout.finish_reason, rollout.text) == (2, "stop", "30 2")
    assert rollout.reward.value == 4.0
    assert 0 <= rollout.generate_s < 5


def test_n2_a_dialogue_goes_on_with_the_sampled_ids_and_tool_tokens_get_no_loss():
    turns = [[20, 21], [22], [23, 2]]

    def answer(request):
        turn = int(request.request_id.partition("#")[2] or 0)
        return completion(request, turns[turn], version=turn)

    def reply(transcript):
        told = len(transcript.completion_texts)
        if told == 3:
            return Reward(1.0, " | ".join(transcript.completion_texts))
        return Observation(np.array([90 + told, 95], np.int64))

    generator = FakeGenerator(answer)
    request = group_request("g0", make_prompt(0), 1, max_new_tokens=10)
    [group] = run(collector(generator, FakeEnvironment(reply=reply)), [request])
    [rollout] = group.rollouts
    assert rollout.token_ids.tolist() == [1, 10, 20, 21, 91, 95, 22, 92, 95, 23, 2]
    assert rollout.token_ids.dtype == np.int32
    mask = [False, False, True, True, False, False, True, False, False, True, True]
    assert rollout.loss_mask.tolist() == mask
    assert rollout.versions.tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, -1, 2, 2]
    logprobs = [0, 0, -2.0, -2.1, 0, 0, -2.2, 0, 0, -2.3, -0.2]
    assert rollout.behavior_logprobs.tolist() == pytest.approx(logprobs)
    assert rollout.reward.reason == "20 21 | 22 | 23 2"
    assert [r.request_id for r in generator.submitted] == ["g0/0", "g0/0#1", "g0/0#2"]
    assert [r.prompt_ids.tolist() for r in generator.submitted] == [
        [1, 10],
        [1, 10, 20, 21, 91, 95],
        [1, 10, 20, 21, 91, 95, 22, 92, 95],
    ]
    assert [r.max_new_tokens for r in generator.submitted] == [10, 6, 3]
    assert len({r.seed for r in generator.submitted}) == 3


@pytest.mark.parametrize(("observed", "goes_on"), [(7, True), (8, False), (9, False)])
def test_a_dialogue_out_of_budget_ends_with_a_reward_of_zero_that_says_so(observed, goes_on):
    def reply(transcript):
        if len(transcript.completion_texts) == 2:
            return Reward(1.0)
        return Observation(np.full(observed, 90, np.int32))

    generator = FakeGenerator(lambda r: completion(r, [20, 21] if "#" not in r.request_id else [2]))
    request = group_request("g0", make_prompt(0), 1, max_new_tokens=10)
    [group] = run(collector(generator, FakeEnvironment(reply=reply)), [request])
    [rollout] = group.rollouts
    if goes_on:
        assert rollout.num_tokens == 2 + 10 and rollout.reward == Reward(1.0)
        assert generator.submitted[-1].max_new_tokens == 1
    else:
        assert rollout.token_ids.tolist() == [1, 10, 20, 21]
        assert rollout.reward == Reward(0.0, "out of tokens before the dialogue ended")


def test_seeds_depend_on_run_group_and_index_only():
    generator = FakeGenerator()
    requests = [group_request(f"g{g}", make_prompt(g), 3) for g in range(2)]
    run(collector(generator, FakeEnvironment(), seed=9), requests)
    seeds = [r.seed for r in generator.submitted]
    assert seeds == [derived_seed(9, f"g{g}", k, 0) for g in range(2) for k in range(3)]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**31 for seed in seeds)
    # sha256("9/g0/0/0") starts with these four bytes: the value must never change.
    assert seeds[0] == SEED_9_G0


SEED_9_G0 = int.from_bytes(bytes.fromhex("98c5cb6a"), "big") >> 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda r: completion(r, []), "request g0/0: .* outside 1 to 3 .found 0."),
        (lambda r: completion(r, [7] * 4), "request g0/0: .* outside 1 to 3 .found 4."),
        (
            lambda r: completion(r, [7], finish_reason="abort"),
            "request g0/0: was aborted, and nobody asked",
        ),
        (lambda r: completion(r, [7], version=-1), "rollout g0/0: .* without a weight version"),
    ],
)
def test_a_generator_that_breaks_its_contract_is_named_with_the_request(answer, message):
    made = collector(FakeGenerator(answer), FakeEnvironment())
    with pytest.raises(RolloutError, match=message):
        run(made, [group_request("g0", make_prompt(0), 1, max_new_tokens=3)])


def test_a_completion_nobody_asked_for_is_refused():
    stranger = group_request("g9", make_prompt(0), 1)
    generator = FakeGenerator()
    other = collector(generator, FakeEnvironment())
    other.start([stranger])
    made = collector(generator, FakeEnvironment())
    made.start([group_request("g0", make_prompt(0), 1)])
    with pytest.raises(RolloutError, match="request g9/0: came back but nobody waits for it"):
        made.receive()


def test_an_environment_that_loses_a_transcript_is_an_error_not_a_shift():
    environment = FakeEnvironment()
    environment.respond = lambda transcripts: []
    with pytest.raises(RolloutError, match="gave 0 replies to 1 transcripts"):
        run(collector(FakeGenerator(), environment), [group_request("g0", make_prompt(0), 1)])


def test_a_group_id_in_flight_cannot_be_started_again():
    made = collector(FakeGenerator(), FakeEnvironment())
    made.start([group_request("g0", make_prompt(0), 1)])
    with pytest.raises(RolloutError, match="group g0: is already in flight"):
        made.start([group_request("g0", make_prompt(1), 1)])


def test_a_late_generator_is_an_error_that_names_the_request():
    generator = FakeGenerator()
    generator.hold = True
    made = collector(generator, FakeEnvironment(), deadline_s=0.05)
    with pytest.raises(RolloutError, match=r"request g0/0: not finished within 0.05 s"):
        run(made, [group_request("g0", make_prompt(0), 2)])
    assert made.activity == "the generator, for 2 requests, the oldest g0/0"


def test_draining_leaves_nothing_behind_at_the_generator():
    generator = FakeGenerator()
    generator.hold = True
    made = collector(generator, FakeEnvironment())
    made.start([group_request("g0", make_prompt(0), 5)])
    made.drain()
    assert (made.num_groups, generator.num_running) == (0, 0)


def test_an_interrupted_rollout_goes_on_from_its_last_token_with_what_is_left_of_its_budget():
    def answer(request):
        if "#" in request.request_id:
            return completion(request, [22, 2], version=1)
        return completion(request, [20, 21], version=0, finish_reason="abort")

    generator = FakeGenerator(answer)
    made = collector(generator, FakeEnvironment())
    made.start([group_request("g0", make_prompt(0), 1, max_new_tokens=5)])
    made.interrupt()
    generator._running, generator._aborted = generator.submitted[:], []  # with two tokens each
    assert made.commit(made.receive()) == [] and (made.num_held, made.num_interrupted) == (1, 1)
    assert made.go_on(oldest_allowed=0) == []
    [group] = made.commit(made.receive())
    [rollout] = group.rollouts
    first, second = generator.submitted
    assert (second.request_id, second.prompt_ids.tolist()) == ("g0/0#1", [1, 10, 20, 21])
    assert (second.max_new_tokens, second.seed) == (3, derived_seed(1, "g0", 0, 1))
    assert rollout.token_ids.tolist() == [1, 10, 20, 21, 22, 2]
    assert rollout.versions.tolist() == [-1, -1, 0, 0, 1, 1]
    assert (rollout.text, rollout.seed) == ("20 21 22 2", first.seed)


def test_an_interrupted_rollout_too_old_to_go_on_is_given_up_with_its_group():
    generator = FakeGenerator(lambda r: completion(r, [20], version=0, finish_reason="abort"))
    made = collector(generator, FakeEnvironment())
    made.start([group_request("g0", make_prompt(0), 1)])
    made.interrupt()
    generator._running, generator._aborted = generator.submitted[:], []
    made.commit(made.receive())
    assert made.go_on(oldest_allowed=1) == ["g0"]
    assert (made.num_groups, made.num_held, len(generator.submitted)) == (0, 0, 1)
