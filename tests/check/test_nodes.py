"""What nodes find out together: decided from what they told, and once for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import save_tiny
from toy import save_toy_tokenizer

from megatron_grpo.check.identity import Seen, files_digest
from megatron_grpo.check.nodes import allocation, differences, partners, slow_pairs
from megatron_grpo.errors import ClusterError


def seen(host: str, clock_s: float = 100.0, **changes: str) -> Seen:
    return Seen({"code": "a", "data": "b", **changes}, host, clock_s)


def test_equal_nodes_are_told_so_once():
    [finding] = differences([seen("n1"), seen("n2", 100.4)])
    assert (finding.level, finding.text) == ("ok", "same code, data and clock")


def test_nodes_that_differ_are_named_with_both_values():
    found = list(differences([seen("n1"), seen("n2", code="x"), seen("n3", 93.0)]))
    assert [(f.level, f.where, f.text) for f in found] == [
        ("problem", "code", "n2: x; n1: a"),
        ("problem", "clock", "differs from n1's on n3 by -7.0 s"),
    ]


@given(st.integers(2, 40))
def test_every_pair_meets_once_and_in_the_same_round(size):
    met = [partners(rank, size) for rank in range(size)]
    for rank, others in enumerate(met):
        assert sorted(others) == [other for other in range(size) if other != rank]
    # Everyone keeps to its own order; nobody waits for ever: the next free pair always exists.
    left = [list(others) for others in met]
    while any(left):
        ready = [rank for rank in range(size) if left[rank] and left[left[rank][0]][0] == rank]
        assert ready
        for rank in ready:
            left[rank].pop(0)


def test_pairs_below_half_of_the_median_are_named_slowest_first():
    rates = {(0, 1): 10e9, (0, 2): 4e9, (0, 3): 10e9, (1, 2): 3e9, (1, 3): 11e9, (2, 3): 10e9}
    found = list(slow_pairs(rates, ["a", "b", "c", "d"], "gloo"))
    assert [f.where for f in found] == ["b - c", "a - c", "point to point"]
    assert "3 GB/s, the median pair has 10 (gloo)" in found[0].text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_PROCID": ""}, "no task of a SLURM step"),
        ({"SLURM_NTASKS": "4"}, "4 tasks on 2 nodes"),
    ],
)
def test_anything_but_one_task_per_node_is_refused(changes, said):
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
    }
    assert allocation(environment).hosts == ("n1", "n2")
    with pytest.raises(ClusterError, match=said):
        allocation({**environment, **changes})


def test_a_folder_is_recognised_by_names_sizes_and_beginnings(tmp_path):
    (tmp_path / "a").write_text("1")
    before = files_digest([tmp_path])
    assert files_digest([tmp_path]) == before
    (tmp_path / "a").write_text("2")
    assert files_digest([tmp_path]) != before
    assert files_digest([tmp_path / "none"]).endswith("is missing")


@pytest.mark.slow
def test_three_processes_compare_themselves_and_measure_their_links(tmp_path):
    model = save_toy_tokenizer(save_tiny(tmp_path / "model", "qwen3"))
    config = tmp_path / "config.yaml"
    text = {
        "name": "x",
        "run_dir": str(tmp_path / "runs" / "x"),
        "steps": 1,
        "model": {"path": str(model)},
        "task": {"type": "chats", "path": "shipped:chats", "max_row_tokens": 256},
        "algorithm": {"type": "sft"},
        "policy": {"type": "reference"},
    }
    config.write_text(json.dumps(text))
    command = [sys.executable, "-m", "megatron_grpo.cli", "check", str(config)]
    processes = []
    for rank in range(3):
        environment = {
            **os.environ,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_STEP_NODELIST": "localhost,localhost,localhost",
            "SLURM_JOB_ID": str(os.getpid()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(
            subprocess.Popen(
                [*command, "--on-nodes", "--json"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    assert [out for out, _ in told[1:]] == ["", ""]
    where = {f["where"]: f["text"] for f in json.loads(told[0][0])["findings"]}
    assert where["3 nodes"] == "same code, config, model, data, packages and clock"
    assert where[str(tmp_path / "runs")] == "is shared by all nodes"
    assert "over 3 nodes (gloo)" in where["all-reduce"]
    assert "over 3 pairs (gloo)" in where["point to point"]
    assert list((tmp_path / "runs").iterdir()) == []
