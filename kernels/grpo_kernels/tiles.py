"""The arithmetic of one tile of logits in plain torch; chunked.py decides which tiles, and when.

Two dtypes run through this file: matrices are multiplied in the product dtype, and everything that
is summed (statistics, gradients) is held in the summation dtype, fp32 or wider.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .shard import ShardHead, ShardTokens, WeightGradient, sum_dtype
from .stats import MAX, SUM, TARGET, WEIGHTED, LogitCoefficients
from .vocab_parallel import HiddenChunks, chunk_bounds

# Elements of the row groups that elementwise passes work on at a time (1 MiB in fp32): small enough
# to stay in cache between passes, large enough that the call of each pass costs little.
ROW_GROUP_ELEMENTS = 1 << 18
# Likewise of products that go into a wider sum, but no fewer rows than products like.
PRODUCT_ELEMENTS, MIN_PRODUCT_ROWS = 1 << 20, 256


class Scratch:
    """Buffers reused across tiles: fresh ones would be faulted in page by page every time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; earlier takes of that name are void."""
        size = math.prod(shape)
        if name not in self._flat or self._flat[name].numel() < size:
            self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        return self._flat[name][:size].view(shape)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one hidden chunk, ready to be multiplied."""

    hidden_TD: Tensor  # in the product dtype
    inv_temperature: float
    inv_temperature_T: Tensor | None
    target_T: Tensor

    @classmethod
    def of(
        cls,
        chunks: HiddenChunks,
        index: int,
        tokens: ShardTokens,
        product: torch.dtype,
        kept_T: Tensor | None = None,
    ) -> "Rows":
        """Chunk `index`, or of its tokens those at the indices `kept_T`."""

        def pick(values: Tensor) -> Tensor:
            return values if kept_T is None else values[kept_T]

        where = chunks.bounds[index]
        scale_T = tokens.inv_temperature_T
        return cls(
            pick(chunks[index]).to(product),
            tokens.inv_temperature,
            None if scale_T is None else pick(scale_T[where]),
            pick(tokens.target_T[where]),
        )

    def __len__(self) -> int:
        return self.hidden_TD.shape[0]

    def columns_in(self, block: slice) -> tuple[Tensor, Tensor]:
        """Column of each target within the block (0 where outside), and whether it is inside."""
        column_T = self.target_T - block.start
        inside_T = (column_T >= 0) & (column_T < block.stop - block.start)
        return column_T.masked_fill_(~inside_T, 0), inside_T


