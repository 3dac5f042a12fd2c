"""The fused log-probability in plain torch, on any device: the readable definition.

The logits are computed in tiles of `[chunk_tokens, chunk_vocab]`, never whole, and again in the
backward pass. The vocabulary is the outer loop: a block's weight gradient is then complete after
one sweep over the tokens, so it is summed in fp32 in a block-sized buffer (or straight in the main
gradient) and never needs an fp32 copy of the whole weight.

Per element of a tile the work beyond the matrix products is a handful of memory passes. They run
over a few rows at a time, small enough to stay in the cache that the product left warm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .shard import GradientSinks, ShardHead, ShardTokens, sum_dtype
from .stats import LogitCoefficients, empty_parts, merge_parts
from .tiles import BlockGradient, Rows, TileMath, sums_block
from .vocab_parallel import HiddenChunks

# Share of the naive logits (T * V * 4 bytes, of which the naive path holds two to three copies)
# that tiles and operand copies may take, and its limits in bytes.
BUDGET_SHARE = 0.025
MIN_BUDGET_BYTES = 4 << 20
MAX_BUDGET_BYTES = 256 << 20

# Matrix products lose speed when a side of the tile falls below about this.
GOOD_TILE_SIDE = 1024
VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Sizes of a tile of logits."""

    tokens: int
    vocab: int


