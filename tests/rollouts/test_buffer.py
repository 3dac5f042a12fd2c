"""Slots and staleness: the invariants under any interleaving, and the cases by hand."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_rollout

from megatron_grpo.errors import RewardError, RolloutError
from megatron_grpo.rollouts.buffer import GroupBuffer
from megatron_grpo.rollouts.slots import Counts, Limits, Position, Ticket
from megatron_grpo.types import Prompt, RolloutGroup


def group(ticket: Ticket, *versions: int) -> RolloutGroup:
    """A group whose rollouts have one token each, of these versions."""
    prompt = Prompt(f"fake/{ticket.position}", np.array([1], np.int32), "?")
    rollouts = [
        make_rollout([1], [7], rollout_id=f"{ticket.group_id}/{k}", version=version)
        for k, version in enumerate(versions)
    ]
    return RolloutGroup(ticket.group_id, prompt, tuple(rollouts))


def take(buffer: GroupBuffer, deadline_s: float = 1.0) -> list[str]:
    return [g.group_id for g in buffer.take(deadline_s, lambda: "the generator")]


def admit(buffer: GroupBuffer) -> list[Ticket]:
    return buffer.admit(idle=False, held=False) or []


def names(tickets: list[Ticket]) -> list[str]:
    return [ticket.group_id for ticket in tickets]


def test_synchronous_admits_one_step_at_a_time_and_nothing_between_take_and_published():
    buffer = GroupBuffer(Limits(2, 0))
    assert admit(buffer) == []
    buffer.published(0)
    tickets = admit(buffer)
    assert names(tickets) == ["g0", "g1"] and admit(buffer) == []
    buffer.put([group(tickets[1], 0)])
    buffer.put([group(tickets[0], 0)])
    assert take(buffer) == ["g0", "g1"]
    assert admit(buffer) == [] and buffer.counts() == Counts(0, 0, 2, 0)
    buffer.published(1)
    assert names(admit(buffer)) == ["g2", "g3"]


def test_staleness_one_runs_one_step_ahead_and_tokens_are_at_most_one_version_old():
    buffer = GroupBuffer(Limits(2, 1))
    buffer.published(0)
    first = admit(buffer)
    assert names(first) == ["g0", "g1", "g2", "g3"]
    buffer.put([group(ticket, 0) for ticket in first])
    assert take(buffer) == ["g0", "g1"]
    assert admit(buffer) == []
    buffer.published(1)
    second = admit(buffer)
    assert names(second) == ["g4", "g5"]
    assert take(buffer) == ["g2", "g3"]  # version 0, trained on at version 1
    buffer.put([group(ticket, 1) for ticket in second])
    buffer.published(2)
    assert take(buffer) == ["g4", "g5"]


def test_a_group_with_one_token_too_old_is_dropped_counted_and_its_prompt_comes_first():
    buffer = GroupBuffer(Limits(1, 1))
    buffer.published(0)
    slow, quick = admit(buffer)
    for version in (1, 2):  # the other prompts overtake `slow`
        buffer.put([group(quick, version - 1)])
        assert take(buffer) == [quick.group_id]
        buffer.published(version)
        [quick] = admit(buffer)
    buffer.put([group(slow, 0, 2)])  # one rollout began at version 0; only 1 and 2 are fresh now
    assert buffer.counts() == Counts(in_flight=1, ready=0, spent=0, dropped_stale=1)
    [again] = admit(buffer)
    assert again == Ticket(position=0, attempt=1) and again.group_id == "g0.1"
    buffer.put([group(again, 2)])
    assert take(buffer) == ["g0.1"]


def test_g3_finished_groups_beyond_a_step_come_out_at_the_next():
    buffer = GroupBuffer(Limits(3, 1))
    buffer.published(0)
    tickets = admit(buffer)
    buffer.put([group(ticket, 0) for ticket in tickets[:5]])
    assert take(buffer) == ["g0", "g1", "g2"]
    buffer.put([group(tickets[5], 0)])
    buffer.published(1)
    assert take(buffer) == ["g3", "g4", "g5"]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    restart_at=st.integers(0, 12),
)
def test_nothing_is_lost_used_twice_or_too_old_under_any_interleaving(
    seed, groups_per_step, max_staleness, restart_at
):
    # A simulated generator starts groups at one version and ends them at another; at `restart_at`
    # everything but the saved position is lost.
    dice = random.Random(seed)
    slots = (max_staleness + 1) * groups_per_step
    buffer = GroupBuffer(Limits(groups_per_step, max_staleness))
    running: list[tuple[Ticket, int]] = []
    trained: list[int] = []
    for version in range(14):
        if version == restart_at:
            place = buffer.position()
            pending = [ticket.position for ticket in place.pending]
            assert sorted([*trained, *pending]) == list(range(place.next_position))
            buffer, running = GroupBuffer(Limits(groups_per_step, max_staleness)), []
            buffer.set_position(place, [])
        buffer.published(version)
        while True:
            running += [(ticket, version) for ticket in admit(buffer)]
            counts = buffer.counts()
            assert counts.in_flight == len(running)
            assert counts.in_flight + counts.ready + counts.spent <= slots
            if counts.ready >= groups_per_step and dice.random() < 0.5:
                break
            if not running:
                break
            ticket, started = running.pop(dice.randrange(len(running)))
            buffer.put([group(ticket, dice.randint(started, version), version)])
        chosen = buffer.take(1.0, lambda: "nobody")
        for taken in chosen:
            assert (
                min(rollout.oldest_version for rollout in taken.rollouts) >= version - max_staleness
            )
        trained += [int(taken.prompt.prompt_id.removeprefix("fake/")) for taken in chosen]
        assert len(trained) == len(set(trained)) == (version + 1) * groups_per_step
    place = buffer.position()
    pending = [ticket.position for ticket in place.pending]
    assert sorted([*trained, *pending]) == list(range(place.next_position))
    if max_staleness == 0:
        assert trained == list(range(len(trained))) and pending == []


def test_older_tokens_than_were_published_before_the_request_are_refused():
    buffer = GroupBuffer(Limits(1, 5))
    buffer.published(3)
    [ticket, *_] = admit(buffer)
    with pytest.raises(RolloutError, match=r"group g0: was asked for after version 3 .*found 2"):
        buffer.put([group(ticket, 3, 2)])


def test_calls_that_could_never_end_are_errors_at_once():
    buffer = GroupBuffer(Limits(1, 0))
    with pytest.raises(RolloutError, match="can never have 1 groups"):
        take(buffer, 60)
    buffer.published(0)
    buffer.put([group(ticket, 0) for ticket in admit(buffer)])
    take(buffer)
    with pytest.raises(RolloutError, match=r"1 slots wait for published \(last version 0\)"):
        take(buffer, 60)


@pytest.mark.parametrize("version", [2, 1])
def test_versions_must_go_up(version):
    buffer = GroupBuffer(Limits(1, 0))
    buffer.published(2)
    with pytest.raises(RolloutError, match="must go up"):
        buffer.published(version)


def test_a_position_can_only_be_set_before_the_start():
    buffer = GroupBuffer(Limits(1, 0))
    buffer.published(0)
    with pytest.raises(RolloutError, match="after the first published"):
        buffer.set_position(Position(3, 0, (), (), 0), [])


def test_a_restored_position_hands_out_pending_prompts_first():
    buffer = GroupBuffer(Limits(2, 1))
    pending = (Ticket(3), Ticket(5, 2), Ticket(6))
    buffer.set_position(Position(7, 4, pending, (), 0), [(Ticket(6), 4)])
    buffer.published(4)
    assert names(admit(buffer)) == ["g3", "g5.2", "g7"]
    buffer.put([group(Ticket(6), 4)])
    assert buffer.counts().ready == 1


def test_restored_groups_that_are_too_old_by_then_are_made_again():
    ready = ((Ticket(0), group(Ticket(0), 3)), (Ticket(1), group(Ticket(1), 4)))
    buffer = GroupBuffer(Limits(2, 1))
    buffer.set_position(Position(2, 4, (Ticket(0), Ticket(1)), ready, 0), [])
    buffer.published(5)
    assert names(admit(buffer))[0] == "g0.1" and buffer.counts().ready == 1


def test_what_ends_the_producer_ends_the_consumers_wait_with_the_same_error():
    buffer = GroupBuffer(Limits(1, 0))
    buffer.published(0)
    failure = RewardError("reward f", "returned no finite number")

    def produce() -> None:
        with buffer.producing():
            buffer.admit(idle=True, held=False)
            time.sleep(0.1)
            raise failure

    thread = threading.Thread(target=produce)
    started = time.monotonic()
    thread.start()
    with pytest.raises(RewardError) as caught:
        take(buffer, 60)
    assert caught.value is failure and time.monotonic() - started < 5
    with pytest.raises(RewardError):
        buffer.published(1)
    thread.join(5)
    assert not thread.is_alive()


def test_a_deadline_names_who_was_waited_for_and_counts_from_the_last_sign_of_life():
    buffer = GroupBuffer(Limits(2, 0))
    buffer.published(0)
    tickets = admit(buffer)

    def sign_of_life() -> None:
        time.sleep(0.2)
        buffer.put([group(tickets[0], 0)])

    threading.Thread(target=sign_of_life).start()
    started = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        buffer.take(0.4, lambda: "engine 3")
    assert 0.55 < time.monotonic() - started < 5
    assert "has 1 of 2 groups and nothing happened for 0.4 s; it waits for engine 3" in str(
        caught.value
    )


def test_closing_wakes_a_waiting_producer():
    buffer = GroupBuffer(Limits(1, 0))
    seen: list[list[Ticket] | None] = []
    thread = threading.Thread(target=lambda: seen.append(buffer.admit(idle=True, held=False)))
    thread.start()
    buffer.close()
    thread.join(5)
    assert seen == [None] and buffer.closed
    with pytest.raises(RolloutError, match="the source is closed"):
        take(buffer)


def test_a_stale_attempt_gets_an_id_of_its_own():
    ticket = Ticket(12)
    assert (ticket.group_id, replace(ticket, attempt=2).group_id) == ("g12", "g12.2")


def test_oversampling_halts_what_is_left_once_a_step_is_complete():
    buffer = GroupBuffer(Limits(2, 0, extra_groups=2))
    buffer.published(0)
    tickets = admit(buffer)
    assert names(tickets) == ["g0", "g1", "g2", "g3"] and not buffer.halted
    buffer.put([group(tickets[3], 0), group(tickets[1], 0)])
    assert buffer.halted and buffer.admit(idle=False, held=True) is None
    assert take(buffer) == ["g1", "g3"] and buffer.halted
    buffer.published(1)
    assert not buffer.halted and buffer.oldest_allowed == 1
    buffer.again(["g0", "g2"])  # their tokens are of version 0
    assert names(admit(buffer)) == ["g0.1", "g2.1", "g4", "g5"]


def test_g3_groups_without_spread_are_replaced_until_the_bound_and_then_the_run_says_why():
    # Rewards are always 0; 3 rounds of 2: the error comes with exactly the sixth group.
    buffer = GroupBuffer(Limits(2, 0, wanted=lambda g: False, most_replaced=6))
    buffer.published(0)
    made = 0
    with pytest.raises(
        RolloutError, match=r"6 groups were replaced .*pass rate .* 0\.000"
    ) as error:
        while made < 100:
            for ticket in admit(buffer):
                made += 1
                buffer.put([group(ticket, 0)])
    assert made == 6 and "rollouts.replace_rounds" in str(error.value)


def test_g3_ids_in_are_ids_trained_replaced_and_left():
    buffer = GroupBuffer(Limits(2, 1, wanted=lambda g: g.group_id != "g1", most_replaced=4))
    buffer.published(0)
    buffer.put([group(ticket, 0) for ticket in admit(buffer)])
    assert take(buffer) == ["g0", "g2"]
    assert buffer.counts() == Counts(in_flight=0, ready=1, spent=2, dropped_stale=0, replaced=1)
    assert names(admit(buffer)) == ["g4"]
    place = buffer.position()
    assert [ticket.position for ticket in place.pending] == [3, 4]
