"""Rollouts as rows of a table: JSON lines or parquet, one row per rollout, one step at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import RolloutStore
from megatron_grpo.types import Rollout, RolloutGroup

Row = dict[str, object]

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("reason", pa.string()),
        ("extracted", pa.string()),
        ("finish_reason", pa.string()),
        ("seed", pa.int64()),
        ("generate_s", pa.float64()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("reference_logprobs", pa.list_(pa.float32())),
    ]
)


def export_rollouts(store: RolloutStore, steps: Sequence[int], target: Path) -> int:
    """Write every rollout of the steps, as the target's suffix says; how many that were.

    The file appears under its name when it is complete. Memory holds one step.

    Raises:
        ConfigError: neither .jsonl nor .parquet.
        RolloutError: a step the store does not hold.
    """
    writers = {".jsonl": _write_lines, ".parquet": _write_parquet}
    if target.suffix not in writers:
        raise ConfigError(
            "--export",
            "writes JSON lines or parquet",
            found=target.name,
            remedy="name a file that ends with .jsonl or .parquet",
        )
    count = 0

    def tables() -> Iterable[list[Row]]:
        nonlocal count
        for step in steps:
            table = [_row(step, g, r) for g in store.read(step) for r in g.rollouts]
            count += len(table)
            yield table

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.part")
    write: Callable[[Iterable[list[Row]], Path], None] = writers[target.suffix]
    try:
        write(tables(), scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return count


def _write_lines(tables: Iterable[list[Row]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table)


def _write_parquet(tables: Iterable[list[Row]], path: Path) -> None:
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for table in tables:
            writer.write_table(pa.Table.from_pylist(table, schema=SCHEMA))


def _row(step: int, group: RolloutGroup, rollout: Rollout) -> Row:
    """Text that is no Unicode (half a surrogate pair) has its stray halves replaced."""
    reference = rollout.reference_logprobs
    versions = rollout.versions[rollout.loss_mask]
    texts = {
        "group_id": group.group_id,
        "rollout_id": rollout.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": rollout.text,
        "reason": rollout.reward.reason,
        "extracted": rollout.reward.extracted,
        "finish_reason": rollout.finish_reason,
    }
    return {
        "step": step,
        **{name: text.encode("utf-8", "replace").decode() for name, text in texts.items()},
        "reward": rollout.reward.value,
        "seed": rollout.seed,
        "generate_s": rollout.generate_s,
        "oldest_version": rollout.oldest_version,
        "newest_version": int(versions.max(initial=-1)),
        "prompt_tokens": rollout.prompt_tokens,
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "behavior_logprobs": rollout.behavior_logprobs.tolist(),
        "versions": rollout.versions.tolist(),
        "reference_logprobs": None if reference is None else reference.tolist(),
    }
