"""The whole run as one frozen object, and the only way to make it from files and the command
line.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator
from ruamel.yaml import YAML

from megatron_grpo.config.algorithm import AlgorithmConfig
from megatron_grpo.config.backends import (
    ClusterConfig,
    GeneratorConfig,
    ModelConfig,
    PolicyConfig,
    WeightsConfig,
)
from megatron_grpo.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    apply_overrides,
    parse_scalar,
    read_yaml,
    validate,
)
from megatron_grpo.errors import ConfigError


class SamplingConfig(Section):
    """How completions are drawn in training. Sent in full: a checkpoint's generation_config changes
    nothing.
    """

    temperature: PositiveFloat = 1.0
    """Divides the logits, in the generator and in the trainer alike."""
    max_new_tokens: PositiveInt = 256
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 is off."""

    @model_validator(mode="after")
    def _full_support(self) -> SamplingConfig:
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            key, value = ("top_p", self.top_p) if self.top_p != 1.0 else ("top_k", self.top_k)
            raise ConfigError(
                key,
                "training needs top_p 1.0 and top_k -1: the generator would renormalise over "
                "the kept tokens while "
                "the trainer scores the whole vocabulary, so the importance ratio would be wrong",
                found=value,
                remedy="drop it, and lower temperature if samples are too wild",
            )
        return self


class ReasoningGymTask(Section):
    """A task of the reasoning-gym package by its name, generated on the fly."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """A data set of reasoning-gym, e.g. chain_sum."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    """Its own settings, e.g. {min_terms: 2, max_terms: 2}; unknown ones are refused."""
    rows: PositiveInt = 1000
    """Problems generated before the split; duplicates (same question) are dropped."""
    heldout_rows: PositiveInt = 64
    """Set aside for evaluation; no question of theirs is trained on."""
    seed: NonNegativeInt = 0
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Appended to every question, e.g. an instruction how to answer."""
    reward: str = "megatron_grpo.environments.rewards:last_number"
    """Import path `module:function` of (response: str, answer: str, metadata: str) -> float."""

    @field_validator("parameters", mode="before")
    @classmethod
    def _read_text(cls, parameters: object) -> object:
        """Values from the command line are text; what they mean is the task's business, so YAML
        decides.
        """
        if not isinstance(parameters, dict):
            return parameters
        return {key: parse_scalar(value) for key, value in parameters.items()}


class RolloutsConfig(Section):
    """How much is generated per step and how far it may run ahead."""

    groups_per_step: PositiveInt = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt, at least 2: one alone has no group to compare with."""
    max_staleness: NonNegativeInt = 0
    """How many weight versions old a token may be when it is trained on; 0 is synchronous."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out and counted."""


class EvaluationConfig(Section):
    """Sampled accuracy on held-out problems, before, during and after."""

    every: PositiveInt | None = None
    """Steps between evaluations; null: only before the first and after the last step."""
    samples: PositiveInt = 4
    """Completions per held-out problem; accuracy is the mean over all of them."""


class RunConfig(Section):
    """Everything a run needs. `megatron-grpo train CONFIG a.b=c` overrides any key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    run_dir: Path | None = None
    """Where results go; runs/<name> by default."""
    seed: NonNegativeInt = 1
    steps: PositiveInt
    model: ModelConfig
    task: ReasoningGymTask
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    policy: PolicyConfig
    generator: GeneratorConfig
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        longest = self.rollouts.max_prompt_tokens + self.sampling.max_new_tokens
        limits = [
            ("generator.max_model_tokens", self.generator.max_model_tokens),
            ("policy.microbatch_tokens", self.policy.microbatch_tokens),
        ]
        for key, limit in limits:
            if longest > limit:
                raise ConfigError(
                    key,
                    "the longest rollout (rollouts.max_prompt_tokens "
                    f"{self.rollouts.max_prompt_tokens} + "
                    f"sampling.max_new_tokens {self.sampling.max_new_tokens}) has {longest} tokens",
                    found=limit,
                    remedy=f"set {key} to at least {longest}",
                )
        trainable = self.task.rows - self.task.heldout_rows
        if trainable < self.rollouts.groups_per_step:
            raise ConfigError(
                "task.rows",
                f"leaves {trainable} training problems, fewer than the "
                f"{self.rollouts.groups_per_step} of rollouts.groups_per_step",
                found=self.task.rows,
                remedy="generate more rows or take smaller steps",
            )
        if (self.policy.type == "megatron") != (self.generator.type == "vllm"):
            raise ConfigError(
                "generator.type",
                f"a {self.policy.type} policy cannot feed a {self.generator.type} generator",
                found=self.generator.type,
                remedy="pair megatron with vllm, reference with reference",
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file with its `extends`, apply `dotted.key=value` overrides, validate.

    Raises:
        ConfigError: one line per problem: file, key, value, remedy.
    """
    return validate(RunConfig, apply_overrides(read_yaml(path), list(overrides)), path.name)


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; `load_config` of it gives an equal object."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()
