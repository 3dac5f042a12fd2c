"""Whole runs of tiny random models, by config: reference policy and generator in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tiny import save_tiny
from toy import save_toy_tokenizer

from megatron_grpo.config import RunConfig
from megatron_grpo.config.base import merge, validate
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train.records import read_records
from megatron_grpo.types import RolloutGroup


def save_tiny_model(folder: Path) -> Path:
    save_tiny(folder, "qwen3", tied=True)
    return save_toy_tokenizer(folder)


def tiny_config(model: Path, folder: Path, **changes: Any) -> RunConfig:
    """Reference on both sides, 6 steps of 2 groups of 3; `changes` are merged in."""
    values: dict[str, Any] = {
        "name": "tiny",
        "run_dir": str(folder),
        "steps": 6,
        "model": {"path": str(model)},
        "task": {
            "type": "reasoning_gym",
            "name": "chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "rows": 30,
            "heldout_rows": 2,
            "reward": "end_to_end.digit_reward:even_digits",
        },
        "sampling": {"temperature": 0.7, "max_new_tokens": 5},
        "rollouts": {"groups_per_step": 2, "group_size": 3, "max_prompt_tokens": 96},
        "policy": {
            "type": "reference",
            "microbatch_tokens": 256,
            "optimizer": {
                "learning_rate": 1e-2,
                "schedule": "cosine",
                "warmup_steps": min(2, changes.get("steps", 2)),
                "decay_steps": 8,
            },
        },
        "generator": {"type": "reference", "max_model_tokens": 128},
        "evaluation": {"samples": 2, "every": 3},
        "checkpoint": {"every": 1, "finish_step_s": 60.0},
    }
    return validate(RunConfig, merge(values, changes), "test")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {n: v for n, v in json.loads(line).items() if "seconds/" not in n and n[-2:] != "_s"}
        for line in lines
    ]


def weights_of(folder: Path) -> dict[str, bytes]:
    """The exported model, to the last bit."""
    return {
        name: tensor.numpy().tobytes()
        for shard in (folder / "model").glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }


def groups_of(folder: Path) -> dict[int, list[RolloutGroup]]:
    store = ZarrStore(folder / "rollouts")
    return {step: store.read(step) for step in store.steps()}


def rates_of(folder: Path) -> list[float]:
    return [record.metrics["learning_rate"] for record in read_records(folder / "metrics.jsonl")]
