"""A cluster for the whole session, a tiny model and its data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.lab import Cluster
from tiny import save_tiny
from toy import save_toy_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}</s>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("GRPO_SLURM_LAB"):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs root and SLURM: make test-slurm"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """A folder with a model of 100,000 parameters and 64 dialogues."""
    folder = tmp_path_factory.mktemp("material")
    save_toy_tokenizer(save_tiny(folder / "model", "qwen3", tied=True, seed=3), template=TEMPLATE)
    letters = "abcdefgh"
    rows = [
        {
            "messages": [
                {"role": "user", "content": a + b},
                {"role": "assistant", "content": b + a + "!"},
            ]
        }
        for a in letters
        for b in letters
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def sft(material: Path, tmp_path: Path):
    """Writes the config of a run on two ranks, one per node."""

    def write(name: str, steps: int, **changes: object) -> Path:
        values = {
            "name": name,
            "run_dir": str(tmp_path / name),
            "steps": steps,
            "model": {"path": str(material / "model")},
            "task": {
                "type": "chats",
                "path": str(material / "chats.jsonl"),
                "heldout_rows": 8,
                "max_row_tokens": 32,
            },
            "algorithm": {"type": "sft"},
            "rollouts": {"groups_per_step": 14},
            "policy": {
                "type": "megatron",
                "dtype": "float32",
                "parallel": {"data": 2},
                "microbatch_tokens": 128,
                "optimizer": {"learning_rate": 0.003},
            },
            "checkpoint": {"every": 10},
            **changes,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.fixture
def grpo(material: Path, tmp_path: Path):
    """Writes the config of a run with two pipeline stages and one vLLM engine."""

    def write(name: str, steps: int) -> Path:
        values = {
            "name": name,
            "run_dir": str(tmp_path / name),
            "steps": steps,
            "model": {"path": str(material / "model")},
            "task": {
                "type": "reasoning_gym",
                "name": "chain_sum",
                "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "rows": 60,
                "heldout_rows": 2,
                "reward": "end_to_end.digit_reward:even_digits",
            },
            "sampling": {"max_new_tokens": 8},
            "rollouts": {"groups_per_step": 2, "group_size": 4, "max_prompt_tokens": 96},
            "policy": {
                "type": "megatron",
                "dtype": "float32",
                "parallel": {"pipeline": 2},
                "microbatch_tokens": 256,
            },
            "generator": {
                "type": "vllm",
                "dtype": "float32",
                "max_model_tokens": 128,
                "kv_cache_bytes": 64 << 20,
                "threads": 1,
            },
            "evaluation": {"samples": 1},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(values))
        return path

    return write
