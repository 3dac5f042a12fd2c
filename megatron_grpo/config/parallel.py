"""The parallel layout: one type that knows every divisibility rule and says which was broken.

Dense ranks: world = tensor * pipeline * context * data. Expert ranks reuse the same processes:
within one pipeline stage, tensor * context * data ranks are regrouped as expert_tensor * expert *
expert_data.
"""

from __future__ import annotations

from pydantic import model_validator

from megatron_grpo.config.base import PositiveInt, Section
from megatron_grpo.errors import ConfigError


class ModelShape(Section):
    """The numbers of a model that a layout must divide. Read from the checkpoint's own config."""

    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    hidden: PositiveInt
    ffn_hidden: PositiveInt
    vocab: PositiveInt
    num_experts: int = 0
    expert_ffn_hidden: int = 0
    """Width of one expert; of a dense model 0."""


class ParallelConfig(Section):
    """Sizes of the mesh axes. `data` is the number of replicas of the whole model."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline rank; 1 is off."""
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None
    """Tensor split of the experts; by default the same as `tensor`."""
    data: PositiveInt = 1
    sequence: bool = False
    """Sequence parallel: split activations over the tensor group between the matrix products."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens."""
        zigzag = 2 * self.context if self.context > 1 else 1
        return zigzag * (self.tensor if self.sequence else 1)

    @property
    def microbatch_multiple(self) -> int:
        """Micro-batches per replica must be a multiple of this (interleaved schedule)."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def describe(self) -> str:
        """Axes larger than 1, as people write them.

        >>> ParallelConfig(tensor=2, pipeline=2, sequence=True).describe()
        'TP2 PP2 DP1 SP'
        """
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        optional = [("VPP", self.virtual_pipeline), ("CP", self.context), ("EP", self.expert)]
        parts += [f"{name}{size}" for name, size in optional if size > 1]
        if self.expert_tensor not in (None, self.tensor):
            parts.append(f"ETP{self.expert_tensor}")
        parts.append(f"DP{self.data}")
        return " ".join(parts + (["SP"] if self.sequence else []))

    @model_validator(mode="after")
    def _check_axes(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "sequence",
                "sequence parallel needs a tensor group",
                found="tensor 1",
                remedy="set tensor to 2 or more, or sequence to false",
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                "virtual_pipeline",
                "needs pipeline of 2 or more",
                found=self.virtual_pipeline,
                remedy="set virtual_pipeline to 1",
            )
        expert_tensor = self.expert_tensor or self.tensor
        stage = self.tensor * self.context * self.data
        if stage % (expert_tensor * self.expert):
            raise ConfigError(
                "expert",
                f"expert * expert_tensor = {expert_tensor * self.expert} does not divide the "
                f"{stage} ranks of a pipeline stage (tensor * context * data)",
                found=self.expert,
                remedy="raise data, or lower expert",
            )
        return self

    def check_model(self, model: ModelShape) -> None:
        """Raise ConfigError for the first rule this layout breaks on `model`."""
        expert_tensor = self.expert_tensor or self.tensor
        chunks = self.pipeline * self.virtual_pipeline
        rules = [
            ("tensor", self.tensor, "attention heads", model.num_heads),
            ("tensor", self.tensor, "key-value heads", model.num_kv_heads),
            ("tensor", self.tensor, "hidden width", model.hidden),
            ("tensor", self.tensor, "feed-forward width", model.ffn_hidden),
            ("pipeline * virtual_pipeline", chunks, "layers", model.num_layers),
        ]
        if model.num_experts:
            rules += [
                ("expert", self.expert, "experts", model.num_experts),
                ("expert_tensor", expert_tensor, "expert width", model.expert_ffn_hidden),
            ]
        for axis, size, what, count in rules:
            if count % size:
                allowed = [d for d in range(1, count + 1) if count % d == 0][:8]
                raise ConfigError(
                    f"parallel.{axis}",
                    f"does not divide the model's {count} {what}",
                    found=size,
                    remedy=f"use a divisor: {', '.join(map(str, allowed))}",
                )
        if model.num_experts and self.tensor > 1 and not self.sequence:
            raise ConfigError(
                "parallel.sequence",
                "must be true for a model with experts that is tensor parallel",
                found=False,
                remedy="set it to true, or tensor to 1",
            )
        if self.expert > 1 and not model.num_experts:
            raise ConfigError(
                "parallel.expert",
                "the model has no experts",
                found=self.expert,
                remedy="set expert to 1",
            )
