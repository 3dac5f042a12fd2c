"""What a person sees of a run, and the files that other tools read."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from contracts.rollout_store import odd_groups
from rich.console import Console
from samples import make_group, make_groups
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.errors import ConfigError
from megatron_grpo.rollouts.export import export_rollouts
from megatron_grpo.rollouts.show import pick, printable, show_sample
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.types import Reward, RolloutGroup


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a_run"
    store = ZarrStore(folder / "rollouts")
    store.append(1, [make_group([1.0, 0.0], group_id="g0", response_lengths=[4, 8])])
    store.append(2, odd_groups())
    return folder


def command(*arguments: object):
    return CliRunner().invoke(app, ["rollouts", *map(str, arguments)])


def test_the_command_shows_steps_and_the_samples_asked_for(run_folder):
    result = command(run_folder, "--worst", 1, "--best", 0)
    assert result.exit_code == 0
    assert "2 steps" in result.stdout and "0.500" in result.stdout
    # -1.5 is the lowest reward of step 2
    assert "g0/1  reward -1.5" in result.stdout and "caf" not in result.stdout
    one = command(run_folder, "--step", 1, "--worst", 0, "--best", 1).stdout
    assert "g0/0  reward 1" in one and "4 sampled, ended by stop" in one and "steps" not in one


def test_a_folder_without_rollouts_is_an_error_that_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match="RUN: holds no rollouts"):
        CliRunner().invoke(app, ["rollouts", str(tmp_path)], catch_exceptions=False)


def test_summaries_are_those_of_the_rollouts_and_read_no_token(run_folder):
    first, second = ZarrStore(run_folder / "rollouts").summaries()
    assert (first.step, first.rewards, first.response_tokens) == (1, ([1.0, 0.0],), (4, 8))
    assert (second.step, second.rewards) == (2, ([0.1], [0.5, -1.5]))
    assert (second.response_tokens, second.truncated) == ((4, 2, 2), 0)


def test_worst_and_best_are_by_reward_and_ties_keep_their_order():
    groups = [make_group([0.5, 1.0, 0.0], group_id="g0"), make_group([0.0, 1.0], group_id="g1")]
    names = [rollout.rollout_id for _, rollout in pick(groups, best=2, worst=3)]
    assert names == ["g0/1", "g1/1", "g0/2", "g1/0", "g0/0"]


def test_a_sample_cannot_write_to_the_terminal_what_a_model_made_up():
    [group] = make_groups(1, 1)
    rollout = replace(group.rollouts[0], text="[red]\x1b[31m\ud83d", reward=Reward(0.0, "why"))
    console = Console(width=80, record=True, file=io.StringIO())
    show_sample(3, (RolloutGroup(group.group_id, group.prompt, (rollout,)), rollout), console)
    shown = console.export_text()
    assert r"[red]\x1b[31m\ud83d" in shown and "why" in shown
    assert "2 to 2" in shown  # of version 0, trained on by version 2
    assert printable("a\u00e9\n\t\u4e2d") == "a\u00e9\n\t\u4e2d"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_exports_hold_every_rollout_with_all_of_its_tokens(run_folder, tmp_path, suffix):
    target = tmp_path / "new" / f"rows{suffix}"
    result = command(run_folder, "--export", target)
    assert result.exit_code == 0 and "5 rollouts written" in result.stdout
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    else:
        rows = pq.read_table(target).to_pylist()
    assert [row["rollout_id"] for row in rows] == ["g0/0", "g0/1", "g9.1/0", "g0/0", "g0/1"]
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 2]
    odd = rows[2]
    assert (odd["reward"], odd["extracted"], odd["answer"]) == (0.1, "\\frac{1}{3}", "1/3")
    assert odd["response"].startswith("half a pair ?") and odd["seed"] == 2**62 - 1
    assert odd["versions"] == [-1, -1, 3, 4, -1, 5]
    assert (odd["oldest_version"], odd["newest_version"]) == (3, 5)
    assert odd["loss_mask"] == [False, False, True, True, False, True]
    assert odd["token_ids"] == [5, 6, 7, 8, 9, 2] and odd["reference_logprobs"] is None
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_an_export_of_an_unknown_kind_is_refused_and_one_that_fails_leaves_nothing(
    run_folder, tmp_path
):
    store = ZarrStore(run_folder / "rollouts")
    with pytest.raises(ConfigError, match="JSON lines or parquet"):
        export_rollouts(store, [1], tmp_path / "rows.csv")
    with pytest.raises(Exception, match="holds no such step"):
        export_rollouts(store, [1, 7], tmp_path / "rows.jsonl")
    assert list(tmp_path.iterdir()) == []
