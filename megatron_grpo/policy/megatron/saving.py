"""Writing a checkpoint while training goes on, and ending every save alike on all ranks.

    begin_save    on all ranks    plan who writes what; nothing is copied yet
    a thread      on each rank    copy what training changes, then write this rank's files
    an update     on all ranks    waits until that copy is made
    finish_save   on all ranks    index, side files, the final name: or one error everywhere

Between two updates nothing changes weights or optimizer, so the copy needs no place on the training
thread: it is made while the next rollouts are generated and their gradients computed.

Megatron plans and writes; what touches the disk is called here. Inside Megatron's own verbs a rank
whose disk is full would leave the others in a collective until its deadline.
"""

from __future__ import annotations

import inspect
import io
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor

from megatron_grpo.conversion.hf_folder import begin_folder, finish_folder, partial_folder
from megatron_grpo.conversion.torch_dist import COMMON
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron.export import agree, attempt
from megatron_grpo.policy.megatron.shares import Holdings, share_of

_FORMAT = ("torch_dist", 1)
# Megatron 0.19 has two writers to choose from; 0.16 has one.
_WRITER: dict[str, str] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
    else {}
)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Megatron's writer with this rank's share of the work, and rank 0's index of the whole."""

    writer: Any
    index: Any


class _Planner(TorchDistSaveShardedStrategy):
    """Ends where Megatron would hand out functions that mix disk and collectives."""

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, *rest: Any
    ) -> Any:
        return _Planned(writer, save_state_dict_ret[1])


class Writing:
    """A checkpoint between `begin_save` and `finish_save`, on one rank.

    Args:
        copies: (staging, live): filled by the thread before it writes.
    """

    def __init__(
        self,
        folder: Path,
        plan: _Planned,
        copies: Sequence[tuple[Tensor, Tensor]],
        side_files: Sequence[Path],
    ) -> None:
        self.folder = folder
        self.side_files = side_files
        self.plan = plan
        self._copied = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        ready = torch.cuda.Event() if any(live.is_cuda for _, live in copies) else None
        if ready is not None:
            ready.record()
        self.share = self._pool.submit(self._copy_and_write, copies, ready)
        self._pool.shutdown(wait=False)

    def wait_copied(self, deadline_s: float) -> None:
        """Return when weights and optimizer may change again.

        Raises:
            CheckpointError: at the deadline.
        """
        if not self._copied.wait(deadline_s):
            raise CheckpointError(
                str(self.folder),
                f"was not copied within {deadline_s:g} s",
                remedy="look for a rank that is out of memory and swapping",
            )

    def _copy_and_write(
        self, copies: Sequence[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None
    ) -> list[Any]:
        try:
            _copy(copies, ready)
        finally:
            self._copied.set()
        return _write(self.plan.writer)


def begin_save(
    folder: Path,
    state: dict[str, Any],
    holdings: Holdings,
    side_files: Sequence[Path],
) -> Writing:
    """Plan the save of a sharded state and start it. Collective; raises CheckpointError on every
    rank.

    Args:
        state: taken apart.
        holdings: see shares.share_of.
        side_files: the model's config, tokenizer and so on, without which the folder could not be
            converted.
    """
    first = dist.get_rank() == 0
    agree(attempt(lambda: begin_folder(folder)) if first else None)
    partial = partial_folder(folder)
    try:
        sharded, common = save_preprocess(state)
    except CheckpointingException as error:  # Megatron compares the ranks' shares on rank 0
        agree(CheckpointError(str(folder), f"does not fit together: {error}"))
        raise
    agree(_attempt_io(folder, lambda: _write_common(common, partial)) if first else None)
    entries, copies = _stage(sharded, holdings)
    # Megatron would start a process for this queue; threads need none.
    cast(Any, filesystem_async)._results_queue = queue.Queue()
    plan = cast(Any, _Planner(*_FORMAT)).async_save(entries, partial, **_WRITER)
    return Writing(folder, plan, copies, side_files)


def finish_save(writing: Writing) -> None:
    """Wait for this rank's share, then make the checkpoint whole, or nothing. Collective; raises
    CheckpointError on every rank.
    """
    folder, first = writing.folder, dist.get_rank() == 0
    failure = writing.share.exception()
    agree(None if failure is None else _unwritable(folder, failure))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(writing.share.result(), shares if first else None)
    agree(attempt(lambda: _complete(writing, shares)) if first else None)


def _complete(writing: Writing, shares: list[Any]) -> None:
    """Rank 0: what turns the ranks' files into a checkpoint."""
    partial = partial_folder(writing.folder)

    def describe() -> None:
        writing.plan.writer.finish(writing.plan.index, shares)
        save_config(CheckpointingConfig(*_FORMAT), str(partial))

    problem = _attempt_io(writing.folder, describe)
    if problem is not None:
        raise problem
    finish_folder(writing.folder, {}, 0, writing.side_files)


def _write_common(common: dict[str, Any], partial: Path) -> None:
    """What is not sharded. In a file of its own, which both Megatron 0.16 and 0.19 read."""
    content = io.BytesIO()
    torch.save(common, content)
    (partial / COMMON).write_bytes(content.getbuffer())


def _attempt_io(folder: Path, action: Callable[[], None]) -> CheckpointError | None:
    try:
        action()
    except (OSError, RuntimeError) as error:  # torch's own writers raise RuntimeError
        return _unwritable(folder, error)
    return None


def _unwritable(folder: Path, failure: BaseException) -> CheckpointError:
    """By the system's reason, which torch's writers hide behind one of their own."""
    reason: BaseException | None = failure
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__context__
    return CheckpointError(
        str(folder),
        f"cannot be written: {reason or failure}",
        remedy="free space; the checkpoint before this one is untouched",
    )


def _stage(
    sharded: object, holdings: Holdings
) -> tuple[dict[str, list[ShardedBase]], list[tuple[Tensor, Tensor]]]:
    """What this rank writes, with room of its own, and what is to be copied there."""
    entries: list[ShardedBase] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for entry in nested_values(cast(Any, sharded)):
        if not isinstance(entry, ShardedTensor):
            entries.append(entry)
            continue
        for part, live in share_of(entry, holdings):
            part.data = torch.empty(part.local_shape, dtype=part.dtype)
            copies.append((part.data, live.view(part.local_shape)))
            entries.append(part)
    return {"entries": entries}, copies


def _copy(copies: Sequence[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None) -> None:
    """Beside training: on a stream of its own, after what was under way when the save began."""
    if ready is None:
        for staging, source in copies:
            staging.copy_(source)
        return
    device = next(source.device for _, source in copies if source.is_cuda)
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for staging, source in copies:
            staging.copy_(source)
    stream.synchronize()


def _write(writer: Any) -> list[Any]:
    """This rank's files; what the index must know of them. Megatron's own runner forks a process
    for each, which a rank with threads at work must not.
    """
    results: list[Any] = []
    for number, bucket in enumerate(writer.write_buckets):
        answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        counts: queue.Queue[int] = queue.Queue()
        counts.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            [writer.transforms], number, bucket, cast(Any, answers), cast(Any, counts), True
        )
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            raise answer
        results += answer
    return results
