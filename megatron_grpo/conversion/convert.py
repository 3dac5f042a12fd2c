"""Whole checkpoints from one side to the other: streamed, resumable, whole or not at all.

    HfFolder --boxes, one in memory at a time--> .distcp files --index, side files--> rename
    MegatronFolder --tensors, one at a time--> safetensors --index, side files--> rename

What is written lies in a hidden folder beside the target, with a journal of its finished files;
the same command again continues after the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

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

from megatron_grpo.conversion.boxes import (
    Box,
    Layout,
    check_finite,
    in_groups,
    plan_files,
    read_box_of,
    whole_tensors,
)
from megatron_grpo.conversion.config_json import config_text
from megatron_grpo.conversion.hf_folder import CONFIG, SINGLE, HfFolder, finish_folder, write_shard
from megatron_grpo.conversion.journal import Journal, file_stats
from megatron_grpo.conversion.megatron_folder import MegatronFolder, extra_states
from megatron_grpo.conversion.read_ahead import read_ahead
from megatron_grpo.conversion.torch_dist import (
    COMMON,
    MARKER,
    METADATA,
    Piece,
    write_index,
    write_pieces,
)
from megatron_grpo.errors import CheckpointError

# Hugging Face's own habit.
SHARD_BYTES = 5_000_000_000

# A tensor of a safetensors file: name, shape and dtype.
Entry = tuple[str, tuple[int, ...], torch.dtype]


def to_megatron(source: HfFolder, target: Path, layout: Layout, console: Console) -> None:
    """Write `target`, a Megatron checkpoint with the side files of `source`.

    Raises:
        ConfigError: the layout does not divide the model.
        CheckpointError: unreadable source, numbers that are not finite, the disk. What was
            finished is kept for the next try.
    """
    layout.check(source.spec)
    clash = [file for file in source.side_files if file.name in (MARKER, METADATA, COMMON)]
    if clash:
        raise CheckpointError(
            str(clash[0]),
            "has the name of a file of Megatron's own",
            remedy="rename it, or leave it out of the folder",
        )
    tensors = whole_tensors(source, layout.tensor)
    files = plan_files(source.spec, tensors, layout)
    journal = Journal.open(target, source, {"to": "megatron", **asdict(layout)})
    done: list[Piece] = []
    with _bar(console) as bar:
        total = sum(box.num_bytes for boxes in files.values() for box in boxes)
        task = bar.add_task(f"to {target.name}", total=total)
        for name, boxes in files.items():
            if (found := journal.find(name)) is None:
                stream = _boxes(source, boxes, lambda size: bar.advance(task, size))
                pieces = write_pieces(journal.folder / name, stream)
                found = journal.add(name, [_as_list(piece) for piece in pieces])
            else:
                bar.advance(task, sum(box.num_bytes for box in boxes))
            done += [Piece(k, tuple(o), tuple(s), name, a, n) for k, o, s, a, n in found]
        write_index(journal.folder, tensors, done, extra_states(source.spec))
    finish_folder(target, {}, 0, source.side_files, journal.close)


def _boxes(
    source: HfFolder, boxes: Sequence[Box], advance: Callable[[int], None]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    sized = [(box.num_bytes, box) for box in boxes]
    for box, value in read_ahead(sized, lambda box: read_box_of(source, box)):
        yield box.key, box.offsets, box.sizes, value
        advance(box.num_bytes)


def _as_list(piece: Piece) -> list[object]:
    return [piece.key, piece.offsets, piece.sizes, piece.start, piece.length]


def to_hugging_face(
    source: MegatronFolder,
    target: Path,
    console: Console,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `target`, a Hugging Face folder with the side files of `source`.

    Args:
        dtype: of all tensors but those that no cast applies to; None keeps that of the checkpoint.
        shard_bytes: most bytes of one safetensors file.

    Raises:
        CheckpointError: see `to_megatron`.
    """
    exact = source.spec.exact_names()
    manifest = [
        (name, header.shape, header.dtype if name in exact else dtype or header.dtype)
        for name, header in source.headers.items()
    ]
    sized = [(_entry_bytes(entry), entry) for entry in manifest]
    groups = in_groups(sized, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = files if len(groups) > 1 else [SINGLE]
    settings = {
        "to": "hugging_face",
        "dtype": str(dtype),
        "shard_bytes": shard_bytes,
        "like": str(source.side.resolve()),
        "like_files": file_stats(source.side),
    }
    journal = Journal.open(target, source, settings)
    total = sum(size for size, _ in sized)
    with _bar(console) as bar:
        task = bar.add_task(f"to {target.name}", total=total)

        for file, group in zip(files, groups):
            if journal.find(file) is None:
                stream = _tensors(source, group, lambda size: bar.advance(task, size))
                write_shard(journal.folder / file, group, stream)
                journal.add(file, [])
            else:
                bar.advance(task, (journal.folder / file).stat().st_size)
    others = [file for file in source.side_files if file.name != CONFIG]
    (config,) = (file for file in source.side_files if file.name == CONFIG)
    kinds = {kind for name, _, kind in manifest if name not in exact}
    _write_config(config, journal.folder, kinds)
    shards = {file: [name for name, _, _ in group] for file, group in zip(files, groups)}
    finish_folder(target, shards, total, others, journal.close)


def _tensors(
    source: MegatronFolder, group: Sequence[Entry], advance: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    def read(entry: Entry) -> Tensor:
        name, _, kind = entry
        value = source.read(name)
        cast = value.to(kind)
        check_finite(cast, name if kind == value.dtype else f"{name}, as {kind},")
        return cast

    sized = [(_entry_bytes(entry), entry) for entry in group]
    for entry, value in read_ahead(sized, read):
        yield entry[0], value
        del value  # before the next one is read
        advance(_entry_bytes(entry))


def _entry_bytes(entry: Entry) -> int:
    _, shape, kind = entry
    return math.prod(shape) * kind.itemsize


def _write_config(config: Path, folder: Path, dtypes: set[torch.dtype]) -> None:
    """The same file, unless all weights have another dtype than it says."""
    only = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else None
    try:
        text = config_text(config.read_text(encoding="utf-8"), only)
        (folder / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(str(folder), f"cannot be written: {error}") from error


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
