"""What the job's scripts decide: statuses, requeueing, spare nodes, and that nothing is left."""

from __future__ import annotations

import os
import signal
import time

import pytest
from launch.shims import FakeJob

# A training that saves when it is asked to.
OBEDIENT = """
trap 'exit 75' USR1
echo on >"$FAKE/trains"
while :; do sleep 0.1; done
"""


def checkpoint(job: FakeJob, step: int) -> None:
    folder = job.folder / "run" / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_the_status_of_the_training_is_the_jobs_and_nothing_is_left(tmp_path):
    job = FakeJob(tmp_path)
    log = job.finish(process := job.start("exit 7"))
    assert process.returncode == 7, log
    assert job.status() == "7"
    assert not job.requeued()
    assert job.left() == []
    assert (job.fake / "ray").read_text().split("\n")[:3] == ["up token"] * 3
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "job" / "77" / "ray_token").exists()


def test_the_driver_is_told_where_the_cluster_is_and_how_many_nodes_it_has(tmp_path):
    job = FakeJob(tmp_path)
    log = job.finish(process := job.start("exit 0"))
    assert process.returncode == 0, log
    told = (job.fake / "driver").read_text()
    assert "cluster.address=127.0.0.1:9" in told and "cluster.nodes=3" in told
    assert f"run_dir={tmp_path}/run" in told


def test_a_ray_that_does_not_come_up_at_first_is_started_again(tmp_path):
    job = FakeJob(tmp_path)
    (job.fake / "slow").touch()
    log = job.finish(process := job.start("exit 0"))
    assert process.returncode == 0, log
    assert "Ray did not start (try 1 of 5)" in log


def test_a_job_restarted_after_its_training_was_done_does_nothing(tmp_path):
    job = FakeJob(tmp_path)
    job.finish(job.start("exit 0"))
    log = job.finish(process := job.start("exit 9", restarts=1))
    assert process.returncode == 0
    assert "nothing is left to do" in log


def test_i4_a_node_whose_ray_fails_ends_the_job_at_once(tmp_path):
    job = FakeJob(tmp_path)
    process = job.start("echo on >$FAKE/trains; while :; do sleep 0.1; done")
    job.wait_for(job.fake / "trains")
    began = time.monotonic()
    (job.fake / "break1").touch()
    log = job.finish(process)
    assert process.returncode == 5, log
    assert time.monotonic() - began < 25  # 10 on a machine of its own
    assert not job.requeued()
    assert job.left() == []


def test_usr1_ahead_of_the_limit_is_saved_and_requeued(tmp_path):
    job = FakeJob(tmp_path)
    process = job.start(OBEDIENT)
    job.wait_for(job.fake / "trains")
    os.kill(process.pid, signal.SIGUSR1)
    log = job.finish(process)
    assert "requeueing" in log
    assert (job.fake / "told-slurm").read_text() == "requeue 77\n"
    assert job.status() == "75"
    assert job.left() == []


def test_usr1_that_comes_after_the_end_does_not_requeue(tmp_path):
    job = FakeJob(tmp_path)
    process = job.start("trap 'exit 0' USR1; echo on >$FAKE/trains; while :; do sleep 0.1; done")
    job.wait_for(job.fake / "trains")
    os.kill(process.pid, signal.SIGUSR1)
    log = job.finish(process)
    assert process.returncode == 0, log
    assert not job.requeued()


def test_restarts_that_save_nothing_come_to_an_end(tmp_path):
    job = FakeJob(tmp_path)
    checkpoint(job, 5)
    process = job.start(OBEDIENT, restarts=1)
    job.wait_for(job.fake / "trains")
    os.kill(process.pid, signal.SIGUSR1)
    log = job.finish(process)
    assert process.returncode == 75
    assert "saved nothing" in log
    assert not job.requeued()


def test_a_restart_that_saved_something_goes_on(tmp_path):
    job = FakeJob(tmp_path)
    checkpoint(job, 5)
    process = job.start(OBEDIENT, restarts=1)
    job.wait_for(job.fake / "trains")
    checkpoint(job, 6)
    os.kill(process.pid, signal.SIGUSR1)
    job.finish(process)
    assert job.requeued()


@pytest.mark.slow
def test_a_lost_node_without_a_spare_requeues(tmp_path):
    job = FakeJob(tmp_path)
    process = job.start(
        'echo on >$FAKE/trains; until [ -e "$FAKE/lost" ]; do sleep 0.1; done; exit 1'
    )
    job.wait_for(job.fake / "trains")
    job.power_off(3)
    (job.fake / "lost").touch()
    log = job.finish(process)
    assert "1 of 3 nodes are gone" in log
    assert job.requeued()
    assert job.left() == []


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_the_spare(tmp_path):
    job = FakeJob(tmp_path, changes={"spares": 1})
    process = job.start(
        '[ -e "$FAKE/lost" ] && exit 0; echo on >$FAKE/trains; '
        'until [ -e "$FAKE/lost" ]; do sleep 0.1; done; exit 1'
    )
    job.wait_for(job.fake / "trains")
    job.power_off(4)
    (job.fake / "lost").touch()
    log = job.finish(process, limit_s=200)
    assert "going on without them; spare nodes left: 0" in log
    assert process.returncode == 0, log
    assert len((job.fake / "driver").read_text().splitlines()) == 2
    assert not job.requeued()
    assert job.left() == []


def test_term_ends_everything_with_143(tmp_path):
    job = FakeJob(tmp_path)
    process = job.start("trap 'exit 143' TERM; echo on >$FAKE/trains; while :; do sleep 0.1; done")
    job.wait_for(job.fake / "trains")
    os.kill(process.pid, signal.SIGTERM)
    job.finish(process)
    assert process.returncode == 143
    assert job.left() == []
