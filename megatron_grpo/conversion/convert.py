"""Whole checkpoints from one side to the other: streamed, resumable, whole or not at all.

    HfFolder --boxes, one in memory at a time--> .distcp files --index, side files--> rename
    MegatronFolder --tensors, one at a time--> safetensors --index, side files--> rename

What is written lies in a hidden folder beside the target, with a journal of its finished files;
the same command again continues after the last of them.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import Tensor

from megatron_grpo.config import ParallelConfig
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.hf_folder import (
    SINGLE,
    HfFolder,
    finish_folder,
    partial_folder,
    write_shard,
)
from megatron_grpo.conversion.megatron_folder import (
    Location,
    MegatronFolder,
    extra_states,
    locate,
)
from megatron_grpo.conversion.rules import Direct, Vocabulary
from megatron_grpo.conversion.sharding import padded_vocabulary
from megatron_grpo.conversion.torch_dist import (
    PIECES_SUFFIX,
    Piece,
    write_index,
    write_pieces,
)
from megatron_grpo.errors import CheckpointError

# A tensor is cut into boxes of at most this, so that memory does not grow with the model.
BOX_BYTES = 128 << 20
# A file that was begun is written again after an interruption, so files are not too large.
FILE_BYTES = 2 << 30
# Hugging Face's own habit.
SHARD_BYTES = 5_000_000_000

T = TypeVar("T")

_JOURNAL = "progress.json"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of one Megatron tensor: its rows and, where ranks split columns, columns."""

    rule: Direct
    layer: int
    expert: int
    place: Location
    rows: slice
    columns: slice | None
    matrix: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        inner = [self.rows.start, *([self.columns.start] if self.columns else [])]
        return (*self.place.lead, *inner, *([0] if self.matrix and not self.columns else []))


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that a checkpoint's files are cut for. Any other layout can load them too."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError for the first rule that this layout breaks on the model."""
        ParallelConfig(
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
            data=self.expert,
            sequence=self.tensor > 1,
        ).check_model(spec.shape)


def boxes_of(
    spec: ModelSpec, rule: Direct, layer: int, expert: int, tensor: int, row_limit: int
) -> Iterator[tuple[int, Box]]:
    """(tensor rank, box) of one Megatron tensor, cut as the ranks hold it and then by rows."""
    shapes = [spec.hf_shape(name) for name in rule.hf_names(layer, expert)]
    rows, rest = [shape[0] for shape in shapes], shapes[0][1:]
    if isinstance(rule, Vocabulary):
        rows = [padded_vocabulary(rows[0], tensor)]
    place = locate(rule, spec, layer, expert)
    ranks = 1 if rule.axis is None else tensor
    by_columns = rule.axis == 1
    for (start, length), rank in itertools.product(rule.blocks(rows), range(ranks)):
        first, stop, columns = start, start + length, None
        if by_columns:
            width = rest[0] // ranks
            columns = slice(rank * width, (rank + 1) * width)
        else:
            first, stop = start + rank * length // ranks, start + (rank + 1) * length // ranks
        for low in range(first, stop, row_limit):
            part = slice(low, min(low + row_limit, stop))
            yield rank, Box(rule, layer, expert, place, part, columns, bool(rest))


def read_box_of(source: HfFolder, box: Box) -> Tensor:
    """The numbers of a box from the Hugging Face tensors it is made of; padding is zeros."""
    names = box.rule.hf_names(box.layer, box.expert)
    shapes = [source.spec.hf_shape(name) for name in names]
    pieces = []
    for run in box.rule.runs([shape[0] for shape in shapes], source.spec):
        low = max(box.rows.start, run.megatron_start)
        high = min(box.rows.stop, run.megatron_start + run.rows)
        if low < high:
            shift = run.hf_start - run.megatron_start
            rows = slice(low + shift, high + shift)
            pieces.append(source.read_block(names[run.part], rows, box.columns))
    missing = box.rows.stop - box.rows.start - sum(len(piece) for piece in pieces)
    if missing:  # only the padded vocabulary is short
        pieces.append(torch.zeros(missing, *shapes[0][1:], dtype=source.headers[names[0]].dtype))
    value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    _check_finite(value, ", ".join(names))
    return value


def _check_finite(value: Tensor, name: str) -> None:
    """A sum is as finite as its terms, and quick."""
    if not math.isfinite(float(value.sum(dtype=torch.float32))) and not value.isfinite().all():
        raise CheckpointError(
            name, "holds NaN or infinite numbers", remedy="take the weights from an intact copy"
        )


