"""Processes that grade: nothing a model writes hangs, executes, or moves a reward."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from grading_strings import BOMBS, CODE, hostile

from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.environments.grading.grade import usable
from megatron_grpo.environments.grading.pool import GraderPool, Verdict

BOX = "\\boxed{%s}"


@pytest.fixture(scope="module")
def pool():
    # Short limits: a bomb is a bomb after a tenth of a second too.
    with GraderPool(GradingConfig(workers=2, cpu_seconds=0.5)) as pool:
        yield pool


def test_f1_bombs_are_zero_with_a_reason_and_everything_else_keeps_its_place(pool):
    items = [(BOX % i, str(i if i % 2 else i + 1)) for i in range(64)]
    for place, bomb in enumerate(BOMBS):
        items[8 * place + 3] = (bomb, "5")
    before = Counter(pool.counts())
    started = time.monotonic()
    verdicts = pool.grade(items)
    assert time.monotonic() - started < 60
    for index, verdict in enumerate(verdicts):
        if index % 8 == 3:
            assert verdict.reward == 0 and verdict.reason != "correct"
        else:
            assert (verdict.reward, verdict.extracted) == (float(index % 2), str(index))
    counted = Counter(pool.counts()) - before
    assert sum(counted.values()) == 64
    # The towers cannot be evaluated by anyone in half a second.
    assert verdicts[3].reason == "timeout" and counted["timeout"] >= 2
    assert pool.grade([(BOX % "\\frac{1}{3}", "1/3")])[0].reward == 1.0


def test_f1_grading_works_outside_the_main_thread(pool):
    results: list[Verdict] = []
    thread = threading.Thread(
        target=lambda: results.extend(pool.grade([("\\boxed{\\frac{1}{3}}", "\\frac13")]))
    )
    thread.start()
    thread.join(60)
    assert [verdict.reward for verdict in results] == [1.0]


@pytest.mark.parametrize("seed", range(4))
def test_f2_every_sample_keeps_its_own_reward_under_any_order(pool, seed):
    samples = {
        f"s{i}": (
            "step " * random.Random(i).choice((1, 50, 2000)) + BOX % i,
            str(i if i % 2 == 0 else -1),
        )
        for i in range(16)
    }
    samples["s5"] = (BOX % "\\frac{", "5")
    order = list(samples)
    random.Random(seed).shuffle(order)
    rewards = dict(zip(order, (v.reward for v in pool.grade([samples[s] for s in order]))))
    assert len(rewards) == 16
    assert rewards == {f"s{i}": float(i % 2 == 0) for i in range(16)}


def test_f4_golds_that_say_nothing_are_found_and_never_rewarded(pool):
    golds = ["5", "", "???", "None", "  ", "-3", "\\emptyset", "no solution"]
    assert [usable(gold) for gold in golds] == [True, False, False, False, False, True, True, True]
    for nothing in ("None", "\\boxed{None}", "\\boxed{}", "", "null"):
        for gold in golds:
            [verdict] = pool.grade([(nothing, gold)])
            assert verdict.reward == 0.0 and isinstance(verdict.reward, float)


def test_f5_what_a_model_wrote_is_never_executed(pool, tmp_path):
    marker = tmp_path / "pwned"
    items = [(BOX % code.format(marker=marker), "5") for code in CODE]
    verdicts = pool.grade([*items, (BOX % "5", "5")])
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(items) + [1.0]
    assert not marker.exists()
    assert all(verdict.seconds < 5 for verdict in verdicts)


def test_hostile_and_random_strings_neither_hang_nor_crash_the_pool(pool, tmp_path):
    pairs = hostile(7, 300, tmp_path / "pwned", bombs=False)
    verdicts = pool.grade(pairs)
    assert len(verdicts) == 300
    assert not [v for v in verdicts if v.reason == "crash"]
    assert not (tmp_path / "pwned").exists()
    assert pool.grade([(BOX % "5", "5")])[0].reward == 1.0


def test_a_child_cannot_open_a_socket_or_write_a_file():
    program = (
        "import json, socket, resource\n"
        "from megatron_grpo.environments.grading import worker\n"
        "worker._confine({'memory_bytes': 1 << 30})\n"
        "for act in (lambda: socket.socket(), lambda: open('/tmp/x-pwned', 'w'),"
        " lambda: __import__('os').system('true'), lambda: bytearray(2 << 30)):\n"
        "    try:\n        act()\n    except (PermissionError, MemoryError) as error:\n"
        "        print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["PermissionError"] * 3 + ["MemoryError"], done.stderr


def test_recycled_children_lose_no_item():
    with GraderPool(GradingConfig(workers=1, recycle=3)) as pool:
        verdicts = pool.grade([(BOX % i, str(i)) for i in range(20)])
    assert [v.reward for v in verdicts] == [1.0] * 20


def test_the_grade_command_writes_one_line_per_row_in_order(tmp_path):
    rows = [
        {"response": "\\boxed{5}", "answer": 5},
        {"response": "\\boxed{5}", "answer": 5.0},
        {"response": "\\boxed{1331 and 1728}", "answer": "1728"},
        {"response": None, "answer": "1"},
        {"response": "\\boxed{\ud83d}", "answer": "+5"},
    ]
    path = tmp_path / "rows.jsonl"
    lines = "\n".join(map(json.dumps, rows)) + "\n"
    path.write_text(lines, encoding="utf-8-sig")  # some editors begin a file with a mark
    command = [sys.executable, "-m", "megatron_grpo.cli", "grade", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["reward"] for line in found] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert all(set(line) == {"reward", "reason", "extracted", "seconds"} for line in found)
    assert found[3]["reason"] == "no answer" and found[2]["extracted"] == "1331 and 1728"
