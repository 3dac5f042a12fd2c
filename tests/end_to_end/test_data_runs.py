"""SFT and DPO through the one command: rows in, a better model out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rich.console import Console
from tiny import save_tiny
from toy import save_toy_tokenizer

from megatron_grpo.config import load_config
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.data_summary import DataSummary

# Turns end with </s>, id 2, so that the model learns to stop.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}</s>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("model"), seed=3)
    return save_toy_tokenizer(folder, template=TEMPLATE)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


REFERENCE = "type: reference"
MEGATRON = "type: megatron, dtype: float32, parallel: {pipeline: 2}"


def run(
    tmp_path: Path, model: Path, text: str, policy: str = REFERENCE
) -> tuple[DataSummary, Path]:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"name: data\nmodel: {{path: {model}}}\nrun_dir: {tmp_path / 'run'}\n"
        f"policy: {{{policy}, microbatch_tokens: 128, optimizer: {{learning_rate: 0.01}}}}\n" + text
    )
    summary = run_training(load_config(config), Console(quiet=True))
    assert isinstance(summary, DataSummary)
    return summary, tmp_path / "run"


def test_sft_lowers_the_held_out_loss(tmp_path, model):
    letters = "abcdefgh"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{a}{b}"},
                {"role": "assistant", "content": f"{b}{a}!"},
            ]
        }
        for a in letters
        for b in letters
    ]
    data = write_rows(tmp_path / "chats.jsonl", rows)
    summary, folder = run(
        tmp_path,
        model,
        f"steps: 12\ntask: {{type: chats, path: {data}, heldout_rows: 8, max_row_tokens: 32}}\n"
        "algorithm: {type: sft}\nrollouts: {groups_per_step: 14}\n",
    )
    assert (summary.rows, summary.heldout_rows, summary.rows_left_out) == (56, 8, {})
    # 4 tokens of 130: 4.9 by chance; "!" and the end are certain, the letters one of 8 at worst
    assert summary.heldout_loss_before > 4.0
    assert summary.heldout_loss_after < 1.5
    assert summary.heldout_after["nll"] == pytest.approx(summary.heldout_loss_after)
    assert (folder / "model" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["heldout_loss"] for line in lines if "heldout_loss" in line] == [
        summary.heldout_loss_before,
        summary.heldout_loss_after,
    ]


def test_dpo_raises_the_held_out_preference_accuracy_and_keeps_its_scores(tmp_path, model):
    dice = random.Random(0)
    rows = []
    for _ in range(40):
        word = "".join(dice.choices("abcdefgh", k=3))
        rows.append(
            {
                "prompt": [{"role": "user", "content": word}],
                "chosen": "".join(dice.choices("0123", k=3)),
                "rejected": "".join(dice.choices("6789", k=3)),
            }
        )
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    task = f"{{type: preferences, path: {data}, heldout_rows: 8, max_row_tokens: 16}}"
    summary, folder = run(
        tmp_path,
        model,
        f"steps: 6\ntask: {task}\nalgorithm: {{type: dpo, beta: 0.5}}\n"
        "rollouts: {groups_per_step: 8}\nevaluation: {every: 3}\n",
    )
    # Before the first step policy and reference are one: every margin is 0, every loss log 2.
    assert summary.heldout_loss_before == pytest.approx(0.6931, abs=1e-4)
    assert summary.heldout_before["preference_accuracy"] == 0.0
    assert summary.heldout_after["preference_accuracy"] == 1.0
    assert summary.heldout_loss_after < 0.3
    # Chosen digits became likelier than rejected ones, relative to the frozen model.
    assert summary.heldout_after["chosen_reward"] > summary.heldout_after["rejected_reward"]
    store = ZarrStore(folder / "rollouts")
    assert store.steps() == [1, 2, 3, 4, 5, 6]
    by_row: dict[str, list] = {}
    for step in store.steps():
        for group in store.read(step):
            for rollout in group.rollouts:
                assert rollout.reference_logprobs is not None
                key = f"{group.prompt.prompt_id}/{rollout.reward.value}"
                by_row.setdefault(key, []).append(rollout.reference_logprobs.tolist())
    # 48 pairs of 32 rows: rows come back, with the same scores
    assert len(by_row) == 64 and max(len(scores) for scores in by_row.values()) == 2
    assert all(scores[0] == scores[-1] for scores in by_row.values())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_megatron_under_ray_and_hugging_face_learn_the_same(tmp_path, model, algorithm):
    """Three steps of one config on both policies: the losses agree from the first to the last."""
    pair = {"prompt": [{"role": "user", "content": "ab"}], "chosen": "ba!", "rejected": "?"}
    chat = {
        "messages": [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "ba!"},
        ]
    }
    rows = [pair if algorithm == "dpo" else chat] * 12
    data = write_rows(tmp_path / "rows.jsonl", rows)
    kind = "preferences" if algorithm == "dpo" else "chats"
    text = (
        f"steps: 3\ntask: {{type: {kind}, path: {data}, heldout_rows: 4, max_row_tokens: 32}}\n"
        f"algorithm: {{type: {algorithm}}}\nrollouts: {{groups_per_step: 4}}\n"
    )
    found = {}
    for policy in (REFERENCE, MEGATRON):
        folder = tmp_path / policy.partition(",")[0].removeprefix("type: ")
        folder.mkdir()
        summary, run_folder = run(folder, model, text, policy)
        lines = [json.loads(s) for s in (run_folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        found[policy] = [*losses, summary.heldout_loss_before, summary.heldout_loss_after]
        assert len(losses) == 3
    assert found[MEGATRON] == pytest.approx(found[REFERENCE], rel=1e-4, abs=1e-5)
    assert found[REFERENCE][2] < found[REFERENCE][0]
