"""A Hugging Face checkpoint folder: read tensor by tensor, written shard by shard, never held
whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.conversion.config_json import config_text, read_model_spec
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import CheckpointError

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_COMPARED_ROWS = 4096
CONFIG = "config.json"

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SAFETENSORS_DTYPES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
# Written by old exporters; computed from the config by everyone who reads.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
# Where transformers keeps the chat templates beside the default one, by name.
TEMPLATES = "additional_chat_templates"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class Header:
    """Where a tensor is and what it looks like, without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class HfFolder:
    """Lazy view of a checkpoint. Opening it reads config.json and the headers only.

    Attributes:
        path: the folder.
        spec: its model.
        headers: tensor name -> Header, exactly the model's tensors.

    Raises:
        CheckpointError: unreadable, or tensors missing, unexpected, of another shape or dtype,
            by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec: ModelSpec = read_model_spec(path / CONFIG)
        found: dict[str, Header] = {}
        for name, header in _read_headers(path):
            if (known := found.setdefault(name, header)) is not header:
                raise CheckpointError(
                    f"{path}: {name}",
                    "is in two files: programs differ in which they take",
                    found=[known.file.name, header.file.name],
                    remedy="remove the file that is not of the model",
                )
        self.headers: Mapping[str, Header] = _checked(found, self.spec, path)
        if self.spec.tied and HEAD in found:
            self._check_tied(found[HEAD])

    def _check_tied(self, head: Header) -> None:
        """A stored head that is not the embedding would be lost, and the model another one."""
        rows = head.shape[0]
        same = head.shape == self.headers[EMBEDDING].shape
        for start in range(0, rows if same else 0, _COMPARED_ROWS):
            end = min(start + _COMPARED_ROWS, rows)
            with safe_open(head.file, framework="pt") as file:
                part = file.get_slice(HEAD)[start:end]
            same = same and torch.equal(part, self.read(EMBEDDING, 0, start, end))
        if not same:
            raise CheckpointError(
                f"{self.path}: {HEAD}",
                f"is not {EMBEDDING}, which config.json says it is (tie_word_embeddings)",
                remedy="set tie_word_embeddings to false, or remove the tensor",
            )

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """A tensor, or its range [start, stop) along dimension `axis`; only that much is read."""
        header = self.headers[name]
        try:
            with safe_open(header.file, framework="pt") as file:
                if axis is None:
                    return file.get_tensor(name)
                view = file.get_slice(name)
                return view[start:stop] if axis == 0 else view[:, start:stop]
        except (OSError, SafetensorError) as error:
            raise _broken(header.file, error) from error

    def read_block(self, name: str, rows: slice, columns: slice | None) -> Tensor:
        """Rows of a tensor, and columns of those; only that much is read."""
        header = self.headers[name]
        try:
            with safe_open(header.file, framework="pt") as file:
                view = file.get_slice(name)
                return view[rows] if columns is None else view[rows, columns]
        except (OSError, SafetensorError) as error:
            raise _broken(header.file, error) from error

    @property
    def side_files(self) -> list[Path]:
        return side_files_of(self.path)


def side_files_of(path: Path) -> list[Path]:
    """Everything a checkpoint needs besides weights: configs, tokenizer, chat template."""
    beside = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES)
    )
    return [*beside, *sorted((path / TEMPLATES).glob("*.jinja"))]


def _broken(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(str(file), f"cannot be read: {error}", remedy="copy the file again")


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.is_file() and (path / SINGLE).is_file():
        raise CheckpointError(
            str(path),
            f"holds both {SINGLE} and {INDEX}",
            remedy="remove the one that is not the model: programs differ in which they take",
        )
    if index.is_file():
        try:
            fields = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON
            raise _broken(index, error) from error
        shards = fields.get("weight_map") if isinstance(fields, dict) else fields
        if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
            raise CheckpointError(
                f"{index}: weight_map",
                "must give the file of every tensor",
                found=str(shards)[:80],
                remedy="copy the file again",
            )
        files = [path / name for name in sorted(set(shards.values()))]
    else:
        files = [path / SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            str(path),
            f"weight files are missing: {', '.join(missing[:4])}",
            remedy="copy the whole folder; only safetensors are read",
        )
    return files


def _read_headers(path: Path) -> Iterator[tuple[str, Header]]:
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    view = opened.get_slice(name)
                    dtype = view.get_dtype()
                    if dtype not in _TORCH_DTYPES:
                        raise CheckpointError(
                            f"{file}: {name}",
                            "has a dtype that is not supported",
                            found=dtype,
                            remedy=f"use one of {', '.join(_TORCH_DTYPES)}",
                        )
                    yield name, Header(file, tuple(view.get_shape()), _TORCH_DTYPES[dtype])
        except (OSError, SafetensorError) as error:
            raise _broken(file, error) from error


def _checked(found: dict[str, Header], spec: ModelSpec, path: Path) -> Mapping[str, Header]:
    wanted = list(spec.hf_names())
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            str(path),
            f"{len(missing)} tensors of the model are missing",
            found=missing[:4],
            remedy="config.json (tie_word_embeddings, num_hidden_layers) must match the weights",
        )
    beside = spec.beside(found)
    if beside:
        log.warning("%s: %d tensors of multi-token prediction are left out", path, len(beside))
    allowed = {*wanted, HEAD} if spec.tied else set(wanted)
    extra = [
        name
        for name in found
        if name not in allowed and not name.endswith(_IGNORED_SUFFIXES) and name not in beside
    ]
    if extra:
        raise CheckpointError(
            str(path),
            f"{len(extra)} tensors do not belong to this {spec.family.name} model",
            found=sorted(extra)[:4],
            remedy="config.json must match the weights",
        )
    for name in wanted:
        if found[name].shape != spec.hf_shape(name):
            raise CheckpointError(
                f"{path}: {name}",
                f"has another shape than config.json says, {spec.hf_shape(name)}",
                found=found[name].shape,
                remedy="config.json must match the weights",
            )
    return {name: found[name] for name in wanted}


def write_shard(
    file: Path,
    manifest: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
    tensors: Iterator[tuple[str, Tensor]],
) -> int:
    """Write one safetensors file, one tensor in memory at a time; returns the bytes of its tensors.

    Args:
        manifest: name, shape and dtype of everything `tensors` will yield, in order.
        tensors: the same names; cast to the manifest's dtype here.

    Raises:
        CheckpointError: the disk, or a stream that is not its manifest.
    """
    manifest = list(manifest)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in manifest:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        kind = _SAFETENSORS_DTYPES[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            wanted = iter(manifest)
            for given, tensor in tensors:
                name, shape, dtype = next(wanted, ("its end", (), torch.float32))
                if name != given or tuple(tensor.shape) != shape:
                    raise _broke_manifest(file, name, given)
                flat = tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
                out.write(flat.numpy().data)
                del tensor, flat  # before the next one is read
            for name, _, _ in wanted:
                raise _broke_manifest(file, name, "its end")
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise CheckpointError(
            str(file), f"cannot be written: {error}", remedy="free space or choose another folder"
        ) from error
    return offset


def _broke_manifest(file: Path, name: str, given: str) -> CheckpointError:
    return CheckpointError(f"{file}: {name}", "the stream broke its manifest", found=given)


def begin_folder(target: Path) -> Path:
    """An empty folder beside `target` to write into; nothing under the final name looks complete
    until `finish_folder`. The name depends on `target` only, so that all ranks know it.
    """
    partial = partial_folder(target)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(str(partial), f"cannot be made: {error}") from error
    return partial


def partial_folder(target: Path) -> Path:
    """Where the parts of `target` are written until it is whole."""
    return target.parent / f".{target.name}.partial"


def finish_folder(
    target: Path,
    shards: Mapping[str, list[str]],
    total_bytes: int,
    side_files: Iterable[Path],
    forget: Callable[[], None] = lambda: None,
) -> None:
    """Add index and side files to the partial folder and move it to `target`, replacing what was
    there.

    Args:
        shards: file name -> tensor names in it.
        total_bytes: of all tensors.
        forget: removes what lies in the partial folder for resuming; called when all is written.
    """
    partial = partial_folder(target)
    try:
        if shards and list(shards) != [SINGLE]:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {
                "metadata": {"total_size": total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for file in side_files:
            if file.name == CONFIG:
                text = config_text(file.read_text(encoding="utf-8"))
                (partial / CONFIG).write_text(text, encoding="utf-8")
                continue
            inner = TEMPLATES if file.parent.name == TEMPLATES else "."
            (partial / inner).mkdir(exist_ok=True)
            shutil.copyfile(file, partial / inner / file.name)
        forget()
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            str(target), f"cannot be written: {error}", remedy="free space or choose another folder"
        ) from error
