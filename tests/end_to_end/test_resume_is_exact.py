"""Stopping and going on is the same as not stopping, to the last bit, wherever a run is killed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from end_to_end import killed_runs, stopped_runs
from end_to_end.leftovers import marked_environment, processes_of, wait_until_none
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_runs import (
    groups_of,
    metrics_of,
    rates_of,
    save_tiny_model,
    tiny_config,
    weights_of,
)
from toy import EOS
from transformers import GenerationConfig

from megatron_grpo.config import RunConfig, dump_config
from megatron_grpo.errors import ConfigError, RunStopped
from megatron_grpo.generation.reference import ReferenceGenerator
from megatron_grpo.train import loop
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.checkpoints import list_checkpoints, remove_checkpoint
from megatron_grpo.train.replay import run_replay
from megatron_grpo.train.run_folder import open_run

KILLS = 20
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    GenerationConfig(eos_token_id=EOS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_training(tiny_config(model, folder), QUIET)
    return folder


def assert_same_run(folder: Path, wanted: Path) -> None:
    """Weights, metrics and every rollout, to the last bit."""
    assert weights_of(folder) == weights_of(wanted)
    assert metrics_of(folder) == metrics_of(wanted)
    found, expected = groups_of(folder), groups_of(wanted)
    assert list(found) == list(expected)
    for step, groups in expected.items():
        for one, other in zip(found[step], groups, strict=True):
            assert one.prompt.prompt_id == other.prompt.prompt_id
            for a, b in zip(one.rollouts, other.rollouts, strict=True):
                assert np.array_equal(a.token_ids, b.token_ids)
                assert np.array_equal(a.behavior_logprobs, b.behavior_logprobs)
                assert np.array_equal(a.versions, b.versions)
                assert (a.seed, a.reward) == (b.seed, b.reward)


def prompts_of(folder: Path) -> list[str]:
    return [group.prompt.prompt_id for groups in groups_of(folder).values() for group in groups]


def lines_of(script: ModuleType, *arguments: object) -> list[dict[str, Any]]:
    """The JSON lines that a script prints."""
    done = subprocess.run(
        [sys.executable, str(script.__file__), *map(str, arguments)],
        stdout=subprocess.PIPE,
        timeout=280,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_h3_h4_a_run_killed_at_twenty_random_moments_ends_as_if_it_had_not_been(model, tmp_path):
    [result] = lines_of(killed_runs, model, tmp_path, KILLS, 7)
    assert result["failed"] == []
    assert len(result["killed_in"]) == KILLS
    assert set(Counter(result["killed_in"])) == set(killed_runs.PLACES)
    prompts = prompts_of(tmp_path / "straight")
    assert len(set(prompts)) == len(prompts) == killed_runs.STEPS * 2  # one epoch: none twice
    assert result["finished"]
    for name in result["finished"]:
        assert_same_run(tmp_path / name, tmp_path / "straight")


def test_h1_h5_parts_of_a_run_are_one_run(model, straight, tmp_path):
    folder = tmp_path / "run"
    for steps in (5, 6):  # the last step of a part is saved, whatever `every` says
        run_training(tiny_config(model, folder, steps=steps, checkpoint={"every": None}), QUIET)
    # Cosine from 1e-2 over warm-up 2 and steps 2 .. 8: 5e-3 (1 + cos(pi k / 6))
    rates = [5e-3, 1e-2, 1e-2, 9.3301270e-3, 7.5e-3, 5e-3]
    assert rates_of(folder) == rates_of(straight) == pytest.approx(rates, rel=1e-6)
    assert weights_of(folder) == weights_of(straight)
    assert [line["step"] for line in metrics_of(folder) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert run_training(tiny_config(model, folder), QUIET) is None  # and no step 7
    assert len(metrics_of(folder)) == 6 + len([0, 3, 5, 6])


def test_h3_a_damaged_checkpoint_is_passed_over_and_what_came_later_is_cut_off(
    model, straight, tmp_path
):
    folder = tmp_path / "run"
    run_training(tiny_config(model, folder), QUIET)
    (folder / "summary.json").unlink()
    newest = list_checkpoints(folder / "checkpoints")[-1]
    damaged = newest.folder / "policy" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    spoken = io.StringIO()
    run_training(tiny_config(model, folder), Console(file=spoken, width=300))
    assert "step-000006 is passed over: policy/weights.safetensors has" in spoken.getvalue()
    assert "going on after step 5 of 6" in spoken.getvalue()
    assert_same_run(folder, straight)


def test_h2_changes_that_matter_are_refused_by_name_and_others_are_not(model, tmp_path):
    folder = tmp_path / "run"
    run_training(tiny_config(model, folder, steps=2), QUIET)
    for changes, text in (
        ({"seed": 2}, "seed: was 1, is 2"),
        ({"task": {"rows": 29}}, "task.rows: was 30, is 29"),
        ({"policy": {"optimizer": {"learning_rate": 0.5}}}, "learning_rate: was 0.01, is 0.5"),
    ):
        with pytest.raises(ConfigError, match=text):
            run_training(tiny_config(model, folder, **changes), QUIET)
    layout = {"policy": {"microbatch_tokens": 512}, "evaluation": {"every": 2}}
    run_training(tiny_config(model, folder, steps=3, **layout), QUIET)
    assert len(rates_of(folder)) == 3


def test_h2_another_optimizer_cannot_be_accepted_and_its_refusal_does_not_say_so(model, tmp_path):
    folder = tmp_path / "run"
    run_training(tiny_config(model, folder, steps=2), QUIET)
    config = tiny_config(model, folder, policy={"optimizer": {"type": "sgd"}})
    for accepted in (False, True):
        with pytest.raises(ConfigError, match=r"no other policy.optimizer.type can take up") as no:
            run_training(config, QUIET, accept_changes=accepted)
        assert "--accept-changes" not in str(no.value)


def test_another_frozen_model_is_refused_until_it_is_accepted(model, tmp_path):
    folder = tmp_path / "run"
    other = save_tiny_model(tmp_path / "other")
    (other / "generation_config.json").write_bytes((model / "generation_config.json").read_bytes())
    weights = load_file(other / "model.safetensors")
    weights = {name: value * 1.5 for name, value in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    kl = {"kl_coefficient": 0.1}
    run_training(tiny_config(model, folder, steps=2, algorithm=kl), QUIET)
    config = tiny_config(model, folder, steps=3, algorithm={**kl, "reference_path": str(other)})
    with pytest.raises(ConfigError, match=r"frozen reference model is another.*--accept-changes"):
        run_training(config, QUIET)
    run_training(config, QUIET, accept_changes=True)
    assert len(rates_of(folder)) == 3


def test_h2_accepted_new_data_is_begun_at_its_start(model, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    run_training(tiny_config(model, folder, steps=3), QUIET)
    few = {"task": {"rows": 10, "seed": 5}}
    run_training(tiny_config(model, folder, steps=5, **few), QUIET, accept_changes=True)
    run_training(tiny_config(model, other, steps=2, **few), QUIET)
    assert prompts_of(folder)[6:] == prompts_of(other)


def test_a_folder_in_use_is_refused_and_fresh_moves_a_run_aside(model, tmp_path):
    folder = tmp_path / "run"
    config = tiny_config(model, folder, steps=1)
    run_training(config, QUIET)
    run_training(config, QUIET, fresh=True)
    assert (tmp_path / "run.1" / "summary.json").is_file()
    command = ["flock", str(folder / ".lock"), "sleep", "20"]
    with subprocess.Popen(command) as holder:
        time.sleep(0.5)
        with pytest.raises(ConfigError, match="is in use by process"):
            run_training(tiny_config(model, folder, steps=2), QUIET)
        holder.kill()


@pytest.mark.parametrize("patience_s", [60.0, 1e-3], ids=["finishes", "abandons"])
def test_a_signal_saves_and_the_run_goes_on_exactly(
    model, straight, tmp_path, monkeypatch, patience_s
):
    """With patience the running step is finished; without it the step before it is what counts."""
    config = tiny_config(
        model, tmp_path / "run", checkpoint={"every": None, "finish_step_s": patience_s}
    )
    waiting, asked = threading.Event(), []
    advance, next_groups = ReferenceGenerator._advance, loop.next_groups

    def interrupted(generator, one) -> None:
        if generator.version == 2 and not asked:  # generating for step 3
            assert waiting.wait(30)
            asked.append(os.kill(os.getpid(), signal.SIGUSR1))
            time.sleep(1.0)
        advance(generator, one)

    def told(run, before):
        if before.step == 2:
            waiting.set()
        return next_groups(run, before)

    monkeypatch.setattr(ReferenceGenerator, "_advance", interrupted)
    monkeypatch.setattr(loop, "next_groups", told)
    with pytest.raises(RunStopped, match="stopped by SIGUSR1") as stopped:
        run_training(config, QUIET)
    assert stopped.value.exit_code == 75
    steps = [one.step for one in list_checkpoints(config.folder / "checkpoints")]
    assert steps == [3 if patience_s > 1 else 2]
    run_training(tiny_config(model, config.folder), QUIET)
    assert_same_run(config.folder, straight)


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once_and_a_single_one_saves(model, straight, tmp_path):
    """Whether the run waits for rollouts, trains or saves: 128 + the signal's number, or 75."""
    runs = lines_of(stopped_runs, model, tmp_path)
    assert [(run["place"], run["signal"], run["times"]) for run in runs] == [
        (place, number.name, times) for place, number, times in stopped_runs.CASES
    ]
    for run in runs:
        twice = run["times"] == 2
        assert run["status"] == ({"SIGINT": 130, "SIGTERM": 143}[run["signal"]] if twice else 75)
        assert not twice or run["seconds"] < 2
        assert run["saved"] == ([2] if twice else [2, 4])
        assert not run["left"]
        assert run["again"] == 0
        assert_same_run(tmp_path / run["folder"], straight)