class TileMath:
    """Products and elementwise passes over tiles of one head, with the buffers they share."""

    def __init__(self, head: ShardHead, product: torch.dtype, block_vocab: int) -> None:
        self.head = head
        self.product = product
        self.sum_dtype = sum_dtype(head.weight_VD.dtype)
        self.blocks = chunk_bounds(head.weight_VD.shape[0], block_vocab)
        self.scratch = Scratch(head.weight_VD.device)

    def weight(self, block: slice) -> Tensor:
        """Rows of the weight in the product dtype."""
        weight_VD = self.head.weight_VD[block]
        if weight_VD.dtype == self.product:
            return weight_VD
        return self.scratch.take("weight", weight_VD.shape, self.product).copy_(weight_VD)

    def logits(self, rows: Rows, weight_VD: Tensor, block: slice) -> Tensor:
        """Logits of a tile, scaled by the temperature unless that differs from token to token."""
        tile_TV = self.scratch.take("tile", (len(rows), weight_VD.shape[0]), self.product)
        alpha = rows.inv_temperature
        if self.head.bias_V is None:
            return torch.addmm(
                tile_TV, rows.hidden_TD, weight_VD.t(), beta=0, alpha=alpha, out=tile_TV
            )
        bias_V = self.head.bias_V[block].to(self.product)
        return torch.addmm(
            bias_V, rows.hidden_TD, weight_VD.t(), beta=alpha, alpha=alpha, out=tile_TV
        )

    def row_groups(self, tile_TV: Tensor) -> list[slice]:
        return chunk_bounds(tile_TV.shape[0], max(1, ROW_GROUP_ELEMENTS // tile_TV.shape[1]))

    def _scaled(self, tile_TV: Tensor, rows: Rows, group: slice) -> Tensor:
        """Some rows of the tile in the summation dtype, fully scaled: a view, or a scratch copy."""
        logits_TV = tile_TV[group]
        if self.product != self.sum_dtype:
            wide_TV = self.scratch.take("wide", logits_TV.shape, self.sum_dtype)
            logits_TV = wide_TV.copy_(logits_TV)
        if rows.inv_temperature_T is not None:
            logits_TV.mul_(rows.inv_temperature_T[group, None])
        return logits_TV

    def tile_stats(
        self, tile_TV: Tensor, rows: Rows, block: slice, part_4T: Tensor, with_entropy: bool
    ) -> None:
        """Statistics of a tile of logits into `part_4T`; the tile is used up."""
        column_T, inside_T = rows.columns_in(block)
        for group in self.row_groups(tile_TV):
            logits_TV = self._scaled(tile_TV, rows, group)
            own_T = logits_TV.gather(1, column_T[group, None]).squeeze(1)
            part_4T[TARGET, group] = own_T.masked_fill_(~inside_T[group], 0.0)
            top_T = torch.amax(logits_TV, 1, out=part_4T[MAX, group])
            logits_TV.sub_(top_T[:, None])
            if not with_entropy:
                torch.sum(logits_TV.exp_(), 1, out=part_4T[SUM, group])
                continue
            exp_TV = self.scratch.take("exp", logits_TV.shape, self.sum_dtype)
            torch.exp(logits_TV, out=exp_TV)
            torch.sum(exp_TV, 1, out=part_4T[SUM, group])
            torch.sum(logits_TV.mul_(exp_TV), 1, out=part_4T[WEIGHTED, group])

    def gradient_tile(
        self,
        rows: Rows,
        weight_VD: Tensor,
        block: slice,
        lse_T: Tensor,
        coefficients: LogitCoefficients,
    ) -> Tensor:
        """Gradient of a tile of logits (formula: LogitCoefficients), in the product dtype."""
        tile_TV = self.logits(rows, weight_VD, block)
        column_T, inside_T = rows.columns_in(block)
        own_T = coefficients.target_T.masked_fill(~inside_T, 0.0)
        for group in self.row_groups(tile_TV):
            values_TV = self._scaled(tile_TV, rows, group)
            values_TV.sub_(lse_T[group, None])
            if coefficients.entropy_T is None:
                values_TV.exp_().mul_(coefficients.softmax_T[group, None])
            else:
                prob_TV = self.scratch.take("exp", values_TV.shape, self.sum_dtype)
                torch.exp(values_TV, out=prob_TV)
                values_TV.mul_(coefficients.entropy_T[group, None])
                values_TV.add_(coefficients.softmax_T[group, None]).mul_(prob_TV)
            # Before any narrowing: where p is near 1 the two terms of the target's gradient cancel.
            values_TV.scatter_add_(1, column_T[group, None], own_T[group, None])
            if self.product != self.sum_dtype:
                tile_TV[group].copy_(values_TV)
        return tile_TV

    def set_product(self, sum_XD: Tensor, left_XK: Tensor, right_KD: Tensor) -> None:
        """`sum = left @ right`, with the sum held in the summation dtype."""
        if left_XK.dtype == sum_XD.dtype:
            torch.mm(left_XK, right_KD, out=sum_XD)
            return
        for group in _pieces(len(left_XK), right_KD.shape[1]):
            sum_XD[group].copy_(left_XK[group] @ right_KD)

    def add_product(self, sum_XD: Tensor, left_XK: Tensor, right_KD: Tensor) -> None:
        """`sum += left @ right`, likewise."""
        if left_XK.dtype == sum_XD.dtype:
            torch.addmm(sum_XD, left_XK, right_KD, out=sum_XD)
            return
        for group in _pieces(len(left_XK), right_KD.shape[1]):
            sum_XD[group].add_(left_XK[group] @ right_KD)


def sums_block(
    sink: WeightGradient | None, num_chunks: int, dtype: torch.dtype, product: torch.dtype
) -> bool:
    """Whether a block's weight gradient needs a sum beyond the one product it then is, which rounds
    it to the weight's dtype itself.
    """
    is_added = sink is not None and sink.add_to_buffer
    return is_added or num_chunks > 1 or product != dtype


class BlockGradient:
    """The weight gradient of one vocabulary block while it is being summed over the tokens.

    The sum is held in fp32: in the destination itself where that is fp32, else in a scratch block
    that is rounded once at the end. Where it is one product, `sums` is False: the product rounds.
    """

    def __init__(
        self, sink: WeightGradient | None, block: slice, tile_math: TileMath, *, sums: bool
    ) -> None:
        self._math = tile_math
        self._target_VD = None if sink is None else sink.buffer_VD[block]
        self._add_to_target = sink is not None and sink.add_to_buffer
        self._sum_VD: Tensor | None = None
        self._is_fresh = True
        if self._target_VD is None:
            return
        if not sums or self._target_VD.dtype == tile_math.sum_dtype:
            self._sum_VD = self._target_VD
            self._is_fresh = not self._add_to_target
        else:
            self._sum_VD = tile_math.scratch.take(
                "block", self._target_VD.shape, tile_math.sum_dtype
            )

    def add(self, gradient_TV: Tensor, hidden_TD: Tensor) -> None:
        if self._sum_VD is None:
            return
        put = self._math.set_product if self._is_fresh else self._math.add_product
        put(self._sum_VD, gradient_TV.t(), hidden_TD)
        self._is_fresh = False

    def store(self) -> None:
        """Writes the finished sum to its destination; zeros when no token had a gradient."""
        if self._sum_VD is None or self._target_VD is None:
            return
        if self._is_fresh:
            self._sum_VD.zero_()
        if self._sum_VD is self._target_VD:
            return
        if not self._add_to_target:
            self._target_VD.copy_(self._sum_VD)
            return
        for group in _pieces(*self._sum_VD.shape):  # torch widens what it adds to
            self._target_VD[group].add_(self._sum_VD[group])


def _pieces(rows: int, columns: int) -> list[slice]:
    return chunk_bounds(rows, max(MIN_PRODUCT_ROWS, PRODUCT_ELEMENTS // max(columns, 1)))
