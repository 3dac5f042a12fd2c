"""Every rollout of a run on disk: append-only ragged arrays in one zarr 3 group, one commit per
step.

    steps     step_number, step_group_end                                        [steps]
    groups    group_rollout_end, group_text_end                                  [groups]
    rollouts  rollout_token_end, rollout_text_end, rollout_reward, ...           [rollouts]
    tokens    token_id, token_loss_mask, token_logprob, token_version, ...       [tokens]
    texts     group_text, rollout_text: UTF-8 JSON, read only when asked for     [bytes]

A ragged column is values and ends: row i is values[end[i - 1] : end[i]]. `committed.json` says how
many rows of each kind count; it is replaced, in one rename, after everything else is written. Rows
behind it are a torn
commit: readers never look at them, and the next append cuts them off. zarr replaces a chunk by
renaming, so a torn commit cannot hurt the committed rows that share its last chunk. An append
touches the last chunk of each array whatever the length of the history.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec

from megatron_grpo.errors import RolloutError
from megatron_grpo.rollouts.columns import (
    FINISH_REASONS,
    Column,
    decode_texts,
    new_columns,
    reference_or_none,
    stored_group,
)
from megatron_grpo.types import Reward, Rollout, RolloutGroup

COMMIT_FILE = "committed.json"

# Rows per chunk: an append rewrites at most one partly filled chunk of each array.
_ROWS_PER_CHUNK = {
    "steps": 4096,
    "groups": 4096,
    "rollouts": 4096,
    "tokens": 1 << 16,
    "group_bytes": 1 << 18,
    "rollout_bytes": 1 << 18,
}
KINDS_OF_ROWS = tuple(_ROWS_PER_CHUNK)
# Array -> (kind of row, dtype).
_ARRAYS = {
    "step_number": ("steps", "int64"),
    "step_group_end": ("steps", "int64"),
    "group_rollout_end": ("groups", "int64"),
    "group_text_end": ("groups", "int64"),
    "rollout_token_end": ("rollouts", "int64"),
    "rollout_text_end": ("rollouts", "int64"),
    "rollout_reward": ("rollouts", "float64"),
    "rollout_prompt_tokens": ("rollouts", "int32"),
    "rollout_finish_reason": ("rollouts", "uint8"),
    "rollout_seed": ("rollouts", "int64"),
    "rollout_generate_s": ("rollouts", "float64"),
    "token_id": ("tokens", "int32"),
    "token_loss_mask": ("tokens", "bool"),
    "token_logprob": ("tokens", "float32"),
    "token_version": ("tokens", "int32"),
    "token_reference_logprob": ("tokens", "float32"),
    "group_text": ("group_bytes", "uint8"),
    "rollout_text": ("rollout_bytes", "uint8"),
}
# One array of each kind, to count new rows by.
_COUNTING_ARRAYS = (
    "step_number",
    "group_rollout_end",
    "rollout_token_end",
    "token_id",
    "group_text",
    "rollout_text",
)
# Kind of row, the array that says where its rows end, and the kind of row it says so for.
_CONTAINED = (
    ("groups", "step_group_end", "steps"),
    ("rollouts", "group_rollout_end", "groups"),
    ("tokens", "rollout_token_end", "rollouts"),
    ("group_bytes", "group_text_end", "groups"),
    ("rollout_bytes", "rollout_text_end", "rollouts"),
)


@dataclass(frozen=True, slots=True)
class _Committed:
    """Rows of each kind that count."""

    steps: int = 0
    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    group_bytes: int = 0
    rollout_bytes: int = 0

    def rows(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step at a glance.

    Attributes:
        rewards: of every rollout of every group.
        response_tokens: of every rollout; observations of a dialogue included.
        truncated: rollouts that ran out of tokens.
    """

    step: int
    rewards: tuple[list[float], ...]
    response_tokens: tuple[int, ...]
    truncated: int


