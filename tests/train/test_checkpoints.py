"""Which checkpoint is whole, which is the newest, and which may go."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_grpo.config import CheckpointConfig
from megatron_grpo.config.checkpoint import differences
from megatron_grpo.errors import CheckpointError
from megatron_grpo.train.checkpoints import (
    begin_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    newest_whole,
    rotate,
)

KEEP_ONE = CheckpointConfig(keep_last=1)


def write(root: Path, step: int, metrics: dict[str, float] | None = None) -> Path:
    folder = begin_checkpoint(root, step)
    (folder / "policy").mkdir()
    (folder / "policy" / "weights").write_bytes(bytes([step]) * 50_000)
    finish_checkpoint(folder, step, metrics or {})
    return folder


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(root)]


def newest(root: Path) -> int:
    found = newest_whole(root, lambda text: None)
    assert found is not None
    return found.step


def test_h5_the_newest_is_the_one_of_the_highest_step(tmp_path):
    for step in (2, 9, 10, 100):
        write(tmp_path, step).rename(tmp_path / f"named-{1000 - step}")
    assert newest(tmp_path) == 100
    assert steps(tmp_path) == [2, 9, 10, 100]


def test_h5_saving_a_lower_step_after_a_higher_one_keeps_it(tmp_path):
    for step in (10, 5):
        write(tmp_path, step)
    rotate(tmp_path, KEEP_ONE, newest=5)
    assert steps(tmp_path) == [5, 10]


def test_h5_the_best_are_those_that_measured_and_of_equals_the_newer(tmp_path):
    config = CheckpointConfig(keep_last=1, keep_best=2)
    measured = {3: None, 5: 0.5, 6: None, 9: 0.4, 10: 0.5, 12: 0.5, 15: None}
    for step, accuracy in measured.items():
        write(tmp_path, step, {} if accuracy is None else {"heldout_accuracy": accuracy})
        rotate(tmp_path, config, newest=step)
    assert steps(tmp_path) == [10, 12, 15]
    lowest = CheckpointConfig(keep_last=1, keep_best=1, best_is="lowest")
    rotate(tmp_path, lowest, newest=15)
    assert steps(tmp_path) == [12, 15]


def test_h3_damage_of_every_kind_is_noticed_and_named(tmp_path):
    def cut(file: Path) -> None:
        os.truncate(file, 49_999)

    def flip(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1] + b"x")

    for step, (damage, text) in enumerate(
        ((cut, "has 49999 bytes, 50000 were written"), (flip, "changed"), (Path.unlink, "missing"))
    ):
        write(tmp_path, 0 if step == 0 else 1)
        spoiled = write(tmp_path, 10 + step)
        damage(spoiled / "policy" / "weights")
        said: list[str] = []
        found = newest_whole(tmp_path, said.append)
        assert found is not None and found.step < 10
        assert text in said[0]


def test_h3_none_intact_is_an_error_and_none_at_all_is_not(tmp_path):
    assert newest_whole(tmp_path, print) is None
    begin_checkpoint(tmp_path, 3)  # a save that never ended
    assert newest_whole(tmp_path, print) is None
    (write(tmp_path, 4) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint.*manifest cannot be read"):
        newest_whole(tmp_path, lambda text: None)


def test_h3_killed_at_any_moment_of_save_and_rotation_there_is_a_whole_one(tmp_path):
    write(tmp_path, 1)
    before = 1
    for attempt in range(20):
        pid = os.fork()
        if pid == 0:
            for step in range(before + 1, before + 200):
                write(tmp_path, step)
                rotate(tmp_path, KEEP_ONE, newest=step)
            os._exit(0)
        while not any(one > before for one in steps(tmp_path)):
            time.sleep(0.001)
        time.sleep(0.001 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert newest(tmp_path) > before
        before = newest(tmp_path)
    write(tmp_path, before + 1)
    rotate(tmp_path, KEEP_ONE, newest=before + 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{before + 1:06d}"]  # no leftovers


def test_h3_a_full_disk_is_an_error_and_the_checkpoint_before_is_untouched(tmp_path):
    write(tmp_path, 1)
    folder = begin_checkpoint(tmp_path, 2)
    (folder / ".manifest.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
        finish_checkpoint(folder, 2, {})
    assert newest(tmp_path) == 1


def test_only_what_decides_what_is_learned_counts_as_a_difference():
    saved = {"seed": 1, "steps": 3, "policy": {"type": "megatron", "parallel": {"tensor": 1}}}
    now = {"seed": 1, "steps": 9, "policy": {"type": "megatron", "parallel": {"tensor": 2}}}
    assert differences(saved, now) == []
    assert differences(saved, {**now, "task": {"rows": 2}}) == ["task.rows: was not set, is 2"]


def test_a_best_metric_without_anything_to_keep_is_refused():
    with pytest.raises(ValueError, match="keep_best: is 0"):
        CheckpointConfig(best_metric="reward_mean")
