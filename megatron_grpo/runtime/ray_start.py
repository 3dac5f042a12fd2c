"""Joining or starting a Ray cluster without giving signals away."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import ClusterError
from megatron_grpo.runtime.placement import Placement


def connect(config: ClusterConfig, placement: Placement) -> None:
    """Join the cluster at `config.address`, or start one of this process's own.

    Raises:
        ClusterError: there is none at the address, or this process has one already.
    """
    if ray.is_initialized():
        raise ClusterError("cluster", "this process is already connected to one", remedy="close it")
    if config.address is not None:
        try:
            ray.init(address=config.address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ClusterError(
                "cluster.address",
                f"cannot be joined: {error}",
                found=config.address,
                remedy="start it with `ray start`, or drop the key to use this machine alone",
            ) from error
        return
    # A private cluster of this process: token authentication would leave a file in the home
    # directory.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with children_in_a_group_of_their_own():
        ray.init(
            # CPU slots, not cores: ranks and engines take turns on the cores there are.
            num_cpus=max(os.cpu_count() or 1, placement.total_cpus),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            namespace=f"grpo-{secrets.token_hex(4)}",
            object_store_memory=256 << 20,
        )


@contextmanager
def children_in_a_group_of_their_own() -> Iterator[None]:
    """Processes started inside the block do not get signals meant for this process's group (Ctrl-C,
    `timeout`, `kill -TERM -GROUP`): they would die before the run has saved its state.

    Ray offers no way to set a group, but children inherit ours: a placeholder process leads a new
    group, which this process joins for the length of the block. A session leader cannot change
    groups; there nothing is done.
    """
    if os.getsid(0) == os.getpid():
        yield
        return
    before = os.getpgrp()
    with subprocess.Popen(["sleep", "600"], process_group=0) as placeholder:
        try:
            os.setpgid(0, placeholder.pid)
            yield
        finally:
            placeholder.kill()  # first: leaving this block waits for it
            _return_to_group(before)


def _return_to_group(group: int) -> None:
    """A group ends with its last member, which this process may have been: in the background of a
    shell that is gone. It then leads a group of its own.
    """
    try:
        os.setpgid(0, 0 if group == os.getpid() else group)
    except PermissionError:
        os.setpgid(0, 0)


@contextmanager
def our_signal_handlers() -> Iterator[None]:
    """What listens to signals before the block does so after it. Ray puts handlers of its own in
    place, in Python and below it, that end the process on the spot.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
