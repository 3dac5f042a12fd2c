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
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; null: as many as the stages between."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage, which has the LM head too; null: as the stages between.
    With a large vocabulary and few stages, fewer than an even share balances the stages."""
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
    def uneven(self) -> bool:
        """Whether a stage is told how many layers it has."""
        return self.first_stage_layers is not None or self.last_stage_layers is not None

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens."""
        zigzag = 2 * self.context if self.context > 1 else 1
        return zigzag * (self.tensor if self.sequence else 1)

    @property
    def microbatch_multiple(self) -> int:
        """Micro-batches per replica must be a multiple of this (interleaved schedule)."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Layers of every pipeline stage, all its chunks together.

        Raises:
            ConfigError: the layers do not come out even.

        >>> ParallelConfig(pipeline=4, first_stage_layers=3, last_stage_layers=2).stage_sizes(13)
        [3, 4, 4, 2]
        """
        ends = [self.first_stage_layers, self.last_stage_layers]
        middle = self.pipeline - sum(size is not None for size in ends)
        left = num_layers - sum(size or 0 for size in ends)
        if middle < 0 or left < 0 or bool(left) != bool(middle) or (middle and left % middle):
            raise ConfigError(
                "parallel.pipeline",
                f"the {middle} stages between cannot share {left} of the model's {num_layers} "
                "layers evenly",
                found=self.pipeline,
                remedy="change first_stage_layers or last_stage_layers",
            )
        sizes = [left // middle if middle else 0] * self.pipeline
        sizes[0] = self.first_stage_layers or sizes[0]
        sizes[-1] = self.last_stage_layers or sizes[-1]
        return sizes

    def stage_layers(self, num_layers: int, stage: int) -> list[range]:
        """Layers of each model chunk of a pipeline stage.

        >>> ParallelConfig(pipeline=2, virtual_pipeline=2, last_stage_layers=2).stage_layers(8, 1)
        [range(3, 4), range(7, 8)]
        """
        sizes = [size // self.virtual_pipeline for size in self.stage_sizes(num_layers)]
        start, round_size = sum(sizes[:stage]), sum(sizes)
        return [
            range(chunk * round_size + start, chunk * round_size + start + sizes[stage])
            for chunk in range(self.virtual_pipeline)
        ]

    def describe(self) -> str:
        """Axes larger than 1, as people write them.

        >>> ParallelConfig(tensor=2, pipeline=2, sequence=True).describe()
        'TP2 PP2 DP1 SP'
        """
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        if self.uneven:
            ends = {"first": self.first_stage_layers, "last": self.last_stage_layers}
            parts[1] += f"({', '.join(f'{name} {n}' for name, n in ends.items() if n)})"
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
        if self.uneven and self.pipeline == 1:
            raise ConfigError(
                "pipeline",
                "first_stage_layers and last_stage_layers need pipeline of 2 or more",
                found=1,
                remedy="set pipeline, or remove them",
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
        rules = [
            ("tensor", self.tensor, "attention heads", model.num_heads),
            ("tensor", self.tensor, "key-value heads", model.num_kv_heads),
            ("tensor", self.tensor, "hidden width", model.hidden),
            ("tensor", self.tensor, "feed-forward width", model.ffn_hidden),
        ]
        if self.uneven:
            rules += [
                ("virtual_pipeline", self.virtual_pipeline, f"layers of stage {stage}", size)
                for stage, size in enumerate(self.stage_sizes(model.num_layers))
            ]
        else:
            chunks = self.pipeline * self.virtual_pipeline
            rules.append(("pipeline * virtual_pipeline", chunks, "layers", model.num_layers))
        if model.num_experts:
            rules += [
                ("expert", self.expert, "experts", model.num_experts),
                ("expert_tensor", expert_tensor, "expert width", model.expert_ffn_hidden),
            ]
        for axis, size, what, count in rules:
            if count % size:
                allowed = [d for d in range(1, count + 1) if count % d == 0][:8]
                also = ", or set last_stage_layers" if what == "layers" else ""
                raise ConfigError(
                    f"parallel.{axis}",
                    f"does not divide the model's {count} {what}",
                    found=size,
                    remedy=f"use a divisor: {', '.join(map(str, allowed))}{also}",
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
