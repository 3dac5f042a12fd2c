"""The same plan over a shared folder: for fleets without a common network, and for late engines.

    FOLDER/7/rank-0.safetensors ...   what each rank would have sent, each byte once
    FOLDER/7/complete                 written by rank 0, last, when every rank's file is there

A version without its marker does not exist for a reader. An engine that comes late, or comes back,
takes the newest complete version (`latest`) when it joins; nobody waits for it. A run begins with
an empty folder (`clear`): what an interrupted one left may have numbers that come again. Every
slice carries the checksum of what was written, and what an engine then holds is compared with their
sums.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.checksums import checksum
from megatron_grpo.weights.exchange import Exchange, policy_name, worker_name
from megatron_grpo.weights.layouts import exact_names
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.plan import Plan, Transfer
from megatron_grpo.weights.proof import check_held
from megatron_grpo.weights.specs import torch_dtype

MARKER = "complete"
KEPT_VERSIONS = 2
_POLL_S = 0.02


def latest(folder: Path) -> int | None:
    """The newest complete version; None if there is none."""
    with suppress(FileNotFoundError):
        versions = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
        whole = [v for v in versions if (folder / str(v) / MARKER).is_file()]
        return max(whole, default=None)
    return None


def clear(folder: Path) -> None:
    """Forget all versions. Before anybody joins: readers take a complete version as they find it.

    Raises:
        WeightExchangeError: something cannot be removed.
    """
    with suppress(FileNotFoundError):
        try:
            shutil.rmtree(folder)
        except PermissionError as error:
            raise WeightExchangeError(
                str(folder),
                f"weights of an earlier run cannot be removed: {error}",
                remedy="remove the folder, or give the run another name",
            ) from error


class DiskSender:
    """The policy's end, on one rank.

    Args:
        folder: the same on all nodes.
        rank: of the policy.
    """

    def __init__(self, folder: Path, exchange: Exchange, spec: ModelSpec, rank: int) -> None:
        self._folder = folder
        self._exchange = exchange
        self._plan: Plan = exchange.plan(spec)
        self._rank = rank
        self._mine = [t for t in self._plan.transfers if t.source == rank]
        first = {t.tensor: t for t in reversed(self._plan.transfers)}
        self._firsts = sum(t.source == rank for t in first.values())

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> PushReport:
        """Write this rank's share; back when every rank has written and the version is complete.

        Raises:
            WeightExchangeError: a tensor is missing, the folder cannot be written, or another rank
                was late (named).
        """
        start = time.monotonic()
        until = start + self._exchange.deadline_s
        target = self._folder / str(version)
        try:
            target.mkdir(parents=True, exist_ok=True)
            slices, sums = self._slices(tensors)
            _write(target / _file(self._rank), lambda path: save_file(slices, path, sums))
            if self._rank == 0:
                files = [_file(rank) for rank in range(self._exchange.policy.num_ranks)]
                _await([target / file for file in files], until, f"version {version} on disk")
                marker = json.dumps({"plan": self._plan.digest(), "files": files})
                _write(target / MARKER, lambda path: path.write_text(marker, encoding="utf-8"))
                self._forget(version)
            else:
                _await([target / MARKER], until, f"version {version} on disk, policy rank 0")
        except OSError as error:
            raise WeightExchangeError(
                f"{policy_name(self._rank)}, {target}",
                f"cannot be written: {error}",
                remedy="free space, or set weights.folder to a shared folder",
            ) from error
        sent = sum(self._plan.bytes_of(transfer) for transfer in self._mine)
        return PushReport(version, self._firsts, sent, time.monotonic() - start)

    def send_everything_next(self) -> None:
        """Every version is whole anyway."""

    def close(self) -> None:
        """Nothing is held between pushes."""

    def _slices(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        dtype, policy = torch_dtype(self._exchange.dtype), self._plan.policy
        slices, sums = {}, {}
        for transfer in self._mine:
            tensor = self._plan.tensors[transfer.tensor]
            if tensor.name not in tensors:
                raise WeightExchangeError(
                    f"tensor {tensor.name} on {policy_name(self._rank)}", "is missing from the push"
                )
            low, _ = policy.range_of(tensor, policy.part_of(tensor, self._rank))
            part = tensors[tensor.name].detach()
            count = transfer.stop - transfer.start
            part = part.narrow(tensor.axis or 0, transfer.start - low, count)
            key = _key(transfer)
            kind = torch.float32 if tensor.exact else dtype
            slices[key] = part.to("cpu", kind).contiguous()
            sums[key] = json.dumps(checksum(slices[key]).tolist())
        return slices, sums

    def _forget(self, newest: int) -> None:
        """Remove versions that nobody can want any more."""
        old = sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdigit())
        for version in [v for v in old if v < newest][: -(KEPT_VERSIONS - 1)]:
            shutil.rmtree(self._folder / str(version), ignore_errors=True)


class DiskReceiver:
    """The end of one engine worker; see CollectiveReceiver for the verbs."""

    unsent: frozenset[str] = frozenset()

    def __init__(
        self, folder: Path, exchange: Exchange, spec: ModelSpec, worker: int, device: torch.device
    ) -> None:
        self._folder = folder
        self._exchange = exchange
        self._plan: Plan = exchange.plan(spec)
        self._name = worker_name(worker, exchange.fleet)
        self._device = device
        self._expected: dict[str, Tensor] = {}
        dests = {n for n, d in enumerate(self._plan.dests) if worker % exchange.fleet.workers in d}
        self._mine: dict[int, list[Transfer]] = {}
        for transfer in self._plan.transfers:
            if transfer.dest in dests:
                self._mine.setdefault(transfer.tensor, []).append(transfer)

    @property
    def names(self) -> list[str]:
        """Tensors of which this worker holds something."""
        return [self._plan.tensors[tensor].name for tensor in self._mine]

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Wait until the version is complete, then yield every tensor this worker needs.

        Raises:
            WeightExchangeError: it is not complete within the deadline, was written for another
                plan, or cannot be read.
        """
        source = self._folder / str(version)
        until = time.monotonic() + self._exchange.deadline_s
        _await([source / MARKER], until, f"{self._name}, version {version} on disk")
        marker = json.loads((source / MARKER).read_text(encoding="utf-8"))
        if marker["plan"] != self._plan.digest():
            raise WeightExchangeError(
                f"{self._name}, {source}",
                "was written for another model or layout",
                remedy="both sides must load the same model under one config",
            )
        self._expected = {}
        for number, transfers in self._mine.items():
            yield self._assembled(number, transfers, source)

    def _assembled(
        self, number: int, transfers: Sequence[Transfer], source: Path
    ) -> tuple[str, Tensor]:
        tensor = self._plan.tensors[number]
        axis = tensor.axis or 0
        pieces = []
        total = torch.zeros(2, dtype=torch.int64)
        for transfer in transfers:
            path = source / _file(transfer.source)
            try:
                with safe_open(path, framework="pt", device=str(self._device)) as file:
                    pieces.append(file.get_tensor(_key(transfer)))
                    total += torch.tensor(json.loads(file.metadata()[_key(transfer)]))
            except (OSError, SafetensorError) as error:
                raise WeightExchangeError(
                    f"{self._name}, {path}", f"cannot be read: {error}"
                ) from error
        self._expected[tensor.name] = total
        here = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        if here.shape[axis] == tensor.extent:
            return tensor.name, here
        return tensor.name, PartTensor(tensor.name, here, tensor.shape, axis, transfers[0].start)

    def confirm(self, version: int, held: Iterable[tuple[Sequence[str], Tensor]]) -> None:
        """Compare what is held with what was written; see CollectiveReceiver.confirm."""
        if self._exchange.verify != "never":
            dtype = torch_dtype(self._exchange.dtype)
            exact = exact_names(self._plan.tensors)
            check_held(self._name, self._expected, frozenset(), held, dtype, exact)

    def fail(self, cause: str) -> None:
        """Nobody waits for a reader."""

    def close(self) -> None:
        """Nothing is held between pulls."""


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _key(transfer: Transfer) -> str:
    return f"{transfer.tensor}:{transfer.start}:{transfer.stop}:{transfer.dest}"


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Appears under its name whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    os.replace(partial, path)


def _await(paths: Sequence[Path], until: float, where: str) -> None:
    waiting = list(paths)
    while waiting := [path for path in waiting if not path.is_file()]:
        if time.monotonic() > until:
            names = ", ".join(path.name for path in waiting[:5])
            raise WeightExchangeError(
                where,
                f"{names} did not appear in {waiting[0].parent} within the deadline",
                remedy="see the policy ranks' logs; weights.deadline_s sets the limit",
            )
        time.sleep(_POLL_S)
