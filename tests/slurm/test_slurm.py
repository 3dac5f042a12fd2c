"""Our launch script on a real SLURM of four nodes: ends, limits, losses."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from grpo_launch.hostlist import expand_hosts

pytestmark = pytest.mark.timeout(1500)
TWO_NODES = ("--nodes", "2", "--cpus-per-node", "1", "--time", "30")
STEPS = 120
LONG = 600  # more than the minute that SLURM may take to look at a new limit


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def rewards(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row["reward_mean"] for row in map(json.loads, lines) if "reward_mean" in row]


def test_grpo_across_three_nodes_completes_with_its_reward_recorded(cluster, grpo):
    job = cluster.launch(grpo("grpo", 2), "--nodes", "3", "--cpus-per-node", "1", "--time", "30")
    state = cluster.wait(job, 900)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), job.log[-4000:]
    recorded = rewards(job.run_dir)
    assert len(recorded) == 2 and all(math.isfinite(reward) for reward in recorded)
    cluster.wait_until_clean()


def test_engines_have_nodes_of_their_own_in_a_heterogeneous_job(cluster, grpo):
    parts = ("--nodes", "1", "--engine-nodes", "1", "--engine-partition", "main")
    job = cluster.launch(grpo("parts", 1), *parts, "--cpus-per-node", "3", "--time", "30")
    cluster.wait_for(job, "head listens")
    told = cluster.call("scontrol", "-o", "show", "job", job.number)
    assert len(set(re.findall(r" NodeList=(\S+)", told))) == 2  # one of each part
    state = cluster.wait(job, 600)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), job.log[-4000:]
    assert len(rewards(job.run_dir)) == 1
    cluster.wait_until_clean()


def test_seeds_are_runs_of_their_own_in_one_array(cluster, sft):
    one = ("--nodes", "1", "--cpus-per-node", "2", "--time", "30")
    both = cluster.launch(sft("seeded", 5), *one, "--seeds", "3,4")
    jobs = [
        replace(
            both,
            number=f"{both.number}_{place}",
            run_dir=both.run_dir.with_name(f"seeded-seed{seed}"),
        )
        for place, seed in enumerate((3, 4))
    ]
    for job in jobs:
        assert cluster.wait(job)["JobState"] == "COMPLETED", job.log[-4000:]
    assert weights(jobs[0].run_dir) != weights(jobs[1].run_dir)


def test_the_exit_code_of_a_run_that_cannot_start_arrives(cluster, sft, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no rows\n")
    config = sft("bad", 3)
    values = json.loads(config.read_text())
    values["task"]["path"] = str(bad)
    config.write_text(json.dumps(values))
    job = cluster.launch(config, *TWO_NODES, "--force")  # `check` finds it from here
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), job.log[-4000:]
    assert "is not" in job.log or "JSON" in job.log
    assert state["Restarts"] == "0"


def test_time_limit_saves_requeues_and_resumes_to_the_same_weights(cluster, sft):
    cut = cluster.launch(sft("cut", LONG), *TWO_NODES)
    cluster.wait_for_step(cut, 15)
    # A new limit three minutes from now: SLURM itself sends the signal ahead of it.
    hours, minutes, _ = cluster.state(cut)["RunTime"].rpartition("-")[2].split(":")
    limit = 60 * int(hours) + int(minutes) + 3
    cluster.call("scontrol", "update", f"JobId={cut.number}", f"TimeLimit={limit}")
    whole = cluster.launch(sft("whole", LONG), *TWO_NODES)
    cluster.wait_for(cut, "the time limit is near", 300)
    # The next start has the job's limit, which would be as short.
    cluster.call("scontrol", "update", f"JobId={cut.number}", "TimeLimit=30")
    cluster.wait_for(cut, "start 2", 300)
    state = cluster.wait(cut)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cut.log[-4000:]
    assert "going on after step" in cut.log
    assert cluster.wait(whole)["JobState"] == "COMPLETED", whole.log[-4000:]
    assert weights(cut.run_dir) == weights(whole.run_dir)


def test_scancel_leaves_no_process(cluster, sft):
    job = cluster.launch(sft("cancelled", 10_000), *TWO_NODES)
    cluster.wait_for_step(job, 3)
    cluster.call("scancel", job.number)
    assert cluster.wait(job, 120)["JobState"] == "CANCELLED"
    cluster.wait_until_clean()


def test_two_jobs_on_one_node_do_not_disturb_each_other(cluster, sft):
    one = ("--nodes", "1", "--cpus-per-node", "2", "--time", "30", "--sbatch=--nodelist=node2")
    first = cluster.launch(sft("first", 20), *one)
    second = cluster.launch(sft("second", 20), *one)
    cluster.wait_for(first, "head listens")
    cluster.wait_for(second, "head listens")
    ended = [cluster.wait(job)["JobState"] for job in (first, second)]
    assert ended == ["COMPLETED", "COMPLETED"], first.log[-2000:] + second.log[-2000:]
    assert weights(first.run_dir) == weights(second.run_dir)


@pytest.mark.parametrize("lost", ["worker", "head"])
def test_a_lost_node_requeues_and_the_run_goes_on(cluster, sft, lost):
    job = cluster.launch(sft(f"lost_{lost}", STEPS), *TWO_NODES)
    cluster.wait_for_step(job, 25)
    names = cluster.call("scontrol", "show", "hostnames", cluster.state(job)["NodeList"]).split()
    node = names[0 if lost == "head" else 1].removeprefix("node")
    cluster.lab("node-down", node)
    try:
        cluster.wait_for(job, "start 2", 400)
        state = cluster.wait(job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), job.log[-4000:]
        assert f"node{node}" not in cluster.state(job)["NodeList"].split(",")
        assert "going on after step" in job.log
    finally:
        cluster.lab("node-up", node)
        cluster.lab("wait-idle", "100")


def test_a_lost_node_is_replaced_by_the_spare_within_the_job(cluster, sft):
    job = cluster.launch(sft("spare", STEPS), *TWO_NODES, "--spares", "1")
    cluster.wait_for_step(job, 25)
    names = cluster.call("scontrol", "show", "hostnames", cluster.state(job)["NodeList"]).split()
    # The policy's two ranks are on two of the three; the second is never the head.
    node = names[1].removeprefix("node")
    cluster.lab("node-down", node)
    try:
        cluster.wait_for(job, "going on without them; spare nodes left: 0", 400)
        state = cluster.wait(job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), job.log[-4000:]
        assert "going on after step" in job.log
    finally:
        cluster.lab("node-up", node)
        cluster.lab("wait-idle", "100")


@pytest.mark.parametrize(
    "names",
    [
        ["gpu7"],
        ["gpu01", "gpu02", "gpu03", "gpu07", "login"],
        ["n8", "n9", "n10", "n11"],
        ["n098", "n099", "n100"],
        ["n1-ib", "n2-ib"],
        ["r1n8", "r1n9", "r2n8", "r2n9"],
        ["a.b1.c", "a.b2.c", "a-b-3"],
        [f"rack{r:02d}-node{n:03d}" for r in range(3) for n in range(12)],
    ],
)
def test_host_lists_mean_what_slurm_says_they_mean(cluster, names):
    printed = cluster.call("scontrol", "show", "hostlist", ",".join(names)).strip()
    assert expand_hosts(printed) == cluster.call("scontrol", "show", "hostnames", printed).split()
    assert sorted(expand_hosts(printed)) == sorted(names)


def test_check_on_nodes_compares_and_measures_them(cluster, sft):
    config = sft("checked", 3)
    check = [sys.executable, "-m", "megatron_grpo.cli", "check", str(config), "--json"]
    srun = ["srun", "--nodes=3", "--ntasks-per-node=1", "--export=ALL"]
    told = json.loads(cluster.call(*srun, *check, "--on-nodes", limit_s=300))
    assert told["ok"] is True
    where = {finding["where"]: finding["text"] for finding in told["findings"]}
    assert where["3 nodes"].startswith("same code, config, model, data, packages")
    assert "over 3 nodes (gloo)" in where["all-reduce"]
    assert "over 3 pairs (gloo)" in where["point to point"]
