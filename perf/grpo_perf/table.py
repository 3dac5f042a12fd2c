"""Rows of published step times <-> workloads: read a CSV, predict, write it back."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_perf.cost_model import StepPrediction, predict_step
from grpo_perf.efficiencies import Efficiencies
from grpo_perf.flops import Recompute
from grpo_perf.hardware import Hardware, hardware_named
from grpo_perf.model_shape import Architecture, model_named
from grpo_perf.policy_memory import policy_memory
from grpo_perf.workload import Workload
from megatron_grpo.config import ParallelConfig
from megatron_grpo.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    validate,
)
from megatron_grpo.errors import ConfigError

PREDICTED = ("tokens_per_s_per_gpu", "step_time_s")


class TableRow(Section):
    """One published run, in the columns of the table."""

    id: str
    hardware: str
    precision: Literal["bf16", "fp8"] = "bf16"
    algorithm: str = "grpo"
    model: str
    policy_lag_steps: NonNegativeInt = 0
    max_sequence_tokens: PositiveFloat
    mean_sequence_tokens: PositiveFloat
    gpus: PositiveInt
    generation_batch_sequences: PositiveInt
    train_batch_sequences: PositiveInt
    generation_tp: PositiveInt = 1
    generation_pp: PositiveInt = 1
    train_tp: PositiveInt = 1
    train_cp: PositiveInt = 1
    train_ep: PositiveInt = 1
    train_pp: PositiveInt = 1
    tokens_per_s_per_gpu: float | None = Field(default=None, gt=0)
    step_time_s: float | None = Field(default=None, gt=0)
    """What was measured, where it is known; never used for a prediction."""


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Column names and rows as text.

    Raises:
        ConfigError: unreadable, or columns that a prediction needs are missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error}", remedy="check the path") from error
    reader = csv.DictReader(io.StringIO(text))
    columns = list(reader.fieldnames or [])
    needed = [name for name, field in TableRow.model_fields.items() if field.is_required()]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ConfigError(
            str(path), "lacks columns", found=", ".join(missing), remedy="add them to the header"
        )
    return columns, list(reader)


def parse_row(row: Mapping[str, str | None], source: str) -> TableRow:
    """Empty cells take their default; columns that mean nothing here are left alone."""
    known = {name: text for name, text in row.items() if name in TableRow.model_fields and text}
    if "precision" in known:
        known["precision"] = known["precision"].lower()
    return validate(TableRow, known, f"{source}, row {row.get('id')}")


def workload_of(row: TableRow) -> Workload:
    """The workload of a published run.

    What the table does not say follows from how such runs are set up: on-policy ones take turns on
    all GPUs, off-policy ones split them in halves; expert matrices are not split over the tensor
    group; a micro-batch is one packed sequence of the longest length; old and reference
    log-probabilities are computed each step; layers are recomputed where activations do not fit.
    """
    model, hardware = model_named(row.model), hardware_named(row.hardware)
    colocated = row.policy_lag_steps == 0
    policy_gpus = row.gpus if colocated else row.gpus // 2
    parallel = _layout(row, policy_gpus)
    worker = row.generation_tp * row.generation_pp
    engine_gpus = row.gpus if colocated else row.gpus - policy_gpus
    if engine_gpus < worker:
        raise ConfigError(
            f"row {row.id}: generation_tp",
            f"an engine of {worker} GPUs does not fit into {engine_gpus}",
            found=row.generation_tp,
            remedy="raise gpus or lower generation_tp * generation_pp",
        )
    return Workload(
        model=model,
        hardware=hardware,
        precision=row.precision,
        parallel=parallel,
        engines=engine_gpus // worker,
        engine_tensor=row.generation_tp,
        engine_pipeline=row.generation_pp,
        colocated=colocated,
        staleness=row.policy_lag_steps,
        sequences=row.generation_batch_sequences,
        train_sequences=row.train_batch_sequences,
        mean_tokens=row.mean_sequence_tokens,
        max_tokens=max(row.max_sequence_tokens, row.mean_sequence_tokens),
        microbatch_tokens=row.max_sequence_tokens,
        recompute=needed_recompute(model, hardware, parallel, row.max_sequence_tokens),
    )


def _layout(row: TableRow, policy_gpus: int) -> ParallelConfig:
    replica = row.train_tp * row.train_cp * row.train_pp
    if policy_gpus % replica:
        raise ConfigError(
            f"row {row.id}: gpus",
            f"train_tp * train_cp * train_pp = {replica} does not divide {policy_gpus} policy GPUs",
            found=row.gpus,
            remedy="check the row's parallel sizes",
        )
    values = {
        "tensor": row.train_tp,
        "context": row.train_cp,
        "pipeline": row.train_pp,
        "expert": row.train_ep,
        "expert_tensor": 1,
        "data": policy_gpus // replica,
        "sequence": row.train_tp > 1,
    }
    return validate(ParallelConfig, values, f"row {row.id}")


def needed_recompute(
    model: Architecture, hardware: Hardware, parallel: ParallelConfig, microbatch_tokens: float
) -> Recompute:
    """none where activations fit beside the state, else full."""
    peak = policy_memory(
        model,
        parallel,
        microbatch_tokens=math.ceil(microbatch_tokens),
        device_bytes=hardware.memory_bytes,
    )
    return "none" if peak.total <= hardware.memory_bytes else "full"


def predict_rows(rows: Sequence[TableRow], eff: Efficiencies) -> list[StepPrediction]:
    return [predict_step(workload_of(row), eff) for row in rows]


def predict_table(path: Path, eff: Efficiencies) -> str:
    """The CSV with `tokens_per_s_per_gpu` and `step_time_s` predicted, the rest as it was."""
    columns, rows = read_table(path)
    columns += [name for name in PREDICTED if name not in columns]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        step = predict_step(workload_of(parse_row(row, path.name)), eff)
        predicted = {
            "tokens_per_s_per_gpu": f"{step.tokens_per_s_per_gpu:.4g}",
            "step_time_s": f"{step.step_s:.4g}",
        }
        writer.writerow(row | predicted)
    return stream.getvalue()
