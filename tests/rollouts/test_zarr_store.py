"""The store on disk: the contract, torn commits, cost and size."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zarr
from contracts.rollout_store import RolloutStoreContract, assert_same_groups
from numcodecs import Zstd
from samples import make_group, make_groups

from megatron_grpo.rollouts import zarr_store
from megatron_grpo.rollouts.zarr_store import COMMIT_FILE, ZarrStore


class TestZarrStore(RolloutStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return ZarrStore(tmp_path / "rollouts")

    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: ZarrStore(tmp_path / "rollouts")


class TestZarrStoreWithSmallChunks(TestZarrStore):
    """Every append crosses chunks and shares the last one."""

    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch):
        small = dict.fromkeys(zarr_store._ROWS_PER_CHUNK, 16)
        monkeypatch.setattr(zarr_store, "_ROWS_PER_CHUNK", small)


class Torn(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("last_write", [0, 1, 5, 11, 16, 17])
def test_a_commit_torn_after_any_array_is_dropped_and_the_step_can_be_appended_again(
    tmp_path, monkeypatch, last_write
):
    folder = tmp_path / "rollouts"
    ZarrStore(folder).append(1, make_groups(seed=1))
    written = []
    write, rename = zarr.Array.__setitem__, os.replace

    def torn_write(array, selection, value):
        if len(written) == last_write:
            raise Torn
        written.append(array.name)
        write(array, selection, value)

    def torn_rename(scratch, target):
        if os.path.basename(target) == COMMIT_FILE:
            raise Torn
        rename(scratch, target)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", torn_write)
        patch.setattr(zarr_store.os, "replace", torn_rename)
        with pytest.raises(Torn):
            ZarrStore(folder).append(2, make_groups(6, 8, seed=2))
    assert len(written) == min(last_write, len(zarr_store._ARRAYS))
    store = ZarrStore(folder)
    assert store.steps() == [1]
    assert_same_groups(store.read(1), make_groups(seed=1))
    store.append(2, make_groups(2, 2, seed=3))
    assert ZarrStore(folder).steps() == [1, 2]
    assert_same_groups(ZarrStore(folder).read(1), make_groups(seed=1))
    assert_same_groups(ZarrStore(folder).read(2), make_groups(2, 2, seed=3))
    tokens = zarr.open_group(folder, mode="r")["token_id"]
    assert tokens.shape == (
        sum(r.num_tokens for s in (1, 2) for g in store.read(s) for r in g.rollouts),
    )


WRITER = """
import sys
from pathlib import Path
from samples import make_groups
from megatron_grpo.rollouts.zarr_store import ZarrStore
store = ZarrStore(Path(sys.argv[1]))
for step in range(1, 10_000):
    store.append(step, make_groups(4, 4, seed=step))
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_steps_only(tmp_path):
    folder = tmp_path / "rollouts"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert writer.stdout is not None
    for _ in range(4):
        said = int(writer.stdout.readline())
    time.sleep(0.037)  # somewhere inside a later append
    writer.send_signal(signal.SIGKILL)
    said = max([said, *(int(line) for line in writer.stdout.read().split())])
    writer.wait(30)
    store = ZarrStore(folder)
    steps = store.steps()
    assert steps in (list(range(1, said + 1)), list(range(1, said + 2)))
    for step in steps:
        assert_same_groups(store.read(step), make_groups(4, 4, seed=step))
    store.append(steps[-1] + 1, make_groups(seed=0))
    assert_same_groups(ZarrStore(folder).read(steps[-1] + 1), make_groups(seed=0))


def test_an_append_writes_as_many_bytes_late_as_early(tmp_path, monkeypatch):
    # Chunks of 16 rows: after 14 steps the arrays span many, and an append still touches only the
    # last.
    small = dict.fromkeys(zarr_store._ROWS_PER_CHUNK, 16)
    monkeypatch.setattr(zarr_store, "_ROWS_PER_CHUNK", small)
    store = ZarrStore(tmp_path / "rollouts")
    touched = []
    files: dict[str, int] = {}
    for step in range(1, 15):
        before = files
        store.append(step, [make_group([1.0] * 8, group_id=f"g{step}", seed=step)])
        found = [p for p in (tmp_path / "rollouts").rglob("*") if p.is_file()]
        files = {str(p): p.stat().st_mtime_ns for p in found}
        touched.append(sum(before.get(name) != at for name, at in files.items()))
    assert len(files) > 2 * touched[-1]
    assert max(touched[9:]) <= touched[1] + 12


def test_size_is_within_a_fifth_of_one_zstd_file_of_the_same_arrays(tmp_path):
    store, columns = ZarrStore(tmp_path / "rollouts"), io.BytesIO()
    for step in range(1, 6):
        groups = [
            make_group(
                [0.0] * 16, group_id=f"g{step}.{g}", response_lengths=[200] * 16, seed=step * 8 + g
            )
            for g in range(4)
        ]
        store.append(step, groups)
        for rollout in (r for g in groups for r in g.rollouts):
            for values in (rollout.token_ids, rollout.behavior_logprobs, rollout.versions):
                columns.write(values.tobytes())
            columns.write(np.packbits(rollout.loss_mask).tobytes())
    together = len(Zstd(level=3).encode(columns.getvalue()))
    chunks = [
        p for p in (tmp_path / "rollouts").rglob("*") if p.is_file() and p.name != "zarr.json"
    ]
    stored = sum(path.stat().st_size for path in chunks)
    assert stored < 1.2 * together


def test_the_commit_file_counts_rows_of_every_kind(tmp_path):
    store = ZarrStore(tmp_path)
    store.append(1, [make_group([0.0, 1.0], prompt_ids=(1, 2, 3), response_lengths=[2, 4])])
    committed = store._committed()
    assert (committed.steps, committed.groups, committed.rollouts) == (1, 1, 2)
    assert committed.tokens == (3 + 2) + (3 + 4)
    assert (tmp_path / COMMIT_FILE).is_file()
