"""Problems from files: mapping, filters, splits, grading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contracts.environment import EnvironmentContract
from toy import ASSISTANT, USER, ids_of, save_toy_tokenizer

from megatron_grpo.config import load_config
from megatron_grpo.config.data import MathTask
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.data.problems import Problems, load_problems
from megatron_grpo.environments.maths import MathEnvironment
from megatron_grpo.errors import ConfigError
from megatron_grpo.types import Prompt, Reward, Transcript

CONFIGS = Path(__file__).parents[2] / "configs/data"
SAMPLES = {
    "deepscaler_preview": "deepscaler_sample",
    "aime_2024": "aime24_sample",
    "aime_2025": "aime25_sample",
    "math_500": "math500_sample",
    "gsm8k": "gsm8k_sample",
    "openmathinstruct_2": "openmathinstruct2_sample",
    "dapo_math_17k": "dapo_sample",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(save_toy_tokenizer(tmp_path_factory.mktemp("toy")))


def rows_file(folder, rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def load(tokenizer, max_prompt_tokens=600, groups_per_step=1, **task) -> Problems:
    return load_problems(
        MathTask.model_validate(task), tokenizer, max_prompt_tokens, groups_per_step
    )


def both_splits(problems: Problems) -> list[Prompt]:
    return [*problems.splits["train"], *problems.splits["heldout"]]


@pytest.fixture(scope="module")
def environments(tokenizer):
    sources = {"train": {"gsm8k": {"path": "shipped:gsm8k_sample", "problem": "question"}}}
    settings = {**sources, "heldout_rows": 8, "grading": {"workers": 1}}
    tasks = [MathTask.model_validate({**settings, "seed": seed}) for seed in (0, 0, 1)]
    made = [MathEnvironment(task, tokenizer, 600, 1) for task in tasks]
    yield made
    for one in made:
        one.close()


class TestMaths(EnvironmentContract):
    @pytest.fixture
    def environment(self, environments):
        return environments[0]

    @pytest.fixture
    def same_again(self, environments):
        return environments[1]

    @pytest.fixture
    def changed(self, environments):
        return environments[2]


def test_a_worked_solution_is_graded_by_what_follows_its_mark(environments):
    prompt = environments[0].prompt("train", 0)
    gold = prompt.answer.rpartition("#### ")[2]
    responses = [f"So \\boxed{{{gold}}}", f"\\boxed{{{int(gold) + 1}}}", "no idea at all"]
    rewards = environments[0].respond([Transcript(prompt, (r,), "stop") for r in responses])
    assert rewards[0] == Reward(1.0, "correct", gold)
    assert [reward.reason for reward in rewards[1:]] == ["wrong", "no answer"]


def test_rows_are_filtered_and_every_loss_is_counted(tokenizer, tmp_path):
    rows = [{"q": f"What is {i}+1?", "a": i + 1} for i in range(10)]  # 14 ids with the marks
    rows += [rows[0], {"q": "What  is 1+1?", "a": 2}]  # duplicates, also but for spaces
    rows += [{"q": "Say something", "a": a} for a in ("", None, "???")][:1]
    rows += [{"q": "x?", "a": 1}, {"q": "long " * 30, "a": 1}, {"q": "None?", "a": "None"}]
    problems = load(
        tokenizer,
        max_prompt_tokens=50,
        train={"x": {"path": rows_file(tmp_path, rows), "problem": "q", "answer": "a"}},
        heldout_rows=2,
        min_prompt_tokens=6,
    )
    counts = problems.counts["train/x"]
    assert (counts.rows, counts.duplicates, counts.unusable) == (16, 2, 2)
    assert (counts.too_short, counts.too_long, counts.kept) == (1, 1, 10)
    assert [len(problems.splits[split]) for split in ("train", "heldout")] == [8, 2]
    assert problems.mixture == ((8, 1.0),)
    assert (
        str(counts)
        == "10 of 16 rows (2 duplicates, 1 too short, 1 too long, 2 without a usable answer)"
    )


def test_prompts_are_asked_as_the_source_says_or_else_the_task(tokenizer, tmp_path):
    path = rows_file(tmp_path, [{"problem": f"{i}?", "answer": i} for i in range(3)])
    problems = load(
        tokenizer,
        train={"a": {"path": path, "prompt_suffix": "!", "system_prompt": "S"}},
        heldout={"b": {"path": "shipped:aime24_sample"}},
        prompt_suffix=" Go",
    )
    prompt = problems.splits["train"][0]
    number = prompt.prompt_id.removeprefix("a/")
    assert prompt.token_ids.tolist() == [
        USER, *ids_of("S"), USER, *ids_of(f"{number}?!"), ASSISTANT,
    ]  # fmt: skip
    assert problems.splits["heldout"][0].text.endswith(" Go<assistant>")


def test_a_question_that_is_held_out_is_not_trained_on(tokenizer, tmp_path):
    path = rows_file(tmp_path, [{"problem": f"{i}?", "answer": i} for i in range(6)])
    held = tmp_path / "held.jsonl"
    held.write_text('{"problem": "3?", "answer": 3}')
    problems = load(tokenizer, train={"a": {"path": path}}, heldout={"b": {"path": str(held)}})
    assert sorted(p.text for p in both_splits(problems)).count("<user>3?<assistant>") == 1
    assert len(problems.splits["train"]) == 5
    with pytest.raises(ConfigError, match="leaves no training prompt"):
        load(tokenizer, train={"a": {"path": str(held)}}, heldout={"b": {"path": path}})


@pytest.mark.parametrize("name", SAMPLES)
def test_the_described_data_sets_have_the_columns_of_their_stand_ins(tokenizer, tmp_path, name):
    # The description is the shipped config itself, with the stand-in's path for the real one.
    described = load_description(name)
    splits = {split: described[split] for split in ("train", "heldout") if split in described}
    for sources in splits.values():
        for source in sources.values():
            source["path"] = f"shipped:{SAMPLES[name]}"
            source.pop("files", None)
    if "train" not in splits:
        other = "gsm8k_sample" if name != "gsm8k" else "aime25_sample"
        splits["train"] = {"other": {"path": f"shipped:{other}", "problem": "question"}}
    problems = load(tokenizer, max_prompt_tokens=900, heldout_rows=2, **splits)
    split = "heldout" if "heldout" in described else "train"
    [key] = [key for key in problems.counts if key.startswith(split)]
    counts = problems.counts[key]
    assert counts.kept == counts.rows > 0
    for prompt in both_splits(problems):
        assert prompt.answer and len(prompt.text) > 20


def load_description(name: str) -> dict:
    from megatron_grpo.config.base import read_yaml

    return read_yaml(CONFIGS / f"{name}.yaml")["task"]


def test_a_whole_run_config_is_put_together_from_descriptions(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"extends: [{CONFIGS}/deepscaler_preview.yaml, {CONFIGS}/aime_2024.yaml]\n"
        "name: x\nsteps: 1\nmodel: {path: m}\npolicy: {type: reference}\n"
        "generator: {type: reference}\n"
    )
    task = load_config(path).task
    assert list(task.train) == ["deepscaler"] and list(task.heldout) == ["aime24"]
