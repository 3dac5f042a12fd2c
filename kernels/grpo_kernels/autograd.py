"""The autograd node of the fused log-probability: what is joined, saved and returned."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shard import Backend, GradientSinks, ShardHead, ShardTokens, WeightGradient, sum_dtype
from .stats import LogitCoefficients, TokenScores
from .vocab_parallel import HiddenChunks, HiddenGradient, VocabShard

# Over a group the tokens come in at least this many chunks, so that the collective of one hides
# behind the work on another, unless chunks would get too small for a good matrix product.
MIN_COLLECTIVES = 4
MIN_COLLECTIVE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: everything but the differentiable inputs."""

    backend: Backend
    shard: VocabShard
    targets_T: Tensor  # int64, in the caller's order, valid ids or ignore_index
    ignored_T: Tensor
    inv_temperature: float
    inv_temperature_T: Tensor | None
    sequence_parallel: bool
    with_entropy: bool
    main_grad_VD: Tensor | None
    weight_grad_placeholder: bool

    def head(self, weight_VD: Tensor, bias_V: Tensor | None) -> ShardHead:
        rows = slice(0, self.shard.num_ids)
        return ShardHead(weight_VD[rows], None if bias_V is None else bias_V[rows])

    def chunks(self, hidden_TD: Tensor, weight_VD: Tensor) -> HiddenChunks:
        num_tokens = self.targets_T.shape[0]
        # Planned for all rows of the shard: ranks must cut the tokens alike, and the number of
        # real ids differs between them.
        chunk_tokens = self.backend.chunk_tokens(num_tokens, ShardHead(weight_VD, None))
        if self.shard.group is not None:
            overlapped = max(-(-num_tokens // MIN_COLLECTIVES), MIN_COLLECTIVE_TOKENS)
            chunk_tokens = min(chunk_tokens, overlapped)
        group = self.shard.group if self.sequence_parallel else None
        return HiddenChunks(hidden_TD, chunk_tokens, group)

    def tokens(self, chunks: HiddenChunks) -> ShardTokens:
        target_T = self.shard.local_targets(self.targets_T).masked_fill_(self.ignored_T, -1)
        scale_T = self.inv_temperature_T
        return ShardTokens(
            chunks.to_working_order(target_T),
            self.inv_temperature,
            None if scale_T is None else chunks.to_working_order(scale_T),
        )

    def coefficients(
        self,
        chunks: HiddenChunks,
        logprob_grad_T: Tensor | None,
        entropy_grad_T: Tensor | None,
        entropy_T: Tensor,
    ) -> LogitCoefficients:
        scale_T = self.inv_temperature_T
        if scale_T is None:
            scale_T = torch.full_like(entropy_T, self.inv_temperature)
        order = chunks.to_working_order
        return LogitCoefficients.from_upstream(
            None if logprob_grad_T is None else order(logprob_grad_T),
            None if entropy_grad_T is None else order(entropy_grad_T),
            order(entropy_T),
            order(self.ignored_T),
            order(scale_T),
        )


class LinearLogprob(torch.autograd.Function):
    """(hidden, weight, bias, call) -> logprob `[T]`, entropy `[T]`, in the caller's token order."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        head = call.head(weight_VD, bias_V)
        chunks = call.chunks(hidden_TD, weight_VD)
        tokens = call.tokens(chunks)
        own_4T = call.backend.stats(head, chunks, tokens, call.with_entropy)
        scores = TokenScores.from_stats(call.shard.join(own_4T))
        logprob_T = chunks.to_caller_order(scores.logprob_T).masked_fill(call.ignored_T, 0.0)
        lse_T = chunks.to_caller_order(scores.lse_T)
        entropy_T = chunks.to_caller_order(scores.entropy_T)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, lse_T, entropy_T)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if not call.with_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only under create_graph; the result would look constant
            raise RuntimeError("linear_logprob has no second derivative; drop create_graph=True")
        logprob_grad_T, entropy_grad_T = grad_outputs
        if logprob_grad_T is None and entropy_grad_T is None:
            return None, None, None, None
        hidden_TD, weight_VD, bias_V, lse_T, entropy_T = ctx.saved_tensors
        call: Call = ctx.call
        head = call.head(weight_VD, bias_V)
        chunks = call.chunks(hidden_TD, weight_VD)
        grads = _Gradients(call, hidden_TD, weight_VD, bias_V, ctx.needs_input_grad, chunks)
        call.backend.gradients(
            head,
            chunks,
            call.tokens(chunks),
            chunks.to_working_order(lse_T),
            call.coefficients(chunks, logprob_grad_T, entropy_grad_T, entropy_T),
            grads.sinks(),
        )
        return *grads.results(), None


class _Gradients:
    """The gradient tensors of one backward pass, allocated for whoever asked."""

    def __init__(
        self,
        call: Call,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        needs: tuple[bool, ...],
        chunks: HiddenChunks,
    ) -> None:
        needs_hidden, needs_weight, needs_bias = needs[:3]
        dtype = sum_dtype(weight_VD.dtype)
        self._call = call
        self._num_ids = call.shard.num_ids
        self._bias_V = bias_V
        self._hidden: HiddenGradient | None = None
        self._weight_VD: Tensor | None = None
        self._bias_sum_V: Tensor | None = None
        self._needs_weight = needs_weight
        if needs_hidden:
            self._hidden = HiddenGradient(chunks, hidden_TD, dtype, call.shard.group)
        if needs_weight and call.main_grad_VD is None:
            self._weight_VD = torch.empty_like(weight_VD)
            self._weight_VD[self._num_ids :].zero_()
        elif needs_weight and call.weight_grad_placeholder:
            self._weight_VD = torch.zeros_like(weight_VD)
        if needs_bias and bias_V is not None:
            self._bias_sum_V = torch.zeros_like(bias_V, dtype=dtype)

    def sinks(self) -> GradientSinks:
        rows = slice(0, self._num_ids)
        weight: WeightGradient | None = None
        if self._needs_weight and self._call.main_grad_VD is not None:
            weight = WeightGradient(self._call.main_grad_VD[rows], add_to_buffer=True)
        elif self._weight_VD is not None:
            weight = WeightGradient(self._weight_VD[rows], add_to_buffer=False)
        bias_V = None if self._bias_sum_V is None else self._bias_sum_V[rows]
        return GradientSinks(self._hidden, weight, bias_V)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        bias_V = self._bias_sum_V
        if bias_V is not None and self._bias_V is not None:
            bias_V = bias_V.to(self._bias_V.dtype)
        return None if self._hidden is None else self._hidden.result(), self._weight_VD, bias_V
