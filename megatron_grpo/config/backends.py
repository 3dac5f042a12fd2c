"""Who does the work: model, policy, generator, weight exchange, cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_grpo.config.base import (
    GivenPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]
RunningRequests = Literal["finish", "abort", "keep", "keep_cache"]


class ModelConfig(Section):
    """A local Hugging Face folder: config.json, safetensors, tokenizer."""

    path: GivenPath
    """`~` is expanded. Nothing is ever fetched from a hub."""

    @property
    def folder(self) -> Path:
        return self.path.expanduser()


BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class OptimizerConfig(Section):
    """An optimizer with a warm-up and a schedule, counted in optimizer steps."""

    type: Literal["adam", "sgd", "muon"] = "adam"
    """adam: AdamW. sgd: with momentum. muon: orthogonalised momentum on the layers' matrices, AdamW
    on embeddings, head, norms and biases; under Megatron it needs the emerging_optimizers package.
    """
    momentum: BelowOne | None = None
    """Of sgd (null: 0.9) and muon (null: 0.95)."""
    learning_rate: PositiveFloat = 1e-6
    min_learning_rate: NonNegativeFloat = 0.0
    """Where a decaying schedule ends; a constant one ignores it and refuses a value."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """wsd: warm-up, stable, then a linear decay."""
    warmup_steps: NonNegativeInt = 0
    stable_steps: PositiveInt | None = None
    """Steps at the peak between warm-up and decay; of a wsd schedule, and required there."""
    decay_steps: PositiveInt | None = None
    """The step at which min_learning_rate is reached; required unless the schedule is constant."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Applied to matrices only, never to norms and biases; decoupled from the gradient, but for
    sgd."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm; null is off."""

    @property
    def momentum_used(self) -> float:
        """Of sgd and muon; 0 for adam, whose two are beta1 and beta2."""
        if self.momentum is not None:
            return self.momentum
        return {"adam": 0.0, "sgd": 0.9, "muon": 0.95}[self.type]

    @model_validator(mode="after")
    def _check_type(self) -> OptimizerConfig:
        unused = {"adam": ("momentum",), "sgd": ("beta1", "beta2", "eps"), "muon": ()}[self.type]
        for key in unused:
            value = self.model_dump()[key]
            if value != type(self).model_fields[key].default:
                raise ConfigError(
                    key, f"means nothing to {self.type}", found=value, remedy="remove it"
                )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimizerConfig:
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                "min_learning_rate",
                f"is above learning_rate, {self.learning_rate:g}",
                found=self.min_learning_rate,
                remedy="lower it",
            )
        if (self.stable_steps is not None) != (self.schedule == "wsd"):
            raise ConfigError(
                "stable_steps",
                "belongs to a wsd schedule, which needs it",
                found=self.stable_steps,
                remedy="set both or neither",
            )
        if self.schedule == "constant":
            if self.decay_steps is not None or self.min_learning_rate:
                raise ConfigError(
                    "decay_steps",
                    "has no meaning under a constant schedule",
                    found=self.decay_steps,
                    remedy="set schedule to linear, cosine or wsd, or drop both decay_steps and "
                    "min_learning_rate",
                )
            return self
        before = self.warmup_steps + (self.stable_steps or 0)
        if self.decay_steps is None or self.decay_steps <= before:
            raise ConfigError(
                "decay_steps",
                f"a {self.schedule} schedule must decay after the {before} steps of its warm-up"
                + (" and its peak" if self.stable_steps else ""),
                found=self.decay_steps,
                remedy="set decay_steps to the number of steps of the run",
            )
        return self


class MegatronPolicyConfig(Section):
    """A Megatron-Core GPT model on `parallel.world_size` ranks under Ray."""

    type: Literal["megatron"] = "megatron"
    parallel: ParallelConfig = ParallelConfig()
    dtype: DType = "auto"
    """Compute type; parameters and optimizer keep fp32 masters. auto: bfloat16 where the hardware
    multiplies it natively (CUDA, or a CPU with AMX or AVX512-BF16), else float32."""
    microbatch_tokens: PositiveInt = 4096
    """Most packed tokens of one micro-batch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass."""
    transformer_engine: Literal["auto", "on", "off"] = "auto"
    """auto: Transformer Engine layers where it is installed and a GPU is present, else Megatron's
    local ones.
    """
    threads_per_rank: PositiveInt = 1
    """CPU threads of each rank."""

    @model_validator(mode="after")
    def _check(self) -> MegatronPolicyConfig:
        if self.overlap_param_gather and not (
            self.distributed_optimizer and self.overlap_grad_reduce
        ):
            raise ConfigError(
                "overlap_param_gather",
                "needs distributed_optimizer and overlap_grad_reduce",
                remedy="set both to true",
            )
        if self.distributed_optimizer and self.optimizer.type != "adam":
            raise ConfigError(
                "distributed_optimizer",
                f"shards the state of adam only, not of {self.optimizer.type}",
                remedy="set it to false",
            )
        multiple = self.parallel.sequence_multiple
        if self.microbatch_tokens % multiple:
            raise ConfigError(
                "microbatch_tokens",
                f"must be a multiple of {multiple} under this layout",
                found=self.microbatch_tokens,
                remedy=f"use {self.microbatch_tokens // multiple * multiple or multiple}",
            )
        return self


