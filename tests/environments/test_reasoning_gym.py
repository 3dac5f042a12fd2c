"""reasoning-gym tasks: rows, splits, limits and grading, with prompts counted by hand."""

from __future__ import annotations

import json

import pytest
import reasoning_gym
from contracts.environment import EnvironmentContract, all_prompts
from toy import ASSISTANT, USER, ids_of, save_toy_tokenizer

from megatron_grpo.config import ReasoningGymTask
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.reasoning_gym import DataSummary, ReasoningGymEnvironment
from megatron_grpo.errors import ConfigError, RewardError
from megatron_grpo.types import Reward, Transcript

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(save_toy_tokenizer(tmp_path_factory.mktemp("toy")))


def chain_sum(**changes) -> ReasoningGymTask:
    settings = {"name": "chain_sum", "parameters": SUMS, "rows": 60, "heldout_rows": 8, **changes}
    return ReasoningGymTask(**settings)


def build(tokenizer, task=None, max_prompt_tokens=200, groups_per_step=4):
    return ReasoningGymEnvironment(
        task or chain_sum(), tokenizer, max_prompt_tokens, groups_per_step
    )


def questions(task: ReasoningGymTask) -> list[dict]:
    dataset = reasoning_gym.create_dataset(
        task.name, size=task.rows, seed=task.seed, **task.parameters
    )
    return [dataset[row] for row in range(task.rows)]


class TestReasoningGym(EnvironmentContract):
    @pytest.fixture
    def environment(self, tokenizer):
        return build(tokenizer)

    @pytest.fixture
    def same_again(self, tokenizer):
        return build(tokenizer)

    @pytest.fixture
    def changed(self, tokenizer):
        return build(tokenizer, chain_sum(seed=1))


def test_rows_are_those_of_reasoning_gym_less_repeated_questions(tokenizer):
    task = chain_sum(system_prompt="Add.", prompt_suffix=" Go")
    environment, rows = build(tokenizer, task), questions(task)
    first = {}
    for row, entry in enumerate(rows):
        first.setdefault(entry["question"], row)
    prompts = {prompt.prompt_id: prompt for prompt in all_prompts(environment)}
    assert set(prompts) == {f"chain_sum/{row}" for row in first.values()}
    for row in first.values():
        prompt = prompts[f"chain_sum/{row}"]
        question = rows[row]["question"] + " Go"
        wanted = [USER, *ids_of("Add."), USER, *ids_of(question), ASSISTANT]
        assert prompt.token_ids.tolist() == wanted
        assert prompt.answer == rows[row]["answer"]
        assert json.loads(prompt.metadata)["expression"] == rows[row]["metadata"]["expression"]
    duplicates = 60 - len(first)
    assert duplicates > 0
    assert environment.summary == DataSummary(60, duplicates, 0, 60 - duplicates - 8, 8)


def test_the_split_is_seeded_and_the_seed_changes_it(tokenizer):
    def heldout(seed: int) -> list[str]:
        environment = build(tokenizer, chain_sum(seed=seed))
        return [environment.prompt("heldout", row).answer for row in range(8)]

    assert heldout(0) == heldout(0) != heldout(1)


def test_the_last_number_of_a_response_is_graded(tokenizer):
    environment = build(tokenizer)
    prompt = environment.prompt("train", 0)
    replies = environment.respond(
        [
            Transcript(prompt, (f"It is {prompt.answer}.",), "stop"),
            Transcript(prompt, (f"{prompt.answer} or 99",), "length"),
        ]
    )
    assert replies == [Reward(1.0), Reward(0.0)]


def test_g1_prompts_are_filtered_by_tokens_and_counted(tokenizer):
    # "Calculate 3 + 4." is <user>, 16 characters, <assistant>: 18 tokens; one more per extra digit.
    task = ReasoningGymTask(
        name="basic_arithmetic",
        parameters={**SUMS, "max_digits": 2, "allow_parentheses": False, "allow_negation": False},
        rows=200,
        heldout_rows=4,
    )
    lengths = {entry["question"]: len(entry["question"]) + 2 for entry in questions(task)}
    assert {18, 20} <= set(lengths.values())
    environment = build(tokenizer, task, max_prompt_tokens=18)
    kept = sorted(prompt.text for prompt in all_prompts(environment))
    assert kept == sorted(f"<user>{q}<assistant>" for q, n in lengths.items() if n <= 18)
    assert environment.summary.too_long == sum(n > 18 for n in lengths.values())


def test_g1_no_prompt_short_enough_is_an_error_with_the_shortest_length(tokenizer):
    shortest = min(len(entry["question"]) for entry in questions(chain_sum())) + 2
    with pytest.raises(ConfigError) as caught:
        build(tokenizer, max_prompt_tokens=shortest - 1)
    assert str(caught.value) == (
        f"rollouts.max_prompt_tokens: leaves no prompt of chain_sum: the shortest has {shortest} "
        f"tokens (found {shortest - 1}); set it to at least {shortest}"
    )


def test_g1_fewer_rows_than_a_step_needs_is_an_error_with_both_numbers(tokenizer):
    # 7 rows of seed 0 are distinct: 3 held out leave 4.
    task = chain_sum(rows=7, heldout_rows=3)
    build(tokenizer, task, groups_per_step=4)
    with pytest.raises(ConfigError, match=r"leaves 4 training .* than the 5 of rollouts"):
        build(tokenizer, task, groups_per_step=5)


def test_more_held_out_than_there_are_problems_is_an_error(tokenizer):
    with pytest.raises(
        ConfigError, match=r"task.heldout_rows: only \d+ problems are left \(\d+ dup"
    ):
        build(tokenizer, chain_sum(rows=400, heldout_rows=300))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "chain_sums"},
            "task.name: reasoning-gym has no such .* did you mean chain_sum",
        ),
        ({"name": "zzzzqq"}, "task.name: reasoning-gym has no such task"),
        ({"parameters": {"max_term": 2}}, "task.parameters.max_term: .* did you mean max_terms"),
        ({"parameters": {"size": 2}}, "task.parameters.size: chain_sum has no such"),
        (
            {"parameters": {"min_terms": 3, "max_terms": 2}},
            "task.parameters: chain_sum refuses",
        ),
        ({"parameters": {"min_terms": "three"}}, "task.parameters: chain_sum refuses them"),
    ],
)
def test_an_unknown_task_or_parameter_is_an_error_that_suggests_one(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(tokenizer, chain_sum(**changes))


def test_f4_answers_the_reward_cannot_use_are_found_when_the_data_is_loaded(tokenizer):
    task = ReasoningGymTask(name="spell_backward", rows=20, heldout_rows=2)
    with pytest.raises(RewardError, match=r"on prompt spell_backward/.* is not a number"):
        build(tokenizer, task)
