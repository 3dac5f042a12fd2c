"""Triton kernels of the fused log-probability for NVIDIA GPUs.

Forward, one kernel: a program holds a block of tokens and walks over its share of the vocabulary,
keeping the online softmax statistics in registers; the shares are merged by `stats.merge_parts`.

Backward, two kernels per vocabulary block: the first recomputes the logits and stores their
gradient for that block only, in the operand dtype; the second is a matrix product that adds into
an fp32 sum (hidden gradient, weight gradient, or Megatron's main gradient), each output tile owned
by one program: no atomics, so a step can be repeated bit for bit.

Not run on a GPU yet. What is shown without one: results through Triton's interpreter, and that the
configurations below compile for sm_80, sm_90 and sm_100 without spilling registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .stats import EMPTY_MAX

_EMPTY_MAX = tl.constexpr(EMPTY_MAX)


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Tile of a kernel: output rows x columns, depth per step, and how it is scheduled."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class KernelConfigs:
    """One configuration per kernel."""

    stats: KernelConfig
    gradient: KernelConfig
    product: KernelConfig


def configs_for(capability: tuple[int, int], dtype: torch.dtype) -> KernelConfigs:
    """Configurations by compute capability and operand dtype.

    Chosen by resources, not by a measurement (no GPU was at hand): the largest tiles that
    compile without spills and within the shared memory of the architecture
    (tests/kernels/test_linear_logprob_triton_compile.py).
    """
    if dtype == torch.float32:  # exact fp32 products run outside the tensor cores
        exact = KernelConfig(64, 64, 32, 4, 2)
        return KernelConfigs(stats=exact, gradient=exact, product=exact)
    square = KernelConfig(128, 128, 64, 8, 4)
    if capability[0] == 9:
        return KernelConfigs(stats=square, gradient=square, product=square)
    if capability[0] == 10:  # accumulators live in tensor memory, which leaves registers free
        wide = KernelConfig(128, 256, 64, 8, 3)
        return KernelConfigs(stats=wide, gradient=wide, product=square)
    # Ampere; 64 KB of shared memory at most, so that it also fits the smaller parts of any age.
    narrow = KernelConfig(128, 64, 64, 8, 3)
    shallow = KernelConfig(128, 128, 64, 8, 3)
    return KernelConfigs(stats=narrow, gradient=shallow, product=shallow)


def check_device(weight_VD: Tensor) -> None:
    """Raises ValueError where the kernels can run neither on the device nor interpreted."""
    if not weight_VD.is_cuda and not knobs.runtime.interpret:
        raise ValueError(
            f"the Triton kernels need a CUDA device, the weight is on {weight_VD.device}; use"
            " implementation='chunked', or TRITON_INTERPRET=1 to run them on a CPU for debugging"
        )
    if weight_VD.dtype == torch.float64:
        raise ValueError("the Triton kernels sum in fp32; use implementation='chunked' for fp64")


@triton.jit
def _logits_tile(
    hidden_ptr,
    weight_ptr,
    num_rows,
    num_columns,
    width,
    hidden_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Unscaled logits [ROWS, COLUMNS] in fp32 from the tile's first rows on; 0 past the ends.

    Offsets within a tile fit 32 bits; the pointers carry what does not.
    """
    depth_ids = tl.arange(0, DEPTH)
    row_ids = tl.arange(0, ROWS)
    column_ids = tl.arange(0, COLUMNS)
    row_offsets = row_ids[:, None] * hidden_stride + depth_ids[None, :]
    column_offsets = column_ids[None, :] * weight_stride + depth_ids[:, None]
    row_inside = (row_ids < num_rows)[:, None]
    column_inside = (column_ids < num_columns)[None, :]
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        depth_inside = depth_ids < width - start
        hidden_inside = row_inside & depth_inside[None, :]
        weight_inside = column_inside & depth_inside[:, None]
        hidden = tl.load(hidden_ptr + start + row_offsets, mask=hidden_inside, other=0.0)
        weight = tl.load(weight_ptr + start + column_offsets, mask=weight_inside, other=0.0)
        logits = _dot(hidden, weight, logits, PRECISION)
    return logits