class ReferencePolicyConfig(Section):
    """The Hugging Face model in plain torch, one process: the oracle, and the simplest way to try
    an algorithm.
    """

    type: Literal["reference"] = "reference"
    dtype: DType = "float32"
    microbatch_tokens: PositiveInt = 4096
    optimizer: OptimizerConfig = OptimizerConfig()


class VllmGeneratorConfig(Section):
    """vLLM engines, each a Ray actor of `tensor` workers."""

    type: Literal["vllm"] = "vllm"
    engines: PositiveInt = 1
    tensor: PositiveInt = 1
    expert: bool = False
    """Spread the experts of a mixture whole over an engine's workers instead of cutting each."""
    colocated: bool = False
    """Policy and engines take turns on the same devices: engines sleep while the policy trains. On
    a GPU, lower gpu_memory_fraction to what the policy's weights and optimizer leave."""
    dtype: DType = "auto"
    max_model_tokens: PositiveInt = 1024
    """Prompt plus completion, in tokens."""
    max_concurrent: PositiveInt = 256
    """Most sequences an engine decodes at once."""
    kv_cache_bytes: PositiveInt | None = None
    """Per engine worker; null lets vLLM decide on a GPU, and is 512 MiB on a CPU."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    threads: PositiveInt | None = None
    """CPU threads of an engine; null is the engines' share of the node's cores, and of those the
    policy leaves free where both work at a time (rollouts.max_staleness above 0)."""


class ReferenceGeneratorConfig(Section):
    """A plain sampling loop over the Hugging Face model: exact, slow, one process."""

    type: Literal["reference"] = "reference"
    dtype: DType = "float32"
    max_model_tokens: PositiveInt = 1024
    max_concurrent: PositiveInt = 256


PolicyConfig = Annotated[MegatronPolicyConfig | ReferencePolicyConfig, Field(discriminator="type")]
GeneratorConfig = Annotated[
    VllmGeneratorConfig | ReferenceGeneratorConfig, Field(discriminator="type")
]


class WeightsConfig(Section):
    """How the policy's weights reach the engines."""

    backend: Literal["auto", "gloo", "nccl", "cuda_ipc", "disk"] = "auto"
    """auto: nccl when policy and engines have GPUs of their own, else gloo. cuda_ipc: within the
    memory of one GPU that a policy rank and an engine share. disk: through a folder of the run,
    which all nodes must share; slower, but needs no network between policy and engines, and an
    engine that comes late finds the newest weights there."""
    bucket_bytes: PositiveInt = 64 << 20
    deadline_s: PositiveFloat = 120.0
    """A push that takes longer is an error on both sides."""
    verify: Literal["every", "first", "never"] = "first"
    """Which pushes end with a check that the engines hold, tensor by tensor, what was sent."""
    running_requests: RunningRequests = "finish"
    """What becomes of rollouts being generated when new weights are ready; without
    rollouts.max_staleness there are none. finish: the push waits for them. abort: they are cut off,
    and go on from their last token under the new weights. keep: the weights change under them, and
    their keys and values are computed again. keep_cache: the same without computing again, cheapest
    and least exact.
    """


class ClusterConfig(Section):
    """The Ray cluster: joined when `address` is given, else started on this machine for the run."""

    address: str | None = None
    nodes: PositiveInt = 1
    """Nodes to wait for after joining, up to placement_deadline_s."""
    gpus_per_rank: Annotated[int, Field(ge=0, le=1)] = 0
    """1: each policy rank and engine worker gets a GPU. 0: everything runs on CPUs."""
    nsys_ranks: tuple[NonNegativeInt, ...] = ()
    """Policy ranks that run under Nsight Systems; set by `profile --nsys`."""
    placement_deadline_s: PositiveFloat = 120.0
    start_deadline_s: PositiveFloat = 600.0
    """Longest wait for ranks and engines to load their model."""
    step_deadline_s: PositiveFloat = 3600.0
    """Longest wait for any one phase of a step."""
