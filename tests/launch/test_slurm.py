"""The scripts: options, quoting, and what shellcheck and bash say of every variant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_launch.command import parse_seeds, parse_time
from grpo_launch.slurm import SlurmJob, render, sbatch_options

from megatron_grpo.errors import ConfigError

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def job(**changes) -> SlurmJob:
    values = dict(
        name="run",
        config=Path("/shared/it's here/config.yaml"),
        folder=Path("/shared/it's here"),
        run_dir=Path("/shared/runs/run"),
        work_dir=Path("/home/me/work dir"),
        python="/shared/venv/bin/python",
        nodes=4,
        time_s=7200,
    )
    return SlurmJob(**{**values, **changes})


VARIANTS = {
    "plain": {},
    "cpus": {"gpus_per_node": 0, "cpus_per_node": 2},
    "spares": {"spares": 1},
    "seeds": {"seeds": (1, 2, 7)},
    "heterogeneous": {"engine_nodes": 2, "engine_partition": "small"},
    "pyxis": {"container": "registry/image:1", "mounts": ("/data:/data",)},
    "apptainer": {"container": "/shared/image.sif", "mounts": ("/data:/data",)},
    "setup": {"setup": "module load cuda\nexport X='a b'\n"},
    "extra": {"extra": ("--qos=high", "-C h100")},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_i4_every_variant_passes_bash_and_shellcheck(variant, tmp_path):
    scripts = render(job(**VARIANTS[variant]))
    for name, text in (("train.sbatch", scripts.train), ("ray_node.sh", scripts.node)):
        path = tmp_path / name
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        told = subprocess.run([SHELLCHECK, "--shell=bash", path], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout


def sbatch_lines(text: str) -> list[str]:
    lines = text.splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_options_stand_before_the_first_command():
    lines = render(job(engine_nodes=2)).train.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_a_restart_appends_to_the_log_is_signalled_before_the_limit_and_may_requeue():
    options = sbatch_options(job())
    assert {"--open-mode=append", "--requeue", "--signal=B:USR1@300", "--time=02:00:00"} <= set(
        options
    )


def test_whole_nodes_are_the_default_because_a_task_gets_one_core_otherwise():
    assert {"--exclusive", "--mem=0"} <= set(sbatch_options(job()))
    shared = sbatch_options(job(cpus_per_node=6))
    assert "--cpus-per-task=6" in shared and "--exclusive" not in shared


def test_a_heterogeneous_job_has_its_own_block_and_one_step_over_both():
    text = render(job(engine_nodes=2, engine_partition="small", engine_gpus_per_node=4)).train
    before, _, after = text.partition("#SBATCH hetjob")
    assert "--gpus-per-node=8" in before and "--nodes=4" in before
    assert sbatch_lines(after)[:3] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4"]
    assert "--partition=small" in after
    assert "srun --het-group=0,1 --job-name=ray" in after


def test_seeds_make_an_array_with_a_run_folder_each(tmp_path):
    text = render(job(seeds=(3, 11))).train
    assert "--array=0-1" in sbatch_lines(text)
    # The lines themselves decide, run as the second task would.
    lines = text[text.index("FOLDER=") : text.index("export GRPO_JOB=")]
    done = subprocess.run(
        ["bash", "-u", "-c", lines + 'echo "$GRPO_RUN_DIR $GRPO_SEED"'],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["/shared/runs/run-seed11", "11"]


def test_containers_get_the_runs_folders_and_the_users_mounts():
    pyxis = render(job(**VARIANTS["pyxis"])).train
    assert pyxis.count("--container-image=registry/image:1") == 2  # all nodes, and the driver
    assert "/data:/data" in pyxis and "/home/me/work dir:/home/me/work dir" in pyxis
    apptainer = render(job(**VARIANTS["apptainer"])).train
    assert apptainer.count("apptainer exec --nv") == 2
    assert "--bind /data:/data" in apptainer


def test_with_spares_slurm_leaves_a_job_alone_that_lost_a_node():
    assert "--no-kill" in sbatch_options(job(spares=1))
    assert "--nodes=5" in sbatch_options(job(spares=1))
    # Without one SLURM is the second line: it requeues the job when it notices.
    assert "--no-kill" not in sbatch_options(job())


@pytest.mark.parametrize(
    ("time_s", "grace_s", "expected"),
    [(None, None, 300), (86400, None, 300), (1200, None, 120), (120, None, 30), (3600, 900, 900)],
)
def test_how_long_before_the_limit_the_run_is_asked_to_save(time_s, grace_s, expected):
    assert job(time_s=time_s, grace_s=grace_s).grace == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": (1, 2), "engine_nodes": 2}, "--seeds"),
        ({"mounts": ("/a:/a",)}, "--mount"),
        ({"time_s": 30}, "--time"),
        ({"time_s": 120, "grace_s": 120}, "--grace"),
        ({"extra": ("qos high",)}, "--sbatch"),
        ({"extra": ("--qos=a\n#SBATCH --exclusive",)}, "--sbatch"),
    ],
)
def test_options_that_cannot_go_together_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError) as caught:
        job(**changes)
    assert caught.value.where == named


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "0", "1-"])
def test_times_that_slurm_would_misread_are_refused(text):
    with pytest.raises(ConfigError):
        parse_time(text)


@pytest.mark.parametrize("text", ["", "1,", "1,1", "a", "1-3"])
def test_seeds_are_different_numbers(text):
    with pytest.raises(ConfigError):
        parse_seeds(text)
