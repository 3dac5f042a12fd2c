"""A port that was chosen is still free when it is used."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TextIO, cast

import pytest

from megatron_grpo import ports
from megatron_grpo.errors import ClusterError
from megatron_grpo.ports import BLOCK, candidates, reserve_ports

# As vLLM does: choose now, listen later.
TAKES = """
import socket, sys, time
from megatron_grpo.ports import reserve_ports
sys.stdin.readline()
held = reserve_ports()
time.sleep(1)
with socket.create_server(("", held.first)):
    print(held.first, flush=True)
    sys.stdin.readline()
"""


def process(stack: ExitStack) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TAKES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return stack.enter_context(subprocess.Popen(command, **pipes))


def test_i2_32_processes_that_choose_at_once_all_get_to_listen_on_ports_of_their_own():
    with ExitStack() as stack:
        started = [process(stack) for _ in range(32)]
        for one in started:
            print("go", file=one.stdin, flush=True)
        chosen = sorted(int(cast(TextIO, one.stdout).readline()) for one in started)
        # `Popen` closes their input when the block ends, and they end.
    assert [one.returncode for one in started] == [0] * 32
    assert all(low + BLOCK <= high for low, high in itertools.pairwise(chosen))


def test_i2_a_port_on_which_somebody_listens_is_passed_over():
    first, second = candidates(os.getpid())[:2]
    # In the middle of the block: all of it has to be free.
    with socket.create_server(("", first + 3)):
        held = reserve_ports()
    held.close()
    assert held.first == second


def test_i2_ports_come_from_where_the_kernel_gives_none_to_strangers(monkeypatch, tmp_path):
    told = tmp_path / "range"
    monkeypatch.setattr(ports, "_KERNELS_RANGE", told)
    told.write_text("32768\t60999\n")
    blocks = candidates(7)
    # (32768 - 10240) / 16 below, and 61008, 61024 ... 65504 above.
    assert (len(blocks), min(blocks), max(blocks)) == (1408 + 282, 10240, 65504)
    assert not [first for first in blocks if 32768 - BLOCK < first <= 60999]
    told.write_text("1024\t65535\n")
    assert len(candidates(7)) == (65520 - 10240) // BLOCK


def test_ports_that_are_all_taken_are_refused_in_one_line(monkeypatch):
    first = candidates(os.getpid())[0]
    monkeypatch.setattr(ports, "candidates", lambda seed: [first])
    held = reserve_ports()
    with pytest.raises(ClusterError, match=f"none of 1 blocks of 16 between {first}") as caught:
        reserve_ports()
    held.close()
    assert "\n" not in str(caught.value)
    reserve_ports().close()
