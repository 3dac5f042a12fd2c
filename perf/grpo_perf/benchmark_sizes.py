"""Sizes at which a run's machine is measured: of its model, and of its planned micro-batches."""

from __future__ import annotations

from grpo_perf.microbenchmark import Sizes
from grpo_perf.model_shape import Architecture
from megatron_grpo.config import RunConfig
from megatron_grpo.devices import resolve_dtype


def benchmark_sizes(config: RunConfig, model: Architecture, *, gpu: bool) -> Sizes:
    """Rollouts are taken to be as long as they may be, and a prompt to be computed once for those
    of its group that a micro-batch holds. Runs on data share nothing.
    """
    budget = config.policy.microbatch_tokens
    rollouts = config.rollouts
    if config.generator is None:
        prefix, members, own = 0, 1, budget
    else:
        own, prefix = config.sampling.max_new_tokens, rollouts.max_prompt_tokens
        members = max(1, min(rollouts.group_size, budget // (prefix + own)))
    whole = members * (prefix + own)
    families = max(1, budget // whole)
    # Where layers have experts and where they do not, in the last one.
    weights = model.layer_weights(model.num_layers - 1)
    return Sizes(
        matrices=tuple((w.shape[0], w.shape[1]) for w in weights if len(w.shape) == 2),
        hidden=model.hidden,
        ffn_hidden=model.ffn_hidden or model.expert_hidden,
        vocab=model.vocab,
        heads=model.num_heads,
        head_dim=model.head_dim,
        tokens=families * (prefix + members * own),
        head_tokens=families * members * own,
        rows=rollouts.groups_per_step * rollouts.group_size,
        prefix=prefix,
        members=members,
        own=own,
        dtype=resolve_dtype(config.policy.dtype, gpu=gpu),
    )