def plan_files(source: HfFolder, layout: Layout) -> dict[str, list[Box]]:
    """File name -> its boxes, each file of one rank: `__{rank}_{number}.distcp`."""
    spec = source.spec
    per_rank: dict[int, list[tuple[int, Box]]] = {}
    for rule in spec.rules():
        if not rule.stored:
            continue
        for layer, expert in itertools.product(spec.layers_of(rule), spec.experts_of(rule)):
            names = rule.hf_names(layer, expert)
            row_bytes = max(1, math.prod(spec.hf_shape(names[0])[1:]))
            row_bytes *= source.headers[names[0]].dtype.itemsize
            stage = _stage(spec, rule, layer, layout.pipeline)
            share = expert * layout.expert // len(spec.experts_of(rule))
            limit = max(1, BOX_BYTES // row_bytes)
            for rank, box in boxes_of(spec, rule, layer, expert, layout.tensor, limit):
                place = (stage * layout.expert + share) * layout.tensor + rank
                num_bytes = (box.rows.stop - box.rows.start) * row_bytes
                per_rank.setdefault(place, []).append((num_bytes, box))
    files: dict[str, list[Box]] = {}
    for rank, boxes in sorted(per_rank.items()):
        for number, group in enumerate(_groups(boxes, FILE_BYTES)):
            files[f"__{rank}_{number}{PIECES_SUFFIX}"] = group
    return files


def _stage(spec: ModelSpec, rule: Direct, layer: int, stages: int) -> int:
    if "{layer}" in rule.megatron:
        return layer * stages // spec.num_layers
    return 0 if rule.megatron.startswith("embedding") else stages - 1


def _groups(sized: Sequence[tuple[int, T]], limit: int) -> list[list[T]]:
    """Items in order, in groups of at most `limit` bytes (or one item)."""
    groups: list[list[T]] = []
    room = 0
    for size, item in sized:
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


def to_megatron(source: HfFolder, target: Path, layout: Layout, console: Console) -> None:
    """Write `target`, a Megatron checkpoint with the side files of `source`.

    Raises:
        ConfigError: the layout does not divide the model.
        CheckpointError: unreadable source, numbers that are not finite, the disk. What was
            finished is kept for the next try.
    """
    layout.check(source.spec)
    tensors = _whole_tensors(source, layout.tensor)
    files = plan_files(source, layout)
    journal = Journal.open(target, source, {"to": "megatron", **asdict(layout)})
    done: list[Piece] = []
    with _bar(console) as bar:
        total = sum(math.prod(_sizes(box, tensors)) for boxes in files.values() for box in boxes)
        task = bar.add_task(f"to {target.name}", total=total * _itemsize(source))
        for name, boxes in files.items():
            if (found := journal.find(name)) is None:
                cut = [(box.place.key, box.offsets, _sizes(box, tensors)) for box in boxes]

                def value(index: int, boxes: list[Box] = boxes) -> Tensor:
                    box = read_box_of(source, boxes[index])
                    bar.advance(task, box.nbytes)
                    return box

                pieces = write_pieces(journal.folder / name, cut, value)
                found = journal.add(name, [_as_list(piece) for piece in pieces])
            else:
                size = sum(math.prod(_sizes(box, tensors)) for box in boxes)
                bar.advance(task, size * _itemsize(source))
            done += [Piece(k, tuple(o), tuple(s), name, a, n) for k, o, s, a, n in found]
        write_index(journal.folder, tensors, done, extra_states(source.spec))
    journal.close()
    finish_folder(target, {}, 0, source.side_files)


def _as_list(piece: Piece) -> list[object]:
    return [piece.key, piece.offsets, piece.sizes, piece.start, piece.length]


def _itemsize(source: HfFolder) -> int:
    return next(iter(source.headers.values())).dtype.itemsize


def _sizes(box: Box, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[int, ...]:
    """Sizes of a box in all dimensions of its tensor."""
    whole = tensors[box.place.key][0]
    inner = [box.rows.stop - box.rows.start]
    if box.columns is not None:
        inner.append(box.columns.stop - box.columns.start)
    elif box.matrix:
        inner.append(whole[-1])
    return (*[1] * len(box.place.lead), *inner)


def _whole_tensors(source: HfFolder, tensor: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Key -> shape and dtype of everything the checkpoint holds.

    Raises:
        CheckpointError: Megatron keeps in one tensor what the source has in several dtypes.
    """
    spec = source.spec
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rule in spec.rules():
        if not rule.stored:
            continue
        for layer, expert in itertools.product(spec.layers_of(rule), spec.experts_of(rule)):
            names = rule.hf_names(layer, expert)
            rows = [spec.hf_shape(name)[0] for name in names]
            if isinstance(rule, Vocabulary):
                rows = [padded_vocabulary(rows[0], tensor)]
            place = locate(rule, spec, layer, expert)
            shape = (*place.lead_shape, sum(rows), *spec.hf_shape(names[0])[1:])
            dtypes = {source.headers[name].dtype for name in names}
            known = found.setdefault(place.key, (shape, source.headers[names[0]].dtype))
            if dtypes != {known[1]}:
                raise CheckpointError(
                    ", ".join(names),
                    f"Megatron keeps these in one tensor of {known[1]}",
                    found=sorted(map(str, dtypes)),
                    remedy="convert the source to one dtype first",
                )
    return found


def to_hugging_face(
    source: MegatronFolder,
    target: Path,
    console: Console,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `target`, a Hugging Face folder with the side files of `source`.

    Args:
        dtype: of all tensors; None keeps that of the checkpoint.
        shard_bytes: most bytes of one safetensors file.

    Raises:
        CheckpointError: see `to_megatron`.
    """
    kinds = {name: dtype or header.dtype for name, header in source.headers.items()}
    sized = [(math.prod(h.shape) * kinds[n].itemsize, n) for n, h in source.headers.items()]
    groups = _groups(sized, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    shards = dict(zip(files if len(groups) > 1 else [SINGLE], groups))
    total = sum(size for size, _ in sized)
    settings = {"to": "hugging_face", "dtype": str(dtype), "shard_bytes": shard_bytes}
    journal = Journal.open(target, source, settings)
    with _bar(console) as bar:
        task = bar.add_task(f"to {target.name}", total=total)

        def tensors(names: list[str]) -> Iterator[tuple[str, Tensor]]:
            for name in names:
                value = source.read(name)
                _check_finite(value, name)
                yield name, value
                bar.advance(task, value.numel() * kinds[name].itemsize)
                del value

        for file, names in shards.items():
            manifest = [(name, source.headers[name].shape, kinds[name]) for name in names]
            if journal.find(file) is None:
                write_shard(journal.folder / file, manifest, tensors(names))
                journal.add(file, [])
            else:
                bar.advance(task, (journal.folder / file).stat().st_size)
    others = [file for file in source.side_files if file.name != "config.json"]
    (config,) = (file for file in source.side_files if file.name == "config.json")
    _write_config(config, journal.folder, set(kinds.values()))
    journal.close()
    finish_folder(target, shards, total, others)


def _write_config(config: Path, folder: Path, dtypes: set[torch.dtype]) -> None:
    """The same file, unless all weights have another dtype than it says."""
    text = config.read_text(encoding="utf-8")
    fields = json.loads(text)
    key = "torch_dtype" if "torch_dtype" in fields and "dtype" not in fields else "dtype"
    name = str(next(iter(dtypes))).removeprefix("torch.")
    if len(dtypes) == 1 and fields.get(key) != name:
        text = json.dumps({**fields, key: name}, indent=2) + "\n"
    try:
        (folder / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(str(folder), f"cannot be written: {error}") from error


class Journal:
    """Which files of a conversion are finished, so that it can be continued.

    Attributes:
        folder: where the files are written until all are there.
    """

    def __init__(self, folder: Path, identity: dict[str, object], done: dict[str, list]) -> None:
        self.folder = folder
        self._identity = identity
        self._done = done

    @classmethod
    def open(
        cls, target: Path, source: HfFolder | MegatronFolder, settings: dict[str, object]
    ) -> Journal:
        """Continue what was begun for the same source and settings, or begin.

        Raises:
            CheckpointError: `target` exists, or the disk.
        """
        if target.exists():
            raise CheckpointError(
                str(target), "exists already", remedy="name another folder, or remove this one"
            )
        folder = partial_folder(target)
        files = sorted(path for path in source.path.iterdir() if path.is_file())
        stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
        identity = {"source": str(source.path.resolve()), "files": stats, **settings}
        try:
            written = json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            written = {}
        if written.get("identity") == identity:
            return cls(folder, identity, written["done"])
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(str(folder), f"cannot be made: {error}") from error
        return cls(folder, identity, {})

    def find(self, file: str) -> list | None:
        """What `add` was given for a finished file."""
        return self._done.get(file) if (self.folder / file).is_file() else None

    def add(self, file: str, entry: list) -> list:
        self._done[file] = entry
        text = json.dumps({"identity": self._identity, "done": self._done})
        try:
            (self.folder / f"{_JOURNAL}.new").write_text(text, encoding="utf-8")
            (self.folder / f"{_JOURNAL}.new").rename(self.folder / _JOURNAL)
        except OSError as error:
            raise CheckpointError(str(self.folder), f"cannot be written: {error}") from error
        return entry

    def close(self) -> None:
        (self.folder / _JOURNAL).unlink(missing_ok=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
