"""Megatron's checkpoint format `torch_dist`, read and written piece by piece, without a model.

A folder holds `.distcp` files of serialised pieces, `.metadata` that says which piece of which
tensor lies where, `common.pt` and `metadata.json`. Megatron-Core loads what is written here and
writes what is read here; neither holds more than one piece in memory.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_grpo.errors import CheckpointError

METADATA = ".metadata"
MARKER = "metadata.json"
COMMON = "common.pt"
PIECES_SUFFIX = ".distcp"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where it is stored.

    Attributes:
        offsets, sizes: of the box, one per dimension of the whole tensor.
        file, start, length: its place, in bytes.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


# What reading a file with flipped bytes raises, by where they are (UnicodeError is a ValueError).
_DAMAGE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)

# Everything `.metadata` may name; pickle could call anything else.
_METADATA_CLASSES = frozenset(
    {
        ("builtins", "getattr"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
    }
)
_METADATA_MODULES = frozenset(
    f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "metadata", "planner")
)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of a checkpoint's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        known = (module, name) in _METADATA_CLASSES and name != "getattr"
        if dtype or known or (module in _METADATA_MODULES and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no business in a checkpoint's index")


def is_torch_dist(path: Path) -> bool:
    """Whether this is a complete checkpoint of the format."""
    return (path / MARKER).is_file() and (path / METADATA).is_file()


def read_index(path: Path) -> Mapping[str, Stored]:
    """Every tensor of the checkpoint by its key.

    Raises:
        CheckpointError: incomplete, unreadable, or files shorter than the index says.
    """
    if not is_torch_dist(path):
        raise CheckpointError(
            str(path),
            f"is not a Megatron checkpoint: {MARKER} or {METADATA} is missing",
            remedy="point at a folder that `convert to-megatron` or a training run wrote",
        )
    try:
        with (path / METADATA).open("rb") as file:
            metadata = cast(Metadata, _MetadataUnpickler(file).load())
        places = cast(Mapping[MetadataIndex, _StorageInfo], metadata.storage_data)
        found = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                found[key] = _stored(key, entry, places)
        _check_files(path, found.values())
    except _DAMAGE as error:
        raise _broken(path / METADATA, error) from error
    return found


def _stored(
    key: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> Stored:
    pieces = []
    for chunk in entry.chunks:
        place = places[MetadataIndex(key, chunk.offsets)]
        pieces.append(
            Piece(
                key,
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                place.relative_path,
                place.offset,
                place.length,
            )
        )
    dtype = entry.properties.dtype
    dims = {len(entry.size), *(len(p.offsets) for p in pieces), *(len(p.sizes) for p in pieces)}
    if len(dims) > 1 or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} is not described as a tensor")
    return Stored(tuple(entry.size), dtype, tuple(pieces))


def _check_files(path: Path, tensors: Iterable[Stored]) -> None:
    needed: dict[str, int] = {}
    for piece in (piece for tensor in tensors for piece in tensor.pieces):
        needed[piece.file] = max(needed.get(piece.file, 0), piece.start + piece.length)
    for name, size in sorted(needed.items()):
        file = path / name
        there = file.stat().st_size if file.is_file() else None
        if there is None or there < size:
            problem = "is missing" if there is None else f"is truncated: {size} bytes are needed"
            raise CheckpointError(str(file), problem, found=there, remedy="copy the file again")


def _broken(file: Path, error: Exception) -> CheckpointError:
    said = str(error).partition("\n")[0] or type(error).__name__
    return CheckpointError(str(file), f"cannot be read: {said}", remedy="copy the file again")


def read_box(path: Path, tensor: Stored, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """[*sizes] of a tensor, from `offsets`; loads the pieces that overlap, one at a time.

    Raises:
        CheckpointError: unreadable, or the pieces leave a hole.
    """
    out: Tensor | None = None
    covered = 0
    for piece in tensor.pieces:
        low = [max(a, b) for a, b in zip(offsets, piece.offsets)]
        high = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, piece.offsets, piece.sizes)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        there = _load(path / piece.file, piece)
        if piece.offsets == tuple(offsets) and piece.sizes == tuple(sizes):
            return there
        if out is None:
            out = torch.empty(tuple(sizes), dtype=tensor.dtype)
        box = there[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.offsets))]
        out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets))] = box
        covered += box.numel()
    if out is None or covered != out.numel():
        key = tensor.pieces[0].key if tensor.pieces else "a tensor"
        raise CheckpointError(
            f"{path}: {key}", "has a hole", found=tuple(offsets), remedy="convert it again"
        )
    return out


def _load(file: Path, piece: Piece) -> Tensor:
    try:
        with file.open("rb") as opened:
            view = _create_file_view(opened, piece.start, piece.length)
            loaded = torch.load(cast(BinaryIO, view), map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise _broken(file, error) from error
    if not isinstance(loaded, Tensor) or tuple(loaded.shape) != piece.sizes:
        raise CheckpointError(f"{file}: {piece.key}", "is not the piece that the index names")
    return loaded


def write_pieces(
    file: Path,
    boxes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]],
) -> list[Piece]:
    """Write one `.distcp` file, one piece after the other.

    Args:
        boxes: key, offsets and sizes of every piece, and its numbers, of any shape with as many
            elements.

    Raises:
        CheckpointError: the disk.
    """
    pieces = []
    try:
        with file.open("wb") as out:
            for key, offsets, sizes, numbers in boxes:
                value = _alone(numbers.reshape(sizes))
                start = out.tell()
                _save(value, out)
                pieces.append(Piece(key, offsets, sizes, file.name, start, out.tell() - start))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise CheckpointError(
            str(file), f"cannot be written: {error}", remedy="free space or choose another folder"
        ) from error
    return pieces


def _save(value: Tensor, out: BinaryIO) -> None:
    """torch.save, which says of a full disk, and of Ctrl-C, that a position was unexpected."""
    try:
        torch.save(value, out)
    except RuntimeError as error:
        raise (error.__context__ or OSError(str(error))) from None


def _alone(value: Tensor) -> Tensor:
    """The same numbers in a storage that holds nothing else; a view is stored with all it views."""
    value = value.contiguous()
    if value.untyped_storage().nbytes() == value.nbytes:
        return value
    own = torch.from_numpy(value.view(-1).view(torch.uint8).numpy())  # the same memory
    return own.view(value.dtype).view(value.shape)


def write_index(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    pieces: Iterable[Piece],
    objects: Sequence[str],
) -> None:
    """Make `path`, which holds the pieces, a checkpoint; the marker comes last.

    Args:
        tensors: key -> whole shape and dtype.
        objects: keys of the empty extra states that Megatron's layers look for.

    Raises:
        CheckpointError: the disk.
    """
    places: dict[MetadataIndex, _StorageInfo] = {}
    entries: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (shape, dtype) in tensors.items()
    }
    for piece in pieces:
        offsets = torch.Size(piece.offsets)
        entries[piece.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.sizes)))
        index = MetadataIndex(piece.key, offsets)
        places[index] = _StorageInfo(piece.file, piece.start, piece.length)
    nothing = io.BytesIO()
    torch.save([None], nothing)  # Megatron keeps a list of the states that share a key
    empty = f"__0_objects{PIECES_SUFFIX}"
    for key in objects:
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(empty, 0, len(nothing.getvalue()))
    try:
        (path / empty).write_bytes(nothing.getvalue())
        content = {"singleton_local_shards": False}
        torch.save({"content_metadata": content}, path / COMMON)
        with (path / METADATA).open("wb") as file:
            pickle.dump(Metadata(entries, None, places), file)
            file.flush()
            os.fsync(file.fileno())
        marker = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (path / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            str(path), f"cannot be written: {error}", remedy="free space or choose another folder"
        ) from error
