"""Resources that are not there, and resources that somebody else holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import ray
from runtime.sees import Sees

from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import ClusterError
from megatron_grpo.runtime.placement import plan_placement
from megatron_grpo.runtime.ray_cluster import RayCluster

SECOND = """
import sys
from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import ClusterError
from megatron_grpo.runtime.placement import plan_placement
from megatron_grpo.runtime.ray_cluster import RayCluster
nodes = int(sys.argv[2])
config = ClusterConfig(address=sys.argv[1], nodes=nodes, placement_deadline_s=3.0)
try:
    RayCluster(config, plan_placement(1, 0, 1, 0))
except ClusterError as error:
    print(error)
"""


def refusal_of_a_second_run(address: str, nodes: int) -> str:
    command = [sys.executable, "-c", SECOND, address, str(nodes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.stdout.strip() or done.stderr


@pytest.mark.slow
def test_i1_a_waiting_group_has_a_deadline_and_says_what_it_lacks():
    cores = os.cpu_count() or 1
    with RayCluster(ClusterConfig(), plan_placement(cores, 0, 1, 0)):
        address = ray.get_runtime_context().gcs_address
        busy = refusal_of_a_second_run(address, nodes=1)
        assert "1 bundles not granted within 3 s" in busy
        assert "has 0 of 1 CPU free" in busy
        few = refusal_of_a_second_run(address, nodes=3)
        assert "1 of 3 nodes joined within 3 s" in few


@pytest.mark.slow
def test_i1_what_can_never_be_granted_is_refused_at_once():
    started = time.monotonic()
    with pytest.raises(ClusterError, match="needs 1 GPU on one node; the nodes have 1 x 0 GPU"):
        RayCluster(ClusterConfig(placement_deadline_s=600.0), plan_placement(2, 0, 1, 1))
    assert time.monotonic() - started < 120  # of which Ray's own start takes most
    assert not ray.is_initialized()


COLOCATED = """
import json, sys
from megatron_grpo.config import ClusterConfig, ParallelConfig
from megatron_grpo.runtime.placement import plan_placement
from megatron_grpo.runtime.ray_cluster import RayCluster, call_all
placement = plan_placement(4, 2, 2, 1, ParallelConfig(tensor=2, pipeline=2), colocated=True)
with RayCluster(ClusterConfig(address=sys.argv[1]), placement) as cluster:
    members = [cluster.start(f"m{i}", i, "runtime.sees:Sees", (), {}) for i in range(6)]
    lookups = call_all(members, "lookup_s", [()] * 6, 120)
    assert max(lookups) < 1, lookups
    print(json.dumps(call_all(members, "gpus", [()] * 6, 120)))
"""


@pytest.mark.slow
def test_a_colocated_engine_sees_the_gpus_of_its_policy_ranks_and_no_others():
    cores = os.cpu_count() or 1
    # Ray hands out GPUs that are not there as it does real ones. One is in use already.
    with ray.init(num_cpus=max(8, cores), num_gpus=5, include_dashboard=False):
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        holder = ray.remote(num_gpus=1, runtime_env={"env_vars": path})(Sees).remote()
        held = ray.get(holder.gpus.remote(), timeout=120)
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-c", COLOCATED, address]
        done = subprocess.run(
            command, env={**os.environ, **path}, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    *ranks, first, second = json.loads(done.stdout.splitlines()[-1])
    assert sorted([held, *ranks]) == ["0", "1", "2", "3", "4"]
    assert [first, second] == [",".join(ranks[:2]), ",".join(ranks[2:])]


ORPHAN = """
import os, sys, time
from megatron_grpo.runtime.ray_start import children_in_a_group_of_their_own
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.05)
with children_in_a_group_of_their_own():
    pass
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpgrp() == os.getpid()}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def test_a_run_in_the_background_of_a_shell_that_is_gone_starts_all_the_same(tmp_path):
    """Its group is gone once it leaves it: it cannot go back, and leads one of its own."""
    script, said = tmp_path / "orphan.py", tmp_path / "said"
    script.write_text(ORPHAN)
    shell = f"{sys.executable} {script} {said} $$ &"
    subprocess.run(["sh", "-c", shell], process_group=0, timeout=60)
    until = time.monotonic() + 60
    while not said.exists():
        assert time.monotonic() < until, "the orphan did not get through"
        time.sleep(0.1)
    assert said.read_text() == "True"