def test_a_step_is_replayed_to_the_last_bit_and_a_difference_is_told(model, straight, tmp_path):
    from_checkpoint = run_replay(straight, 6, [], QUIET)
    assert (from_checkpoint.started_after, from_checkpoint.exact) == (5, True)
    for folder in (straight / "checkpoints").iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
        remove_checkpoint(folder)
    from_the_model = run_replay(straight, 6, [], QUIET)
    assert (from_the_model.started_after, from_the_model.exact) == (0, True)
    shutil.copytree(tmp_path, straight / "checkpoints", dirs_exist_ok=True)
    other = run_replay(straight, 2, ["policy.optimizer.learning_rate=0.02"], QUIET)
    first, second = other.steps
    assert first.largest == 0.0  # the weights of step 1 are the model's own
    assert second.largest > 1e-3
    with pytest.raises(ConfigError, match="has no step 7"):
        run_replay(straight, 7, [], QUIET)


REAL: dict[str, Any] = {
    "steps": 8,
    "checkpoint": {"every": None, "keep_last": 3},
    "policy": {
        "type": "megatron",
        "dtype": "float32",
        "parallel": {"pipeline": 2},
        "microbatch_tokens": 256,
        "optimizer": {"learning_rate": 1e-3},
    },
    "generator": {
        "type": "vllm",
        "dtype": "float32",
        "max_model_tokens": 128,
        "kv_cache_bytes": 64 << 20,
        "threads": 1,
    },
}


