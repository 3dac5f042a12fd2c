"""Launches the Triton kernels on one vocabulary shard; the order of work is that of chunked.py."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chunked import Chunk, plan_chunk, sweep_gradients
from .shard import GradientSinks, ShardHead, ShardTokens
from .stats import LogitCoefficients, empty_parts, merge_parts
from .tiles import Rows, TileMath
from .triton_kernels import (
    KernelConfig,
    KernelConfigs,
    check_device,
    configs_for,
    gradient_kernel,
    product_kernel,
    stats_kernel,
)
from .vocab_parallel import HiddenChunks

# Programs of the statistics kernel per multiprocessor; above 1 so that a short last wave costs
# less.
WAVES = 4


def _cdiv(size: int, block: int) -> int:
    return -(-size // block)


def _precision(matrix: Tensor) -> str:
    """fp32 operands are multiplied exactly, never rounded to tf32.

    So are all operands off the GPU: the interpreter keeps bf16 as integers, and would multiply
    those.
    """
    return "ieee" if matrix.dtype == torch.float32 or not matrix.is_cuda else "tf32"


def _tile_kwargs(config: KernelConfig, operand: Tensor) -> dict[str, int | str]:
    return {
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "PRECISION": _precision(operand),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _launch(kernel: Any, grid: tuple[int, int], *args: Any, **kwargs: Any) -> None:
    """Runs one kernel; untyped because triton's stubs want its own wrapper for every constant."""
    kernel[grid](*args, **kwargs)


def _scale_T(rows: Rows) -> Tensor:
    if rows.inv_temperature_T is not None:
        return rows.inv_temperature_T
    shape = (len(rows),)
    return torch.full(shape, rows.inv_temperature, dtype=torch.float32, device=rows.target_T.device)


class TritonMath(TileMath):
    """Gradient tiles and products by Triton kernels."""

    def __init__(self, head: ShardHead, block_vocab: int, configs: KernelConfigs) -> None:
        super().__init__(head, head.weight_VD.dtype, block_vocab)
        self.configs = configs

    def part_stats(self, rows: Rows, parts_P4T: Tensor, with_entropy: bool) -> None:
        """Statistics of the whole shard, its vocabulary cut into as many parts as given."""
        if len(rows) == 0:
            return
        weight_VD, bias_V = self.head.weight_VD, self.head.bias_V
        config = self.configs.stats
        num_parts = parts_P4T.shape[0]
        num_columns, width = weight_VD.shape
        columns_per_part = _cdiv(_cdiv(num_columns, config.columns), num_parts) * config.columns
        grid = (_cdiv(len(rows), config.rows), num_parts)
        _launch(
            stats_kernel,
            grid,
            rows.hidden_TD,
            weight_VD,
            weight_VD if bias_V is None else bias_V,
            rows.target_T,
            _scale_T(rows),
            parts_P4T,
            len(rows),
            num_columns,
            width,
            rows.hidden_TD.stride(0),
            weight_VD.stride(0),
            parts_P4T.stride(0),
            parts_P4T.stride(1),
            columns_per_part,
            HAS_BIAS=bias_V is not None,
            WITH_ENTROPY=with_entropy,
            **_tile_kwargs(config, weight_VD),
        )

    def gradient_tile(
        self,
        rows: Rows,
        weight_VD: Tensor,
        block: slice,
        lse_T: Tensor,
        coefficients: LogitCoefficients,
    ) -> Tensor:
        bias_V = None if self.head.bias_V is None else self.head.bias_V[block]
        num_columns, width = weight_VD.shape
        tile_TV = self.scratch.take("tile", (len(rows), num_columns), self.product)
        config = self.configs.gradient
        entropy_T = coefficients.entropy_T
        grid = (_cdiv(len(rows), config.rows), _cdiv(num_columns, config.columns))
        _launch(
            gradient_kernel,
            grid,
            rows.hidden_TD,
            weight_VD,
            weight_VD if bias_V is None else bias_V,
            rows.target_T,
            _scale_T(rows),
            lse_T,
            coefficients.softmax_T,
            coefficients.softmax_T if entropy_T is None else entropy_T,
            coefficients.target_T,
            tile_TV,
            block.start,
            len(rows),
            num_columns,
            width,
            rows.hidden_TD.stride(0),
            weight_VD.stride(0),
            tile_TV.stride(0),
            HAS_BIAS=bias_V is not None,
            WITH_ENTROPY=entropy_T is not None,
            **_tile_kwargs(config, weight_VD),
        )
        return tile_TV

    def set_product(self, sum_XD: Tensor, left_XK: Tensor, right_KD: Tensor) -> None:
        self._product_into(sum_XD, left_XK, right_KD, add=False)

    def add_product(self, sum_XD: Tensor, left_XK: Tensor, right_KD: Tensor) -> None:
        self._product_into(sum_XD, left_XK, right_KD, add=True)

    def _product_into(
        self, sum_XD: Tensor, left_XK: Tensor, right_KD: Tensor, *, add: bool
    ) -> None:
        config = self.configs.product
        num_rows, depth = left_XK.shape
        num_columns = right_KD.shape[1]
        grid = (_cdiv(num_rows, config.rows), _cdiv(num_columns, config.columns))
        _launch(
            product_kernel,
            grid,
            left_XK,
            right_KD,
            sum_XD,
            num_rows,
            num_columns,
            depth,
            left_XK.stride(0),
            left_XK.stride(1),
            right_KD.stride(0),
            sum_XD.stride(0),
            ADD=add,
            **_tile_kwargs(config, left_XK),
        )