def plan_chunk(
    num_tokens: int, vocab: int, bytes_per_column: int, budget_bytes: int | None = None
) -> Chunk:
    """The largest tile within a memory budget.

    `bytes_per_column` is what one vocabulary row costs beside its tile column (copies of the weight
    row in another dtype). Splitting the vocabulary costs least, so the tokens stay whole until the
    tile would get narrower than a matrix product likes.
    """
    if budget_bytes is None:
        share_bytes = int(BUDGET_SHARE * num_tokens * vocab * 4)
        budget_bytes = min(max(share_bytes, MIN_BUDGET_BYTES), MAX_BUDGET_BYTES)
    tokens = max(num_tokens, 1)
    columns = budget_bytes // (4 * tokens + bytes_per_column)
    if columns < GOOD_TILE_SIDE and tokens > GOOD_TILE_SIDE:
        spare_bytes = budget_bytes - GOOD_TILE_SIDE * bytes_per_column
        tokens = min(max(spare_bytes // (4 * GOOD_TILE_SIDE), GOOD_TILE_SIDE), tokens)
        columns = budget_bytes // (4 * tokens + bytes_per_column)
    columns = max(columns // VOCAB_MULTIPLE, 1) * VOCAB_MULTIPLE
    return Chunk(tokens, min(columns, max(vocab, 1)))


def product_dtype(weight_VD: Tensor) -> torch.dtype:
    """Dtype in which this device multiplies matrices of the weight's dtype fastest.

    A CPU without bf16 or fp16 units emulates such products many times slower than fp32 ones
    (AVX2 EPYC, torch 2.13, 1024 x 1024 x 2048: 55 GFLOP/s in fp32; 0.7 to 19 in bf16 depending on
    which operand is transposed), so there the operands are widened block by block, which also
    makes the products exact.
    """
    dtype = weight_VD.dtype
    if weight_VD.device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    cpu = torch.cpu.get_capabilities()
    units = ("amx_bf16", "avx512_bf16") if dtype == torch.bfloat16 else ("amx_fp16",)
    return dtype if any(name in cpu and cpu[name] for name in units) else torch.float32


@dataclass(frozen=True, slots=True)
class ChunkedBackend:
    """Sizes and dtypes may be forced; None chooses by memory budget and by hardware."""

    tokens: int | None = None
    vocab: int | None = None
    budget_bytes: int | None = None
    product: torch.dtype | None = None

    def _product(self, head: ShardHead) -> torch.dtype:
        return product_dtype(head.weight_VD) if self.product is None else self.product

    def _chunk(self, num_tokens: int, head: ShardHead, *, sums_block: bool = True) -> Chunk:
        """`sums_block`: a block of the weight gradient is held in the summation dtype."""
        num_rows, width = head.weight_VD.shape
        dtype = head.weight_VD.dtype
        bytes_per_column = 0
        if self._product(head) != dtype:
            bytes_per_column += width * 4  # the widened weight row
        if sums_block and sum_dtype(dtype) != dtype:
            bytes_per_column += width * 4  # the fp32 gradient of the weight row
        plan = plan_chunk(num_tokens, num_rows, bytes_per_column, self.budget_bytes)
        return Chunk(self.tokens or plan.tokens, min(self.vocab or plan.vocab, max(num_rows, 1)))

    def _math(self, head: ShardHead, num_tokens: int, *, sums_block: bool) -> TileMath:
        chunk = self._chunk(num_tokens, head, sums_block=sums_block)
        return TileMath(head, self._product(head), chunk.vocab)

    def chunk_tokens(self, num_tokens: int, head: ShardHead) -> int:
        single = self._chunk(num_tokens, head, sums_block=False).tokens
        return single if single >= num_tokens else self._chunk(num_tokens, head).tokens

    def stats(
        self, head: ShardHead, chunks: HiddenChunks, tokens: ShardTokens, with_entropy: bool
    ) -> Tensor:
        math = self._math(head, chunks.num_tokens, sums_block=False)
        num_parts = max(1, len(math.blocks))
        parts_P4T = empty_parts(num_parts, chunks.num_tokens, head.weight_VD, math.sum_dtype)
        rows: list[Rows] = []
        for part, block in enumerate(math.blocks):
            weight_VD = math.weight(block)
            for index, where in enumerate(chunks.bounds):
                if part == 0:  # later, so that the first tile need not wait for the last chunk
                    rows.append(Rows.of(chunks, index, tokens, math.product))
                tile_TV = math.logits(rows[index], weight_VD, block)
                part_4T = parts_P4T[part, :, where]
                math.tile_stats(tile_TV, rows[index], block, part_4T, with_entropy)
        chunks.wait()
        return merge_parts(parts_P4T)

    def gradients(
        self,
        head: ShardHead,
        chunks: HiddenChunks,
        tokens: ShardTokens,
        lse_T: Tensor,
        coefficients: LogitCoefficients,
        sinks: GradientSinks,
    ) -> None:
        dtype = head.weight_VD.dtype
        sums = sums_block(sinks.weight, len(chunks), dtype, self._product(head))
        math = self._math(head, chunks.num_tokens, sums_block=sums)
        sweep_gradients(math, chunks, tokens, lse_T, coefficients, sinks)


def sweep_gradients(
    math: TileMath,
    chunks: HiddenChunks,
    tokens: ShardTokens,
    lse_T: Tensor,
    coefficients: LogitCoefficients,
    sinks: GradientSinks,
) -> None:
    """Every gradient tile by tile: vocabulary blocks outside, hidden chunks inside."""
    work: list[_ChunkGradient] = []
    sums = sums_block(sinks.weight, len(chunks), math.head.weight_VD.dtype, math.product)
    for part, block in enumerate(math.blocks):
        weight_VD = math.weight(block)
        block_gradient = BlockGradient(sinks.weight, block, math, sums=sums)
        for index in range(len(chunks)):
            if part == 0:
                work.append(_ChunkGradient(math, chunks, index, tokens, lse_T, coefficients, sinks))
            work[index].add_block(block, weight_VD, block_gradient)
            if part == len(math.blocks) - 1:
                work[index].finish()
        block_gradient.store()
    chunks.wait()
    if sinks.hidden is not None and not math.blocks:
        for index in range(len(chunks)):
            sinks.hidden.finish(index)


class _ChunkGradient:
    """The gradients of one hidden chunk, block after block.

    Tokens without any upstream gradient (prompts, padding, zero advantages) are left out of every
    product.
    """

    def __init__(
        self,
        math: TileMath,
        chunks: HiddenChunks,
        index: int,
        tokens: ShardTokens,
        lse_T: Tensor,
        coefficients: LogitCoefficients,
        sinks: GradientSinks,
    ) -> None:
        where = chunks.bounds[index]
        nonzero_T = coefficients.at(where).nonzero_T()
        kept_T = None if bool(nonzero_T.all()) else nonzero_T.nonzero().squeeze(1)
        self._math = math
        self._index = index
        self._sinks = sinks
        self._kept_T = kept_T
        self._rows = Rows.of(chunks, index, tokens, math.product, kept_T)
        self._lse_T = lse_T[where] if kept_T is None else lse_T[where][kept_T]
        self._coefficients = coefficients.at(where)
        if kept_T is not None:
            self._coefficients = self._coefficients.at(kept_T)
        self._hidden_sum_TD: Tensor | None = None
        if sinks.hidden is not None:
            whole_TD = sinks.hidden.chunk(index)
            shape = (len(self._rows), whole_TD.shape[1])
            self._hidden_sum_TD = whole_TD if kept_T is None else whole_TD.new_zeros(shape)

    def add_block(self, block: slice, weight_VD: Tensor, block_gradient: BlockGradient) -> None:
        if len(self._rows) == 0:
            return
        math = self._math
        tile_TV = math.gradient_tile(self._rows, weight_VD, block, self._lse_T, self._coefficients)
        if self._hidden_sum_TD is not None:
            math.add_product(self._hidden_sum_TD, tile_TV, weight_VD)
        block_gradient.add(tile_TV, self._rows.hidden_TD)
        if self._sinks.bias_V is not None:
            self._sinks.bias_V[block] += tile_TV.sum(0, dtype=math.sum_dtype)

    def finish(self) -> None:
        """Hands the chunk's hidden gradient over to be reduced."""
        hidden = self._sinks.hidden
        if hidden is None or self._hidden_sum_TD is None:
            return
        if self._kept_T is not None:
            hidden.chunk(self._index).index_copy_(0, self._kept_T, self._hidden_sum_TD)
        hidden.finish(self._index)
