"""What a rank is made of, built in the one order that works."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_grpo.config import MegatronPolicyConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.megatron_folder import Checkpoint
from megatron_grpo.policy.megatron.device import choose_transformer_engine, compute_dtype
from megatron_grpo.policy.megatron.export import BoundParameter, bind_parameters, load_weights
from megatron_grpo.policy.megatron.frozen import FrozenWeights
from megatron_grpo.policy.megatron.mixture import keep_bias_exact
from megatron_grpo.policy.megatron.model import build_chunks, transformer_config
from megatron_grpo.policy.megatron.optimizer import Updater, wrap_chunks
from megatron_grpo.policy.megatron.schedule import Engine
from megatron_grpo.policy.megatron.timers import SpanTimers
from megatron_grpo.spans import SpanRecorder


@dataclass(slots=True)
class Parts:
    """A rank's share of the policy."""

    device: torch.device
    spec: ModelSpec
    source: Checkpoint
    wrapped: list[DistributedDataParallel]
    bound: list[BoundParameter]
    engine: Engine
    updater: Updater
    use_te: bool
    frozen: FrozenWeights | None


def shares_prefixes(parallel: ParallelConfig, use_te: bool) -> bool:
    """Common beginnings are computed once by our own attention, where a rank holds whole sequences
    and micro-batches may differ in length.
    """
    return not use_te and parallel.sequence_multiple == 1 and parallel.virtual_pipeline == 1


def build_parts(
    config: MegatronPolicyConfig,
    source: Checkpoint,
    frozen: Checkpoint | None,
    device: torch.device,
    spans: SpanRecorder,
) -> Parts:
    """Model, weights, gradient buffers and optimizer. Collective; the mesh must stand.

    Raises:
        CheckpointError: `source` or `frozen` is incomplete or not supported.
    """
    spec = source.spec
    use_te = choose_transformer_engine(config.transformer_engine, device)
    dtype = compute_dtype(config.dtype, device)
    megatron_config = transformer_config(spec, config, dtype, use_te)
    megatron_config.timers = SpanTimers(spans, device)  # type: ignore[assignment]
    chunks = build_chunks(spec, megatron_config, use_te)
    for chunk in chunks:
        chunk.to(device=device, dtype=dtype)
        keep_bias_exact(chunk)
    bound = bind_parameters(chunks, spec)
    load_weights(bound, source)
    frozen_weights = None if frozen is None else FrozenWeights(bound, frozen, source)
    wrapped = wrap_chunks(chunks, config)
    engine = Engine(
        chunks,
        wrapped,
        spec,
        device,
        config.overlap_grad_reduce,
        config.overlap_param_gather,
        shares_prefixes(config.parallel, use_te),
        use_te,
    )
    updater = Updater(wrapped, config)
    updater.zero_grad()
    return Parts(device, spec, source, wrapped, bound, engine, updater, use_te, frozen_weights)