def _unit_stride(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where neighbours in a row are not neighbours in memory."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Sizes and configurations may be forced; None chooses by device and memory budget."""

    tokens: int | None = None
    vocab: int | None = None
    parts: int | None = None
    configs: KernelConfigs | None = None

    def _chunk(self, num_tokens: int, head: ShardHead) -> Chunk:
        num_rows, width = head.weight_VD.shape
        plan = plan_chunk(num_tokens, num_rows, width * 4)
        return Chunk(self.tokens or plan.tokens, min(self.vocab or plan.vocab, max(num_rows, 1)))

    def _math(self, head: ShardHead, num_tokens: int) -> TritonMath:
        check_device(head.weight_VD)
        configs = self.configs
        if configs is None:
            capability = torch.cuda.get_device_capability(head.weight_VD.device)
            configs = configs_for(capability, head.weight_VD.dtype)
        head = ShardHead(_unit_stride(head.weight_VD), head.bias_V)
        return TritonMath(head, self._chunk(num_tokens, head).vocab, configs)

    def _num_parts(self, num_tokens: int, math: TritonMath) -> int:
        """Enough parts of the vocabulary to fill the device with few tokens, none of them empty."""
        config = math.configs.stats
        num_tiles = _cdiv(math.head.weight_VD.shape[0], config.columns)
        wanted = self.parts
        if wanted is None:
            device = math.head.weight_VD.device
            programs = WAVES * torch.cuda.get_device_properties(device).multi_processor_count
            wanted = _cdiv(programs, max(1, _cdiv(num_tokens, config.rows)))
        tiles_per_part = _cdiv(num_tiles, max(1, min(wanted, num_tiles)))
        return max(1, _cdiv(num_tiles, max(1, tiles_per_part)))

    def chunk_tokens(self, num_tokens: int, head: ShardHead) -> int:
        return self._chunk(num_tokens, head).tokens

    def stats(
        self, head: ShardHead, chunks: HiddenChunks, tokens: ShardTokens, with_entropy: bool
    ) -> Tensor:
        math = self._math(head, chunks.num_tokens)
        num_parts = self._num_parts(chunks.num_tokens, math)
        parts_P4T = empty_parts(num_parts, chunks.num_tokens, head.weight_VD, math.sum_dtype)
        if math.head.weight_VD.shape[0] > 0:
            for index, where in enumerate(chunks.bounds):
                rows = Rows.of(chunks, index, tokens, math.product)
                math.part_stats(rows, parts_P4T[:, :, where], with_entropy)
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
        math = self._math(head, chunks.num_tokens)
        sweep_gradients(math, chunks, tokens, lse_T, coefficients, sinks)