class ZarrStore:
    """Implements protocols.RolloutStore in a folder, which is made by the first append.

    One process may append; any number may read at the same time and see whole steps only.

    Args:
        folder: of the zarr group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writable: zarr.Group | None = None

    def append(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Commit one step's groups.

        Raises:
            RolloutError: a step of this number or a later one is there already.
        """
        if self._writable is None:
            self._writable = self._open_for_append()
        committed = self._committed()
        last = self.steps()[-1] if committed.steps else None
        if last is not None and step <= last:
            raise RolloutError(
                f"rollout store {self._folder}",
                f"already holds steps up to {last}",
                found=step,
                remedy="append steps in order, each once",
            )
        columns = new_columns(step, groups, committed.rows())
        for name, values in columns.items():
            array, start = _array(self._writable, name), committed.rows()[_ARRAYS[name][0]]
            array.resize((start + len(values),))
            array[start:] = values
        self._commit(committed, columns)

    def cut_after(self, step: int) -> None:
        """Forget later steps: of a run that goes on from this one. The rows go with the next
        append.
        """
        kept = sum(number <= step for number in self.steps())
        if kept == self._committed().steps:
            return
        group, rows = self._open(), {"steps": kept}
        for kind, end, of in _CONTAINED:
            last = rows[of]
            rows[kind] = int(np.asarray(_array(group, end)[last - 1])) if last else 0
        self._replace_commit(rows)
        self._writable = None

    def steps(self) -> list[int]:
        """Step numbers, ascending."""
        committed = self._committed()
        if committed.steps == 0:
            return []
        numbers = np.asarray(_array(self._open(), "step_number")[: committed.steps])
        return [int(number) for number in numbers]

    def read(self, step: int) -> list[RolloutGroup]:
        """The groups that were appended for `step`, in order and equal to the last bit.

        Raises:
            RolloutError: no such step.
        """
        steps = self.steps()
        if step not in steps:
            held = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise RolloutError(
                f"rollout store {self._folder}",
                f"holds no such step (steps: {held})",
                found=step,
                remedy="name one it holds",
            )
        return _StepReader(self._open()).groups(steps.index(step))

    def summaries(self) -> list[StepSummary]:
        """Of every step, without reading any token or text."""
        steps = self.steps()
        if not steps:
            return []
        group = self._open()

        def column(name: str, rows: int) -> NDArray[np.float64]:
            return np.asarray(_array(group, name)[:rows]).astype(np.float64)

        rows = self._committed().rows()
        group_end = column("step_group_end", len(steps)).astype(int)
        rollout_end = column("group_rollout_end", rows["groups"]).astype(int)
        tokens = np.diff(column("rollout_token_end", rows["rollouts"]), prepend=0)
        tokens -= column("rollout_prompt_tokens", rows["rollouts"])
        rewards = column("rollout_reward", rows["rollouts"])
        cut = column("rollout_finish_reason", rows["rollouts"]) == FINISH_REASONS.index("length")
        found: list[StepSummary] = []
        for step, first, last in zip(steps, [0, *group_end], group_end):
            ends = [int(e) for e in rollout_end[first:last]]
            start = int(rollout_end[first - 1]) if first else 0
            here = slice(start, ends[-1] if ends else start)
            found.append(
                StepSummary(
                    step,
                    tuple(rewards[a:b].tolist() for a, b in zip([start, *ends], ends)),
                    tuple(tokens[here].astype(int).tolist()),
                    int(cut[here].sum()),
                )
            )
        return found

    def _open(self) -> zarr.Group:
        # Opened anew each time: array lengths grow while somebody else appends.
        return zarr.open_group(self._folder, mode="r")

    def _open_for_append(self) -> zarr.Group:
        """The group with every array cut to its committed rows; made if it is not there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        group = zarr.open_group(self._folder, mode="a")
        rows = self._committed().rows()
        for name, (kind, dtype) in _ARRAYS.items():
            if name in group:
                _array(group, name).resize((rows[kind],))
            else:
                group.create_array(
                    name,
                    shape=(0,),
                    chunks=(_ROWS_PER_CHUNK[kind],),
                    dtype=dtype,
                    compressors=ZstdCodec(level=3),
                )
        return group

    def _committed(self) -> _Committed:
        try:
            text = (self._folder / COMMIT_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return _Committed()
        return _Committed(**json.loads(text))

    def _commit(self, before: _Committed, columns: Mapping[str, Column]) -> None:
        rows = before.rows()
        for name in _COUNTING_ARRAYS:
            rows[_ARRAYS[name][0]] += len(columns[name])
        self._replace_commit(rows)

    def _replace_commit(self, rows: Mapping[str, int]) -> None:
        scratch = self._folder / f".{COMMIT_FILE}"
        scratch.write_text(json.dumps(rows), encoding="utf-8")
        os.replace(scratch, self._folder / COMMIT_FILE)


def _array(group: zarr.Group, name: str) -> zarr.Array:
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        raise RolloutError(
            f"rollout store {group.store_path}",
            f"has no array {name}: another version of this package wrote it",
            remedy="read it with that version",
        )
    return array


class _StepReader:
    """Reads the rows of one step and nothing else."""

    def __init__(self, group: zarr.Group) -> None:
        self._group = group

    def groups(self, index: int) -> list[RolloutGroup]:
        """Groups of the step at `index` in order of appending."""
        first, last = self._range("step_group_end", index, index + 1)
        rollouts_of = self._ranges("group_rollout_end", first, last)
        texts_of = self._ranges("group_text_end", first, last)
        texts = self._rows("group_text", texts_of)
        start, stop = (rollouts_of[0][0], rollouts_of[-1][1]) if rollouts_of else (0, 0)
        headers = [decode_texts(text) for text in texts]
        owners = [h["group_id"] for h, (a, b) in zip(headers, rollouts_of) for _ in range(a, b)]
        rollouts = self._rollouts(start, stop, owners)
        return [
            stored_group(header, tuple(rollouts[a - start : b - start]))
            for header, (a, b) in zip(headers, rollouts_of)
        ]

    def _rollouts(self, start: int, stop: int, group_ids: Sequence[str]) -> list[Rollout]:
        tokens_of = self._ranges("rollout_token_end", start, stop)
        ids, masks, logprobs, versions, references = (
            self._rows(f"token_{name}", tokens_of)
            for name in ("id", "loss_mask", "logprob", "version", "reference_logprob")
        )
        texts = self._rows("rollout_text", self._ranges("rollout_text_end", start, stop))
        rewards, prompt_tokens, reasons, seeds, seconds = (
            self._slice(f"rollout_{name}", start, stop).tolist()
            for name in ("reward", "prompt_tokens", "finish_reason", "seed", "generate_s")
        )
        rollouts: list[Rollout] = []
        for i, text in enumerate(map(decode_texts, texts)):
            rollouts.append(
                Rollout(
                    rollout_id=text["rollout_id"],
                    group_id=group_ids[i],
                    token_ids=ids[i].astype(np.int32),
                    loss_mask=masks[i].astype(np.bool_),
                    behavior_logprobs=logprobs[i].astype(np.float32),
                    versions=versions[i].astype(np.int32),
                    prompt_tokens=prompt_tokens[i],
                    reward=Reward(rewards[i], text["reason"], text["extracted"]),
                    finish_reason=FINISH_REASONS[reasons[i]],
                    seed=seeds[i],
                    text=text["text"],
                    generate_s=seconds[i],
                    reference_logprobs=reference_or_none(references[i]),
                )
            )
        return rollouts

    def _slice(self, name: str, start: int, stop: int) -> Column:
        return np.asarray(_array(self._group, name)[start:stop])

    def _range(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Where rows [start, stop) of a ragged column begin and end in its values."""
        ranges = self._ranges(name, start, stop)
        return ranges[0][0], ranges[-1][1]

    def _ranges(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        ends = [int(end) for end in self._slice(name, max(0, start - 1), stop).tolist()]
        starts = ends[:-1] if start > 0 else [0, *ends[:-1]]
        return list(zip(starts, ends[1:] if start > 0 else ends))

    def _rows(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Column]:
        """The values of neighbouring rows, read in one go."""
        if not ranges:
            return []
        offset = ranges[0][0]
        values = self._slice(name, offset, ranges[-1][1])
        return [values[a - offset : b - offset] for a, b in ranges]
