"""The LM head over a tensor-parallel group: vocabulary shards, hidden states in chunks.

A rank holds rows `[rank * V_shard, (rank + 1) * V_shard)` of the output weight. All ranks of the
group score the same tokens, each over its own rows; one all-gather of four numbers per token joins
them. The hidden gradient is the sum over the group, because every rank sees only its rows' share.

With sequence parallelism a rank holds a contiguous slice of the tokens. The slices are gathered in
chunks, all in flight at once, so that work on the first chunk hides the arrival of the rest; in the
backward pass each chunk of the hidden gradient is reduced while the next is computed.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .stats import merge_parts


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which ids of the vocabulary this rank's weight rows are.

    Example: `VocabShard(group, first_id=128, num_ids=2, vocab_size=130)` is the second of two
    ranks that hold 128 rows each of a vocabulary of 130; its other 126 rows are padding.
    """

    group: dist.ProcessGroup | None  # None: the whole vocabulary is here
    first_id: int
    num_ids: int  # leading rows of the shard that are real ids; the rest never enter the softmax
    vocab_size: int

    @classmethod
    def of(
        cls, num_rows: int, group: dist.ProcessGroup | None, vocab_size: int | None
    ) -> "VocabShard":
        """Shard for this rank's `num_rows` weight rows, the same number on every rank.

        Raises ValueError when `vocab_size` is not in 1..num_rows * ranks.
        """
        num_ranks = 1 if group is None else group.size()
        rank = 0 if group is None else group.rank()
        size = num_rows * num_ranks if vocab_size is None else vocab_size
        if not 0 < size <= num_rows * num_ranks:
            raise ValueError(
                f"vocab_size={vocab_size} does not fit the output weight, which has {num_rows} rows"
                f" on each of {num_ranks} ranks; pass the logical vocabulary size, at most"
                f" {num_rows * num_ranks}"
            )
        num_ids = min(max(size - rank * num_rows, 0), num_rows)
        return cls(group if num_ranks > 1 else None, rank * num_rows, num_ids, size)

    def local_targets(self, targets_T: Tensor) -> Tensor:
        """Row of each target in this shard, `[T]`; -1 for targets that live elsewhere."""
        local_T = targets_T - self.first_id
        return local_T.masked_fill_((local_T < 0) | (local_T >= self.num_ids), -1)

    def join(self, stats_4T: Tensor) -> Tensor:
        """Statistics over the whole vocabulary from each rank's own `[4, T]`, in one collective."""
        if self.group is None:
            return stats_4T
        num_stats, num_tokens = stats_4T.shape
        parts = stats_4T.new_empty(self.group.size() * num_stats, num_tokens)
        dist.all_gather_single(parts, stats_4T.contiguous(), group=self.group)
        return merge_parts(parts.view(-1, num_stats, num_tokens))


def chunk_bounds(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Slices that cover `num_tokens`, each of `chunk_tokens` but for the last."""
    starts = range(0, num_tokens, chunk_tokens)
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in starts]


class HiddenChunks:
    """The hidden states of all tokens, cut into chunks that may still be on their way.

    Without sequence parallelism the chunks are views of the input in its order. With it, chunk c
    holds the c-th piece of every rank's slice, so tokens are worked on in another order than the
    caller's; `to_working_order` and `to_caller_order` translate per-token tensors.
    """

    def __init__(
        self, hidden_TD: Tensor, chunk_tokens: int, gather_group: dist.ProcessGroup | None
    ) -> None:
        self.group = gather_group
        num_ranks = 1 if gather_group is None else gather_group.size()
        self.local_bounds = chunk_bounds(hidden_TD.shape[0], max(1, chunk_tokens // num_ranks))
        self.bounds = [slice(b.start * num_ranks, b.stop * num_ranks) for b in self.local_bounds]
        self.num_tokens = hidden_TD.shape[0] * num_ranks
        self._arrivals: list[dist.Work | None] = [None] * len(self.bounds)
        self._order_T: Tensor | None = None
        self._hidden_TD = hidden_TD
        if gather_group is not None:
            self._start_gather(hidden_TD.contiguous(), num_ranks)

    def _start_gather(self, hidden_TD: Tensor, num_ranks: int) -> None:
        self._hidden_TD = hidden_TD.new_empty(self.num_tokens, hidden_TD.shape[1])
        ids_RT = torch.arange(self.num_tokens, device=hidden_TD.device).view(num_ranks, -1)
        pieces = [ids_RT[:, local].reshape(-1) for local in self.local_bounds]
        self._order_T = torch.cat(pieces) if pieces else ids_RT.reshape(-1)
        for index, (local, here) in enumerate(zip(self.local_bounds, self.bounds, strict=True)):
            self._arrivals[index] = dist.all_gather_single(
                self._hidden_TD[here], hidden_TD[local], group=self.group, async_op=True
            )

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: int) -> Tensor:
        """Hidden states `[n, D]` of one chunk, waiting for them the first time."""
        arrival = self._arrivals[index]
        if arrival is not None:
            arrival.wait()
            self._arrivals[index] = None
        return self._hidden_TD[self.bounds[index]]

    def wait(self) -> None:
        """Until every chunk is here, asked for or not."""
        for index in range(len(self)):
            self[index]

    def to_working_order(self, values_T: Tensor) -> Tensor:
        return values_T if self._order_T is None else values_T[self._order_T]

    def to_caller_order(self, values_T: Tensor) -> Tensor:
        if self._order_T is None:
            return values_T
        return torch.empty_like(values_T).index_copy_(0, self._order_T, values_T)


class HiddenGradient:
    """The gradient of the hidden states, summed over the vocabulary group chunk by chunk.

    A backend adds into `chunk(i)` and calls `finish(i)` when no more will come; `result()` is this
    rank's gradient, `[T, D]` or, under sequence parallelism, its slice `[T / ranks, D]`.
    """

    def __init__(
        self,
        chunks: HiddenChunks,
        like_TD: Tensor,
        dtype: torch.dtype,
        reduce_group: dist.ProcessGroup | None,
    ) -> None:
        self._bounds = chunks.bounds
        self._local_bounds = chunks.local_bounds
        self._group = reduce_group
        self._scatter = chunks.group is not None
        width = like_TD.shape[1]
        self._sum_TD = like_TD.new_zeros(chunks.num_tokens, width, dtype=dtype)
        self._own_TD = self._sum_TD
        if self._scatter:
            self._own_TD = like_TD.new_empty(like_TD.shape, dtype=dtype)
        self._dtype = like_TD.dtype
        self._pending: list[dist.Work] = []

    def chunk(self, index: int) -> Tensor:
        return self._sum_TD[self._bounds[index]]

    def finish(self, index: int) -> None:
        """Starts the reduction of one chunk; every rank must finish its chunks in one order."""
        if self._group is None:
            return
        if self._scatter:
            work = dist.reduce_scatter_single(
                self._own_TD[self._local_bounds[index]],
                self.chunk(index),
                group=self._group,
                async_op=True,
            )
        else:
            work = dist.all_reduce(self.chunk(index), group=self._group, async_op=True)
        if work is not None:
            self._pending.append(work)

    def result(self) -> Tensor:
        for work in self._pending:
            work.wait()
        self._pending.clear()
        return self._own_TD.to(self._dtype)