def signal_after(config: RunConfig, steps: int, number: signal.Signals) -> int:
    """Train in a process of its own and signal its whole group after so many steps; its status."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with trained_for(config, steps, environment) as process:
        os.killpg(process.pid, number)
        return process.wait(120)


@contextmanager
def trained_for(
    config: RunConfig, steps: int, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process group of its own, once so many steps are done; killed afterwards."""
    file = config.folder.with_suffix(".yaml")
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "megatron_grpo.cli", "train", str(file)]
    log = config.folder / "metrics.jsonl"
    until = time.monotonic() + 240
    with subprocess.Popen(command, env=environment, process_group=0) as process:
        try:
            while not log.exists() or len(rates_of(config.folder)) < steps:
                assert process.poll() is None, f"no {steps} steps: status {process.returncode}"
                assert time.monotonic() < until, f"no {steps} steps in time"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_twice_ends_ray_megatron_and_vllm_while_a_rank_does_not_answer(model, tmp_path):
    changes = {**REAL, "steps": 10_000, "checkpoint": {"every": 2, "async_save": False}}
    config = tiny_config(model, tmp_path / "run", **changes)
    environment = marked_environment()
    environment.pop(OF_RANKS, None)  # tests before this one may have had ranks in this process
    with trained_for(config, 3, environment) as run:
        ranks = ranks_among(processes_of(environment))
        assert len(ranks) == 2
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(3.0)
        assert run.poll() is None  # it waits for the ranks, to finish the step
        asked = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(20) == 130
        assert time.monotonic() - asked < 5
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
    wait_until_none(environment, 90)  # Ray's agents look after their raylet now and then
    steps = [one.step for one in list_checkpoints(config.folder / "checkpoints")]
    done = len(rates_of(config.folder))
    assert done - 2 <= steps[-1] <= done
    with open_run(config, print, fresh=False, accept_changes=False) as folder:
        assert folder.steps_done == steps[-1]


# What ranks are started with, and engines are not.
OF_RANKS = "CUDA_DEVICE_MAX_CONNECTIONS"


def ranks_among(processes: dict[int, str]) -> list[int]:
    """Ray's actors that Megatron's ranks live in."""
    mark = f"{OF_RANKS}=".encode()
    return [
        pid
        for pid, line in processes.items()
        if line.startswith("ray::Host") and mark in Path(f"/proc/{pid}/environ").read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_megatron_and_vllm_go_on_exactly_after_a_signal_and_after_a_kill(model, tmp_path):
    straight = tiny_config(model, tmp_path / "straight", **REAL)
    run_training(straight, QUIET)
    config = tiny_config(model, tmp_path / "run", **REAL)
    assert signal_after(config, 2, signal.SIGTERM) == 75
    # Steps are short: one more may have ended before the signal was seen. It is the one saved.
    [saved] = [c.step for c in list_checkpoints(config.folder / "checkpoints")]
    assert signal_after(config, saved + 1, signal.SIGKILL) == -signal.SIGKILL
    run_training(config, QUIET)
    assert_same_run(config.folder, straight.folder)
    assert run_replay(config.folder, saved + 1, [], QUIET).exact
    other = run_replay(config.folder, saved + 2, ["policy.type=reference"], QUIET)
    assert (other.started_after, len(other.steps)) == (saved, 2)
    assert other.largest < 1e-4