@triton.jit
def _dot(left, right, total, PRECISION: tl.constexpr):
    """total + left @ right. "ieee" multiplies in fp32: exactly, for 16-bit operands too."""
    if PRECISION == "ieee":
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _add_bias(logits, bias_ptr, column_ids, end, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column_ids, mask=column_ids < end, other=0.0)
        logits += bias.to(tl.float32)[None, :]
    return logits


@triton.jit
def _online_step(top, total, weighted, logits, column_inside, WITH_ENTROPY: tl.constexpr):
    """Running (max, sum of exp, sum of exp * shifted logit) after one more tile of logits."""
    new_top = tl.maximum(top, tl.max(tl.where(column_inside, logits, _EMPTY_MAX), 1))
    shifted = logits - new_top[:, None]
    exp = tl.where(column_inside, tl.exp(shifted), 0.0)
    drop = top - new_top
    shrink = tl.exp(drop)
    if WITH_ENTROPY:
        weighted = shrink * (weighted + total * drop) + tl.sum(exp * shifted, 1)
    return new_top, total * shrink + tl.sum(exp, 1), weighted


@triton.jit
def stats_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    scale_ptr,
    parts_ptr,
    num_rows,
    num_columns,
    width,
    hidden_stride,
    weight_stride,
    part_stride,
    stat_stride,
    columns_per_part,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Statistics of a block of tokens over one part of the vocabulary.

    Grid (token blocks, parts): neighbours in flight read the same weight rows, from L2.
    """
    first_row = tl.program_id(0) * ROWS
    row_ids = first_row + tl.arange(0, ROWS)
    hidden_ptr += first_row.to(tl.int64) * hidden_stride
    part = tl.program_id(1)
    row_inside = row_ids < num_rows
    scale = tl.load(scale_ptr + row_ids, mask=row_inside, other=1.0)
    target = tl.load(target_ptr + row_ids, mask=row_inside, other=-1)

    top = tl.full((ROWS,), _EMPTY_MAX, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    own = tl.zeros((ROWS,), tl.float32)
    first = part * columns_per_part
    weight_ptr += first.to(tl.int64) * weight_stride
    last = tl.minimum(first + columns_per_part, num_columns)
    for start in range(first, last, COLUMNS):
        column_ids = start + tl.arange(0, COLUMNS)
        logits = _logits_tile(
            hidden_ptr,
            weight_ptr,
            num_rows - first_row,
            last - start,
            width,
            hidden_stride,
            weight_stride,
            ROWS,
            COLUMNS,
            DEPTH,
            PRECISION,
        )
        logits = _add_bias(logits, bias_ptr, column_ids, last, HAS_BIAS) * scale[:, None]
        own += tl.sum(tl.where(column_ids[None, :] == target[:, None], logits, 0.0), 1)
        column_inside = (column_ids < last)[None, :]
        top, total, weighted = _online_step(
            top, total, weighted, logits, column_inside, WITH_ENTROPY
        )
        weight_ptr += COLUMNS * weight_stride

    parts_ptr += part * part_stride + row_ids
    tl.store(parts_ptr, top, mask=row_inside)
    tl.store(parts_ptr + stat_stride, total, mask=row_inside)
    tl.store(parts_ptr + 2 * stat_stride, weighted, mask=row_inside)
    tl.store(parts_ptr + 3 * stat_stride, own, mask=row_inside)


@triton.jit
def gradient_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    scale_ptr,
    lse_ptr,
    softmax_ptr,
    entropy_ptr,
    own_ptr,
    out_ptr,
    first_column,
    num_rows,
    num_columns,
    width,
    hidden_stride,
    weight_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the logits of one vocabulary block (formula: stats.LogitCoefficients).

    `weight_ptr` and `bias_ptr` start at the block; `first_column` is its place in the shard.
    Grid (token blocks, column tiles).
    """
    first_row = tl.program_id(0) * ROWS
    first_tile_column = tl.program_id(1) * COLUMNS
    row_ids = first_row + tl.arange(0, ROWS)
    column_ids = first_tile_column + tl.arange(0, COLUMNS)
    row_inside = row_ids < num_rows
    logits = _logits_tile(
        hidden_ptr + first_row.to(tl.int64) * hidden_stride,
        weight_ptr + first_tile_column.to(tl.int64) * weight_stride,
        num_rows - first_row,
        num_columns - first_tile_column,
        width,
        hidden_stride,
        weight_stride,
        ROWS,
        COLUMNS,
        DEPTH,
        PRECISION,
    )
    logits = _add_bias(logits, bias_ptr, column_ids, num_columns, HAS_BIAS)
    scale = tl.load(scale_ptr + row_ids, mask=row_inside, other=1.0)
    lse = tl.load(lse_ptr + row_ids, mask=row_inside, other=0.0)
    target = tl.load(target_ptr + row_ids, mask=row_inside, other=-1)
    softmax = tl.load(softmax_ptr + row_ids, mask=row_inside, other=0.0)
    own = tl.load(own_ptr + row_ids, mask=row_inside, other=0.0)
    logp = logits * scale[:, None] - lse[:, None]
    factor = softmax[:, None]
    if WITH_ENTROPY:
        entropy = tl.load(entropy_ptr + row_ids, mask=row_inside, other=0.0)
        factor = softmax[:, None] + entropy[:, None] * logp
    is_target = (first_column + column_ids)[None, :] == target[:, None]
    gradient = tl.exp(logp) * factor + tl.where(is_target, own[:, None], 0.0)
    out_ptrs = out_ptr + row_ids.to(tl.int64)[:, None] * out_stride + column_ids[None, :]
    inside = row_inside[:, None] & (column_ids < num_columns)[None, :]
    tl.store(out_ptrs, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    left_ptr,
    right_ptr,
    sum_ptr,
    num_rows,
    num_columns,
    depth,
    left_row_stride,
    left_depth_stride,
    right_stride,
    sum_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sum (+)= left @ right, summed in fp32; left may be a transpose. Grid (rows, columns)."""
    first_row = tl.program_id(0) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    row_ids = tl.arange(0, ROWS)
    column_ids = tl.arange(0, COLUMNS)
    depth_ids = tl.arange(0, DEPTH)
    row_inside = (row_ids < num_rows - first_row)[:, None]
    column_inside = (column_ids < num_columns - first_column)[None, :]
    left_ptr += first_row.to(tl.int64) * left_row_stride
    right_ptr += first_column
    left_offsets = row_ids[:, None] * left_row_stride + depth_ids[None, :] * left_depth_stride
    right_offsets = depth_ids[:, None] * right_stride + column_ids[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        depth_inside = depth_ids < depth - start
        left_inside = row_inside & depth_inside[None, :]
        right_inside = depth_inside[:, None] & column_inside
        left = tl.load(left_ptr + left_offsets, mask=left_inside, other=0.0)
        right = tl.load(right_ptr + right_offsets, mask=right_inside, other=0.0)
        total = _dot(left, right, total, PRECISION)
        left_ptr += left_depth_stride * DEPTH
        right_ptr += right_stride * DEPTH
    sum_ptr += first_row.to(tl.int64) * sum_stride + first_column
    sum_ptrs = sum_ptr + row_ids[:, None] * sum_stride + column_ids[None, :]
    if ADD:
        total += tl.load(sum_ptrs, mask=row_inside & column_inside, other=0.0).to(tl.float32)
    tl.store(sum_ptrs, total.to(sum_ptr.dtype.element_ty), mask=row_inside & column_inside)
