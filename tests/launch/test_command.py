"""`launch slurm` as a person meets it, with an `sbatch` that only remembers what it was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import save_tiny
from toy import save_toy_tokenizer
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import load_config
from megatron_grpo.errors import ClusterError, ConfigError

SBATCH = '#!/bin/bash\necho "$*" >"$(dirname "$0")/asked"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_toy_tokenizer(save_tiny(tmp_path_factory.mktemp("m") / "model", "qwen3"))


@pytest.fixture
def config(tmp_path, model) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: run\nsteps: 2\nrun_dir: {tmp_path}/runs/run\nmodel: {{path: {model}}}\n"
        "task: {type: chats, path: 'shipped:chats', max_row_tokens: 256}\nalgorithm: {type: sft}\n"
        "policy: {type: megatron, parallel: {data: 2}}\n"
    )
    return path


def use_sbatch(monkeypatch, folder: Path, rest: str) -> Path:
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH + rest)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "asked"


def launch(config: Path, *options: str):
    command = ["launch", "slurm", str(config), "--nodes", "2", "--gpus-per-node", "0", *options]
    return CliRunner().invoke(app, command)


def test_a_submitted_job_has_its_files_and_says_how_to_follow_it(tmp_path, monkeypatch, config):
    asked = use_sbatch(monkeypatch, tmp_path / "bin", "echo '4711;cluster'")
    done = launch(config, "steps=7")
    assert done.exit_code == 0, done.output
    [folder] = (tmp_path / "runs" / "run.slurm").iterdir()
    assert asked.read_text().split() == ["--parsable", str(folder / "train.sbatch")]
    assert load_config(folder / "config.yaml").steps == 7
    assert (folder / "ray_node.sh").exists()
    for line in (f"tail -F {folder}/slurm-4711.log", "scancel 4711", "srun --jobid 4711"):
        assert line in done.output


def test_a_dry_run_shows_the_script_and_writes_nothing(tmp_path, monkeypatch, config):
    asked = use_sbatch(monkeypatch, tmp_path / "bin", "echo 1")
    done = launch(config, "--dry-run")
    assert done.exit_code == 0
    assert "#SBATCH --nodes=2" in done.output
    assert not asked.exists() and not (tmp_path / "runs").exists()


def test_slurms_own_words_are_in_the_error(tmp_path, monkeypatch, config):
    use_sbatch(monkeypatch, tmp_path / "bin", "echo 'sbatch: error: no such partition' >&2; exit 1")
    error = launch(config).exception
    assert isinstance(error, ClusterError)
    assert "no such partition" in str(error) and "\n" not in str(error)


def test_what_check_finds_is_not_submitted_unless_forced(tmp_path, monkeypatch, config):
    asked = use_sbatch(monkeypatch, tmp_path / "bin", "echo 1")
    done = launch(config, "policy.parallel.tensor=3")
    assert done.exit_code == 1
    assert "does not divide the model's 4 attention heads" in done.output
    assert not asked.exists()
    assert launch(config, "policy.parallel.tensor=3", "--force").exit_code == 0
    assert asked.exists()


def test_gpus_that_nobody_would_use_are_refused(config):
    command = ["launch", "slurm", str(config), "--nodes", "2", "--force"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, ConfigError)
    assert error.where == "cluster.gpus_per_rank"
