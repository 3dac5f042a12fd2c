"""The live source: the contract on real parts, and what happens when a part is late or fails."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from contracts.group_source import GROUP_SIZE, GROUPS_PER_STEP, GroupSourceContract, contents
from rollouts.fakes import FakeEnvironment, FakeGenerator, completion, decode
from tiny import save_tiny, tiny_model
from toy import save_toy_tokenizer

from megatron_grpo.config import ReasoningGymTask, ReferenceGeneratorConfig, RolloutsConfig
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.reasoning_gym import ReasoningGymEnvironment
from megatron_grpo.errors import RewardError, RolloutError
from megatron_grpo.generation.reference import ReferenceGenerator
from megatron_grpo.rollouts import sources
from megatron_grpo.rollouts.sources import LiveSource, MixedOrder, PromptOrder
from megatron_grpo.types import Reward
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

SHAPE = RolloutsConfig(groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE)
TASK = ReasoningGymTask(
    name="chain_sum",
    parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    rows=12,
    heldout_rows=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return save_toy_tokenizer(folder)


class TestLiveSourceOnRealParts(GroupSourceContract):
    """A tiny model sampled by the reference generator, on reasoning-gym problems."""

    @pytest.fixture
    def open_source(self, folder):
        tokenizer = ChatTokenizer(folder)
        environment = ReasoningGymEnvironment(TASK, tokenizer, 200, GROUPS_PER_STEP)
        self.parts = {}

        def open_source() -> LiveSource:
            channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=20)
            generator = ReferenceGenerator(
                folder, ReferenceGeneratorConfig(), 1.0, [2], channel.receivers[0]
            )
            source = LiveSource(
                environment,
                generator,
                tokenizer.decode,
                SHAPE,
                max_new_tokens=4,
                seed=1,
                deadline_s=20,
            )
            self.parts[id(source)] = (generator, channel.sender)
            return source

        yield open_source
        for generator, _ in self.parts.values():
            generator.close()

    @pytest.fixture
    def publish(self):
        def publish(source: LiveSource, version: int) -> None:
            generator, sender = self.parts[id(source)]
            pull = generator.pull_weights(version)
            with torch.no_grad():
                sender.send(version, tiny_model(seed=version).named_parameters())
            pull.result(20)
            source.published(version)

        return publish


def fake_source(
    generator=None, environment=None, *, deadline_s=20.0, seed=1, **shape
) -> LiveSource:
    return LiveSource(
        environment or FakeEnvironment(),
        generator or FakeGenerator(),
        decode,
        SHAPE.model_copy(update=shape),
        max_new_tokens=4,
        seed=seed,
        deadline_s=deadline_s,
    )


def prompt_ids(groups) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


def test_prompts_come_in_seeded_epochs_each_row_once(tmp_path):
    generator = FakeGenerator()
    source = fake_source(generator)
    taken = []
    for version in range(6):
        generator.version = version
        source.published(version)
        taken += prompt_ids(source.next_groups())
    source.close()
    rows = {f"fake/{row}" for row in range(6)}
    assert set(taken[:6]) == set(taken[6:]) == rows
    assert taken[:6] != taken[6:]
    order = PromptOrder(6, seed=1)
    assert taken == [f"fake/{order.row(position)}" for position in range(12)]
    assert taken[:6] != [f"fake/{PromptOrder(6, seed=2).row(position)}" for position in range(6)]


def test_the_order_of_prompts_is_the_same_for_ever():
    # random.Random("1/0") and ("1/1") shuffled [0, 1, 2, 3] when this was written.
    assert [PromptOrder(4, seed=1).row(position) for position in range(8)] == ORDER_OF_SEED_1
    with pytest.raises(RolloutError, match="has no training prompts"):
        PromptOrder(0, seed=1)


ORDER_OF_SEED_1 = [2, 0, 1, 3, 1, 2, 0, 3]


def test_groups_come_in_order_of_their_prompts_whatever_finishes_first():
    last_first, first_last = FakeGenerator(pick=lambda count: count - 1), FakeGenerator()
    taken = []
    for generator in (last_first, first_last):
        source = fake_source(generator)
        source.published(0)
        taken.append(contents(source.next_groups()))
        source.close()
    assert taken[0] == taken[1]
    assert [row[0] for row in taken[0]] == [f"g{g}/{k}" for g in range(2) for k in range(3)]


def test_synchronous_means_that_nothing_is_in_flight_between_steps():
    generator = FakeGenerator()
    source = fake_source(generator)
    source.published(0)
    source.next_groups()
    time.sleep(0.1)
    assert generator.num_running == 0
    assert len(generator.submitted) == GROUPS_PER_STEP * GROUP_SIZE
    source.close()


def test_with_staleness_one_the_next_step_is_generated_while_this_one_trains():
    generator = FakeGenerator()
    source = fake_source(generator, max_staleness=1)
    source.published(0)
    source.next_groups()
    wait_until(lambda: source.counts().ready == GROUPS_PER_STEP)
    assert len(generator.submitted) == 2 * GROUPS_PER_STEP * GROUP_SIZE
    generator.version = 1
    source.published(1)
    groups = source.next_groups()
    assert {int(v) for g in groups for r in g.rollouts for v in r.versions[r.loss_mask]} == {0}
    source.close()


def test_g3_a_consumer_ten_times_slower_bounds_what_is_generated():
    generator = FakeGenerator()
    source = fake_source(generator, max_staleness=2)
    for version in range(5):
        generator.version = version
        source.published(version)
        time.sleep(0.05)
        ahead = len(generator.submitted) - version * GROUPS_PER_STEP * GROUP_SIZE
        assert ahead <= 3 * GROUPS_PER_STEP * GROUP_SIZE
        source.next_groups()
    source.close()


def test_an_error_in_the_collecting_thread_reaches_next_groups_at_once():
    def reply(transcript):
        raise RewardError("reward f", "returned no finite number")

    source = fake_source(environment=FakeEnvironment(reply=reply))
    source.published(0)
    started = time.monotonic()
    with pytest.raises(RewardError, match="reward f"):
        source.next_groups()
    assert time.monotonic() - started < 5
    with pytest.raises(RewardError):
        source.published(1)
    source.close()
    assert not collecting_threads()


def test_a_late_generator_is_named_with_its_oldest_request():
    generator = FakeGenerator()
    generator.hold = True
    source = fake_source(generator, deadline_s=0.1)
    source.published(0)
    with pytest.raises(RolloutError, match=r"request g0/0: not finished within 0\.1 s"):
        source.next_groups()
    source.close()


def test_a_reward_that_hangs_is_named_too(monkeypatch):
    monkeypatch.setattr(sources, "_GRACE_S", 0.1)
    monkeypatch.setattr(sources, "_CLOSE_S", 0.1)
    finish = threading.Event()

    def reply(transcript):
        finish.wait(20)
        return Reward(0.0)

    source = fake_source(environment=FakeEnvironment(reply=reply), deadline_s=0.1)
    source.published(0)
    with pytest.raises(RolloutError, match=r"it waits for the environment, to grade 1 rollouts"):
        source.next_groups()
    with pytest.raises(RolloutError, match=r"did not end .*; it waits for the environment"):
        source.close()
    finish.set()
    wait_until(lambda: not collecting_threads())


def test_a_generator_that_stays_at_old_weights_is_an_error_not_an_endless_loop():
    generator = FakeGenerator(lambda request: completion(request, version=0))
    source = fake_source(generator)
    source.published(0)
    source.next_groups()
    source.published(1)
    with pytest.raises(RolloutError, match="group g2: was asked for after version 1 was published"):
        source.next_groups()
    source.close()


def test_closing_aborts_what_is_in_flight_and_leaves_the_generator_empty():
    generator = FakeGenerator()
    generator.hold = True
    source = fake_source(generator, max_staleness=1)
    source.published(0)
    wait_until(lambda: generator.num_running == 2 * GROUPS_PER_STEP * GROUP_SIZE)
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 5
    assert generator.num_running == 0 and not collecting_threads()


def test_next_groups_waiting_elsewhere_ends_when_the_source_is_closed():
    generator = FakeGenerator()
    generator.hold = True
    source = fake_source(generator)
    source.published(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.next_groups)
        time.sleep(0.05)
        source.close()
        with pytest.raises(RolloutError, match="the source is closed"):
            waiting.result(5)


def test_resuming_ahead_of_the_trainer_loses_and_repeats_no_prompt():
    generator = FakeGenerator()
    source = fake_source(generator, FakeEnvironment(rows=10), max_staleness=1)
    source.published(0)
    taken = prompt_ids(source.next_groups())
    wait_until(lambda: source.counts().ready == GROUPS_PER_STEP)
    state = source.state()
    source.close()
    asked = len(generator.submitted)
    assert (state.next_prompt, state.pending) == (2 * GROUPS_PER_STEP, ((2, 0), (3, 0)))
    assert [len(group.done) for group in state.groups] == [GROUP_SIZE] * GROUPS_PER_STEP
    again = fake_source(generator, FakeEnvironment(rows=10), max_staleness=1)
    again.restore(state)
    for version in range(1, 5):
        generator.version = version
        again.published(version)
        taken += prompt_ids(again.next_groups())
    again.close()
    # What was ready is trained on, not made again: its requests were made once.
    assert not {"g2/0", "g3/0"} & {r.request_id for r in generator.submitted[asked:]}
    assert sorted(taken) == sorted(f"fake/{row}" for row in range(10))


def test_h2_a_position_in_other_data_is_refused():
    source = fake_source()
    state = source.state()
    other = fake_source(environment=FakeEnvironment(rows=7))
    with pytest.raises(RolloutError, match="data: changed since the position was saved"):
        other.restore(state)
    source.restore(replace(state, next_prompt=2))
    assert source.state().next_prompt == 2


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not come true within 10 s"
        time.sleep(0.005)


def collecting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "collector"]


def test_sources_are_mixed_by_weight_at_every_point_and_rows_come_once_per_epoch():
    order = MixedOrder([(7, 3.0), (50, 1.0), (4, 2.0)], seed=5)
    rows = [order.row(position) for position in range(600)]
    for count in range(1, 601):
        drawn = [sum(low <= row < high for row in rows[:count]) for low, high in RANGES]
        shares = [count * 3 / 6, count / 6, count * 2 / 6]
        assert all(abs(one - share) <= 1 for one, share in zip(drawn, shares))
    first = [row for row in rows if row < 7]
    for epoch in range(len(first) // 7):
        assert sorted(first[7 * epoch : 7 * epoch + 7]) == list(range(7))


RANGES = ((0, 7), (7, 57), (57, 61))


def test_the_row_at_a_position_does_not_depend_on_what_was_asked_before():
    mixture = [(7, 3.0), (50, 1.0), (4, 2.0)]
    order = MixedOrder(mixture, seed=5)
    rows = [order.row(position) for position in range(40)]
    assert [MixedOrder(mixture, seed=5).row(position) for position in range(40)] == rows
    assert [order.row(position) for position in (39, 3, 17, 3)] == [rows[i] for i in (39, 3, 17, 3)]
    assert [MixedOrder(mixture, seed=6).row(p) for p in range(40)] != rows


def test_one_source_is_shuffled_by_the_runs_seed_alone():
    mixed, plain = MixedOrder([(9, 0.5)], seed=3), PromptOrder(9, seed=3)
    assert [mixed.row(p) for p in range(30)] == [plain.row(p) for p in range(30)]
