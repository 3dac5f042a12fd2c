"""`linear_logprob`: log-probabilities and entropies of an LM head without its logits."""

import importlib.util
import math
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .autograd import Call, LinearLogprob
from .chunked import ChunkedBackend
from .shard import Backend, sum_dtype
from .vocab_parallel import VocabShard

Implementation = Literal["auto", "chunked", "triton"] | Backend

# Logits up to 1e8 divided by it stay within fp32 and bf16, whose largest number is 3e38.
MIN_TEMPERATURE = 1e-30

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@overload
def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    vocab_size: int | None = ...,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    sequence_parallel: bool = ...,
    with_entropy: Literal[True] = ...,
    main_grad: Tensor | None = ...,
    weight_grad_placeholder: bool = ...,
    implementation: Implementation = ...,
    chunk_tokens: int | None = ...,
    chunk_vocab: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    vocab_size: int | None = ...,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    sequence_parallel: bool = ...,
    with_entropy: bool,
    main_grad: Tensor | None = ...,
    weight_grad_placeholder: bool = ...,
    implementation: Implementation = ...,
    chunk_tokens: int | None = ...,
    chunk_vocab: int | None = ...,
) -> tuple[Tensor, Tensor | None]: ...


def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    with_entropy: bool = True,
    main_grad: Tensor | None = None,
    weight_grad_placeholder: bool = False,
    implementation: Implementation = "auto",
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and entropy, of softmax(logits / temperature).

    The logits are `hidden_TD @ weight_VD.T + bias`. Both results are `[T]` in fp32 (fp64 for fp64
    inputs), in nats, and differentiable in `hidden_TD`, `weight_VD` and `bias`, each with its own
    upstream gradient per token. Logits exist only as tiles, in the forward pass and again in the
    backward pass; double backward is not supported.
    A token whose upstream gradients are exactly zero costs nothing in the backward pass on CPU.

    hidden_TD: `[T, D]`; with `sequence_parallel`, this rank's contiguous `[T / ranks, D]` of the
        tokens. They are gathered chunk by chunk inside, and the gradient is this slice's.
    weight_VD: `[V, D]`, same dtype; with `vocab_group`, this rank's rows of it, equally many on
        every rank, rank r holding ids `r * V ... (r + 1) * V - 1`.
    targets_T: integer `[T]`, ids of the whole vocabulary, all T tokens on every rank.
    temperature: divides the logits; a number, or a `[T]` tensor that needs no gradient.
    vocab_group: the tensor-parallel group. The hidden gradient is summed over it inside, so the
        caller must not reduce it again, and every rank must feed back the same upstream gradients
        (undivided), as a loss computed on every rank does.
    vocab_size: number of real ids. Rows from there on are padding: they never enter the softmax and
        get a gradient of exactly zero.
    bias: `[V]`, or this rank's share of it, same dtype.
    ignore_index: tokens with this target get log-probability 0, constant. Their entropy is that of
        their distribution like any other token's, with its gradient: mask it if it is unwanted.
    with_entropy: False saves about a memory pass over the logits and returns None for the entropy.
        A loss that does not use the entropy costs nothing extra backward either way.
    main_grad: `[V, D]`, usually fp32. The weight gradient is added to it and the autograd gradient
        of the weight is None, so that a tied embedding's own gradient still arrives alone.
    weight_grad_placeholder: with `main_grad`, return zeros instead of None, for hooks that refuse
        an undefined gradient (Megatron with `overlap_grad_reduce` and untied embeddings).
    implementation: "auto" takes the Triton kernels on CUDA devices where they apply; a Backend
        with sizes of its own is taken as it is.
    chunk_tokens, chunk_vocab: force the tile of logits (tests, tuning).

    The weight gradient is summed over tiles in fp32 whatever the dtype, and rounded once if it is
    returned in less. Where tiles are multiplied in bf16, each tile's product is bf16 (its own sum
    is wider). A bias must be finite.

    Raises ValueError for shapes and dtypes that do not fit, a temperature that is not finite or
    below 1e-30, targets outside the vocabulary.

    Example: with logits [2, 1, 0] the log-probabilities are [-0.4076, -1.4076, -2.4076] at
    temperature 1 and [-0.1429, -2.1429, -4.1429] at temperature 0.5.
    """
    ranks = 1 if vocab_group is None else vocab_group.size()
    _check_matrices(hidden_TD, weight_VD, bias, main_grad)
    num_tokens = hidden_TD.shape[0] * (ranks if sequence_parallel else 1)
    if targets_T.shape != (num_tokens,) or targets_T.dtype.is_floating_point:
        raise ValueError(
            f"targets_T must be integers of shape [{num_tokens}] to match hidden_TD"
            f" {list(hidden_TD.shape)} (sequence_parallel={sequence_parallel}, {ranks} ranks);"
            f" got {targets_T.dtype} {list(targets_T.shape)}"
        )
    shard = VocabShard.of(weight_VD.shape[0], vocab_group, vocab_size)
    targets_T = targets_T.to(hidden_TD.device, torch.int64)
    ignored_T = targets_T == ignore_index
    _check_targets(targets_T, ignored_T, shard.vocab_size, ignore_index)
    scale, scale_T = _inv_temperature(temperature, num_tokens, hidden_TD)
    call = Call(
        backend=_backend(implementation, weight_VD, chunk_tokens, chunk_vocab),
        shard=shard,
        targets_T=targets_T,
        ignored_T=ignored_T,
        inv_temperature=scale,
        inv_temperature_T=scale_T,
        sequence_parallel=sequence_parallel,
        with_entropy=with_entropy,
        main_grad_VD=main_grad,
        weight_grad_placeholder=weight_grad_placeholder,
    )
    logprob_T, entropy_T = LinearLogprob.apply(hidden_TD, weight_VD, bias, call)
    return logprob_T, entropy_T if with_entropy else None


def _check_matrices(
    hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, main_grad: Tensor | None
) -> None:
    shapes = f"hidden {list(hidden_TD.shape)}, weight {list(weight_VD.shape)}"
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"linear_logprob needs hidden [T, D] and weight [V, D]; got {shapes}")
    if hidden_TD.dtype != weight_VD.dtype or weight_VD.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"linear_logprob needs hidden and weight in one floating dtype, got {hidden_TD.dtype}"
            f" and {weight_VD.dtype}; cast them to one of {', '.join(map(str, FLOAT_DTYPES))}"
        )
    others = {"hidden": hidden_TD, "bias": bias, "main_grad": main_grad}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != weight_VD.device:
            raise ValueError(
                f"{name} must be on the weight's device {weight_VD.device}; got {tensor.device}"
            )
    if bias is not None and (bias.shape != weight_VD.shape[:1] or bias.dtype != weight_VD.dtype):
        raise ValueError(
            f"bias must be [{weight_VD.shape[0]}] in {weight_VD.dtype} like the weight's rows; got"
            f" {list(bias.shape)} in {bias.dtype}"
        )
    if main_grad is not None and (
        main_grad.shape != weight_VD.shape or not main_grad.is_floating_point()
    ):
        raise ValueError(
            f"main_grad must have the weight's shape {list(weight_VD.shape)} and a floating dtype;"
            f" got {list(main_grad.shape)} in {main_grad.dtype}"
        )


def _check_targets(
    targets_T: Tensor, ignored_T: Tensor, vocab_size: int, ignore_index: int
) -> None:
    bad_T = ((targets_T < 0) | (targets_T >= vocab_size)) & ~ignored_T
    if not bool(bad_T.any()):
        return
    position = int(bad_T.nonzero()[0])
    raise ValueError(
        f"target {int(targets_T[position])} at position {position} is outside the vocabulary of"
        f" {vocab_size} ids ({int(bad_T.sum())} such targets); mark tokens without a target with"
        f" ignore_index={ignore_index}"
    )


def _inv_temperature(
    temperature: float | Tensor, num_tokens: int, hidden_TD: Tensor
) -> tuple[float, Tensor | None]:
    """1 / temperature: a number for all tokens and None, or 1.0 and a `[T]` tensor."""
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE):
            raise ValueError(
                f"temperature must be finite and at least {MIN_TEMPERATURE:g}, below which logits"
                f" divided by it overflow fp32; got {temperature}"
            )
        return 1.0 / temperature, None
    if temperature.requires_grad:
        raise ValueError("temperature needs a gradient, which linear_logprob does not compute")
    if temperature.shape != (num_tokens,):
        raise ValueError(
            f"a temperature tensor must be [{num_tokens}], one per token; got"
            f" {list(temperature.shape)}"
        )
    bad_T = ~(torch.isfinite(temperature) & (temperature >= MIN_TEMPERATURE))
    if bool(bad_T.any()):
        position = int(bad_T.nonzero()[0])
        raise ValueError(
            f"temperature must be finite and at least {MIN_TEMPERATURE:g}; got"
            f" {float(temperature[position])} at position {position}"
        )
    return 1.0, temperature.to(hidden_TD.device, sum_dtype(hidden_TD.dtype)).reciprocal()


def _backend(
    implementation: Implementation,
    weight_VD: Tensor,
    chunk_tokens: int | None,
    chunk_vocab: int | None,
) -> Backend:
    for name, size in (("chunk_tokens", chunk_tokens), ("chunk_vocab", chunk_vocab)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
    if not isinstance(implementation, str):
        return implementation
    if implementation not in ("auto", "chunked", "triton"):
        raise ValueError(f"implementation must be auto, chunked or triton; got {implementation!r}")
    if implementation == "auto":
        suits = weight_VD.is_cuda and weight_VD.dtype != torch.float64
        has_triton = suits and importlib.util.find_spec("triton") is not None
        implementation = "triton" if has_triton else "chunked"
    if implementation == "chunked":
        return ChunkedBackend(chunk_tokens, chunk_vocab)
    from .triton_backend import TritonBackend

    return TritonBackend(chunk_tokens, chunk_vocab)
