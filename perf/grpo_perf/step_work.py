"""What a real step has to compute and read, counted from its rollouts and packed micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_perf.flops import Flops, forward_flops_of
from grpo_perf.model_shape import Architecture
from megatron_grpo.batch import MicroBatch, TrainBatch
from megatron_grpo.policy.megatron.prefixes import share_prefixes
from megatron_grpo.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class PackedCount:
    """Sums that operations are linear in.

    Attributes:
        tokens: through the layers. pairs: query-key pairs under the causal mask.
        head_tokens: through the output layer: those with a loss.
    """

    tokens: int = 0
    pairs: int = 0
    head_tokens: int = 0

    def __add__(self, other: PackedCount) -> PackedCount:
        return PackedCount(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.head_tokens + other.head_tokens,
        )

    def flops(self, model: Architecture) -> Flops:
        """Of one forward pass."""
        return forward_flops_of(model, self.tokens, self.pairs, self.head_tokens)


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """One batch, counted three ways.

    Attributes:
        needed: every distinct token once: a beginning that rollouts of a micro-batch share counts
            once where the policy computes it once. MFU counts this.
        whole: every rollout from its first token, as if nothing were shared.
        computed: `needed` plus padding and filler.
    """

    needed: PackedCount
    whole: PackedCount
    computed: PackedCount


def training_work(batch: TrainBatch, *, shares_prefixes: bool, equal_length: bool) -> TrainingWork:
    """Count a batch over all its replicas.

    Args:
        shares_prefixes: the policy computes common beginnings once.
        equal_length: the policy lengthens a replica's micro-batches to the longest (virtual
            pipelining).
    """
    needed = whole = computed = PackedCount()
    for replica in batch.replicas:
        longest = max(mb.num_tokens for mb in replica)
        for microbatch in replica:
            one_needed, one_whole, run_tokens = _count(microbatch, shares_prefixes)
            if equal_length:
                run_tokens += longest - microbatch.num_tokens
            needed += one_needed
            whole += one_whole
            computed += PackedCount(run_tokens, one_needed.pairs, one_needed.head_tokens)
    return TrainingWork(needed, whole, computed)


def _count(microbatch: MicroBatch, shares_prefixes: bool) -> tuple[PackedCount, PackedCount, int]:
    """(needed, whole, tokens that run, padding included)."""
    trained = microbatch.mask_T | (microbatch.loss_weight_T != 0)
    head = int(trained.sum())
    lengths = microbatch.sequence_tokens
    real = [index >= 0 for index in microbatch.sequence_ids]
    true = [n for n, is_real in zip(lengths, real, strict=True) if is_real]
    whole = PackedCount(sum(true), sum(causal_pairs(0, n) for n in true), head)
    sharing = None
    if shares_prefixes:
        sharing = share_prefixes(microbatch.token_ids_T, microbatch.cu_seqlens)
    if sharing is None:
        return whole, whole, microbatch.num_tokens
    tokens = pairs = 0
    members = iter(zip(lengths, real, strict=True))
    for family in sharing.families:
        prefix = family.prefix_tokens
        own = [
            n - prefix
            for n, is_real in itertools.islice(members, len(family.own_tokens))
            if is_real
        ]
        if own:
            tokens += prefix + sum(own)
            pairs += causal_pairs(0, prefix) + sum(causal_pairs(prefix, n) for n in own)
    return PackedCount(tokens, pairs, head), whole, len(sharing.source_U)


def causal_pairs(before: int, own: int) -> int:
    """Query-key pairs of `own` tokens after `before` others.

    >>> causal_pairs(0, 3), causal_pairs(10, 2)
    (6, 23)
    """
    return own * before + own * (own + 1) // 2


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """What engines had to do for some rollouts.

    Attributes:
        sampled_tokens: each is the output of one decode step of its sequence.
        prompt_tokens: of all groups, each prompt once (the engine's prefix cache keeps it).
        cache_tokens: cached tokens read, summed over decode steps.
        pairs: query-key pairs, prompts included.
    """

    sampled_tokens: int
    prompt_tokens: int
    cache_tokens: int
    pairs: int

    def flops(self, model: Architecture) -> float:
        """Operations needed; the head counts for sampled tokens only."""
        tokens = self.sampled_tokens + self.prompt_tokens
        return forward_flops_of(model, tokens, self.pairs, self.sampled_tokens).total

    def bytes_read(
        self, model: Architecture, decode_steps: float, weight_bytes: int, cache_bytes: int
    ) -> float:
        """Weights once per decode step and the cache of every live sequence.

        Args:
            weight_bytes, cache_bytes: of one number.
        """
        sequences = self.sampled_tokens / decode_steps if decode_steps else 0.0
        weights = touched_parameters(model, sequences) * weight_bytes
        cache = model.kv_elements_per_token * model.num_layers * cache_bytes
        return decode_steps * weights + self.cache_tokens * cache


def generation_work(groups: Iterable[RolloutGroup]) -> GenerationWork:
    sampled = prompts = cache = pairs = 0
    for group in groups:
        prompt = group.prompt.num_tokens
        prompts += prompt
        pairs += causal_pairs(0, prompt)
        for rollout in group.rollouts:
            after = rollout.num_tokens - rollout.prompt_tokens
            sampled += rollout.num_trained_tokens
            cache += causal_pairs(prompt, after)
            pairs += causal_pairs(prompt, after)
    return GenerationWork(sampled, prompts, cache, pairs)


def touched_parameters(model: Architecture, sequences: float) -> float:
    """Parameters that a decode step of so many sequences reads: all dense ones, and the experts
    that at least one of its tokens is routed to, expected under even routing.
    """
    total = 0.0
    for weight in model.all_weights():
        share = 1.0
        if weight.routed:
            share = 1 - (1 - weight.active / weight.copies) ** max(1.0, sequences)
        total += weight.numel * share
    return total


def lengths_of(groups: Sequence[RolloutGroup]) -> list[int]:
    """Tokens of every response."""
    return [r.num_tokens - r.prompt_tokens for group in groups for r in group.rollouts]
