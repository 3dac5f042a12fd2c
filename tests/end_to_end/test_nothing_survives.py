"""Whatever ends a run, its Ray, its ranks, its engines and their own workers end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from end_to_end.leftovers import (
    marked_environment,
    parent_of,
    processes_of,
    wait_until_none,
)
from tiny_runs import save_tiny_model, tiny_config
from toy import EOS
from transformers import GenerationConfig

from megatron_grpo.config import dump_config

ENDLESS: dict[str, Any] = {
    "steps": 10_000,
    "checkpoint": {"every": None},
    "evaluation": {"samples": 1},
    "policy": {
        "type": "megatron",
        "dtype": "float32",
        "parallel": {"data": 1},
        "microbatch_tokens": 256,
        "optimizer": {"learning_rate": 1e-3},
    },
    # Two workers: vLLM then has an engine core and workers of its own, our actor's grandchildren.
    "generator": {
        "type": "vllm",
        "dtype": "float32",
        "tensor": 2,
        "max_model_tokens": 128,
        "kv_cache_bytes": 64 << 20,
        "threads": 2,
    },
}


def started(file: Path, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A run that has done another step than those before."""
    log = folder / "metrics.jsonl"
    before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-m", "megatron_grpo.cli", "train", str(file), "--fresh"]
    output = file.with_suffix(".log").open("wb")
    run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    until = time.monotonic() + 400
    while not log.exists() or log.stat().st_size <= before:
        if run.poll() is not None or time.monotonic() > until:
            run.kill()  # its Ray goes with it, and does not go on beside the tests that follow
            pytest.fail(file.with_suffix(".log").read_text())
        time.sleep(0.1)
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("GRPO_SLURM_LAB" not in os.environ, reason="part of make test-slurm")
def test_i3_nothing_is_left_of_a_run_that_lost_an_engine_or_was_killed(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    GenerationConfig(eos_token_id=EOS).save_pretrained(model)
    file = tmp_path / "run.yaml"
    config = tiny_config(model, tmp_path / "run", **ENDLESS)
    file.write_text(dump_config(config))
    environment = marked_environment()

    run = started(file, config.folder, environment)
    # The actor dies, and so cannot end the processes that vLLM started in it.
    actor = parent_of(next(p for p, s in processes_of(environment).items() if "EngineCore" in s))
    os.kill(actor, signal.SIGKILL)
    assert run.wait(60) not in (0, 75)
    assert "engine 0" in file.with_suffix(".log").read_text()
    wait_until_none(environment)

    run = started(file, config.folder, environment)
    run.kill()
    run.wait(10)
    wait_until_none(environment)
