"""The whole run as one frozen object, and the only way to make it from files and the command
line.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, model_validator
from ruamel.yaml import YAML

from megatron_grpo.config.algorithm import (
    AlgorithmConfig,
    GrpoConfig,
    SftConfig,
    without_choices,
)
from megatron_grpo.config.backends import (
    ClusterConfig,
    GeneratorConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceGeneratorConfig,
    VllmGeneratorConfig,
    WeightsConfig,
)
from megatron_grpo.config.base import (
    GivenPath,
    NonNegativeInt,
    PositiveInt,
    Section,
    Value,
    apply_overrides,
    merge,
    read_layers,
    validate,
)
from megatron_grpo.config.checkpoint import CheckpointConfig, carried, check_best
from megatron_grpo.config.data import ProblemTask
from megatron_grpo.config.needs import made_idle, without_idle_keys
from megatron_grpo.config.rollouts import EvaluationConfig, RolloutsConfig, SamplingConfig
from megatron_grpo.config.seats import check_seats
from megatron_grpo.config.stages import REFERENCE_FOLDER, Stage, StagePlace
from megatron_grpo.config.tasks import TASKS_OF, DataTask, ReasoningGymTask, TaskConfig
from megatron_grpo.errors import ConfigError


class RunConfig(Section):
    """Everything a run needs. `megatron-grpo train CONFIG a.b=c` overrides any key."""

    name: Annotated[str, Field(pattern=r"^[._-]*[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Of the run's folder, so `.` and `..` are none."""
    run_dir: GivenPath | None = None
    """Where results go; runs/<name> by default."""
    seed: NonNegativeInt = 1
    steps: PositiveInt
    model: ModelConfig
    task: TaskConfig
    algorithm: AlgorithmConfig = GrpoConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    policy: PolicyConfig
    generator: GeneratorConfig | None = None
    """Required to sample (grpo); absent when training on data (sft, dpo)."""
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    stages: list[Stage] = Field(default_factory=list)
    """Parts of the run under settings of their own, one after the other; docs/deepscaler.md."""
    stage: StagePlace | None = None
    """Which of them a resolved config is; the run writes it."""

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name

    @property
    def engines(self) -> VllmGeneratorConfig | ReferenceGeneratorConfig:
        """The generator of a run that has one."""
        if self.generator is None:
            raise ConfigError("generator", "is required", remedy="add it to the config")
        return self.generator

    @property
    def reference_folder(self) -> Path | None:
        """Of the frozen model, if the algorithm compares with one."""
        if isinstance(self.algorithm, SftConfig) or not self.algorithm.needs_reference:
            return None
        path = self.algorithm.reference_path
        return self.model.folder if path is None else path.expanduser()

    def stage_configs(self) -> list[RunConfig]:
        """What is trained, stage by stage: configs of the same run whose `steps` are those at the
        stage's end. The run itself where it has no stages.
        """
        if not self.stages:
            return [self]
        base, after = self.model_dump(mode="json"), 0
        configs: list[RunConfig] = []
        for stage in self.stages:
            stage.check_place(first=not configs)
            changes = written = {k: v for k, v in stage.changes().items() if v}
            if stage.renew_reference and self.algorithm.type != "sft":
                frozen = str(self.folder / REFERENCE_FOLDER / stage.name)
                changes = merge(changes, {"algorithm": {"reference_path": frozen}})
            before = base
            if "preset" in stage.algorithm:
                before = {**base, "algorithm": without_choices(base["algorithm"])}
            values = merge(before, changes)
            place = stage.place(after, self.steps)
            after += stage.steps
            values |= {"steps": after, "stages": [], "stage": place}
            configs.append(validate(RunConfig, values, f"stage {stage.name}", [{}, written]))
            stage.check_reference(compares=configs[-1].reference_folder is not None)
            self._check_carried_over(configs[-1], stage.name)
        return configs

    def _check_carried_over(self, stage: RunConfig, name: str) -> None:
        """Model and optimizer state go from stage to stage, so they must mean the same in each."""
        for key, (before, now) in carried(self, stage).items():
            if before != now:
                raise ConfigError(
                    f"stage {name}: {key}",
                    f"must stay {before}: its state is carried over",
                    found=now,
                    remedy="start another run from this one's model instead",
                )

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> RunConfig:
        layers = (info.context or {}).get("layers", [{}, self.model_dump()])
        config, stages = self, [self]
        if self.stage is None:
            evaluated_once = not self.stages and self.evaluation.every is None
            check_best(self.checkpoint, self.algorithm.type, evaluated_once=evaluated_once)
        if self.stages:
            self._check_total()
            live = [one.without(made_idle(one.changes(), self, layers)) for one in self.stages]
            config = self.model_copy(update={"stages": live})
            stages = config.stage_configs()
        else:
            self._check_warmup()
        self._check_parts()
        return without_idle_keys(config, stages, layers)

    def _check_total(self) -> None:
        total = sum(stage.steps for stage in self.stages)
        if total != self.steps:
            raise ConfigError(
                "steps",
                f"is not the sum of its stages, {total}",
                found=self.steps,
                remedy=f"set it to {total}",
            )
        names = [stage.name for stage in self.stages]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                "stages", "have a name twice", found=twice, remedy="give each its own"
            )
        if self.stage is not None:
            raise ConfigError("stage", "is written by the run itself", remedy="remove it")

    def _check_warmup(self) -> None:
        """A rate that never gets where it was meant to trains next to nothing."""
        steps = self.steps if self.stage is None else self.stage.of
        if self.stage is not None and self.stage.reset_optimizer:
            steps -= self.stage.after
        if isinstance(self.algorithm, GrpoConfig):
            steps *= self.algorithm.updates_per_step
        warmup = self.policy.optimizer.warmup_steps
        if warmup > steps:
            raise ConfigError(
                "policy.optimizer.warmup_steps",
                f"is longer than the {steps} optimizer steps, so learning_rate is never reached",
                found=warmup,
                remedy=f"set it to at most {steps} (0 for a short try), or raise steps",
            )

    def _check_parts(self) -> None:
        wanted = TASKS_OF[self.algorithm.type]
        if self.task.type not in wanted:
            raise ConfigError(
                "task.type",
                f"algorithm {self.algorithm.type} trains on {' or '.join(wanted)}",
                found=self.task.type,
                remedy=f"set it to {wanted[0]}, or change algorithm.type",
            )
        if (
            self.reference_folder is not None
            and self.policy.type == "megatron"
            and self.policy.overlap_param_gather
        ):
            raise ConfigError(
                "policy.overlap_param_gather",
                "would gather the policy's weights over those of the frozen reference model, which "
                f"{'DPO' if self.algorithm.type == 'dpo' else 'the KL term'} scores with",
                found=True,
                remedy="set it to false",
            )
        if isinstance(self.task, DataTask):
            self._check_data(self.task)
        else:
            self._check_sampled(self.task)
            if isinstance(self.generator, VllmGeneratorConfig):
                check_seats(
                    self.policy,
                    self.generator,
                    self.cluster,
                    self.weights,
                    self.rollouts.max_staleness,
                )

    def _check_sampled(self, task: ReasoningGymTask | ProblemTask) -> None:
        sampled = ("sampling.max_new_tokens", self.sampling.max_new_tokens)
        evaluated = ("evaluation.max_new_tokens", self.evaluation.max_new_tokens or 0)
        limits = [
            ("generator.max_model_tokens", self.engines.max_model_tokens, sampled),
            ("generator.max_model_tokens", self.engines.max_model_tokens, evaluated),
            ("policy.microbatch_tokens", self.policy.microbatch_tokens, sampled),
        ]
        for key, limit, (budget_key, budget) in limits:
            longest = self.rollouts.max_prompt_tokens + budget
            if longest > limit:
                raise ConfigError(
                    key,
                    "the longest rollout (rollouts.max_prompt_tokens "
                    f"{self.rollouts.max_prompt_tokens} + "
                    f"{budget_key} {budget}) has {longest} tokens",
                    found=limit,
                    remedy=f"set {key} to at least {longest}",
                )
        if isinstance(task, ReasoningGymTask):
            self._check_rows(task)
        if (self.policy.type == "megatron") != (self.engines.type == "vllm"):
            raise ConfigError(
                "generator.type",
                f"a {self.policy.type} policy cannot feed a {self.engines.type} generator",
                found=self.engines.type,
                remedy="pair megatron with vllm, reference with reference",
            )
        self._check_ahead()

    def _check_ahead(self) -> None:
        """Generating ahead, what is made of slow or useless groups, and of a step's groups."""
        if isinstance(self.algorithm, GrpoConfig):
            parts = self.algorithm.updates_per_step
            if self.rollouts.groups_per_step % parts:
                raise ConfigError(
                    "algorithm.updates_per_step",
                    f"must divide rollouts.groups_per_step ({self.rollouts.groups_per_step})",
                    found=parts,
                    remedy="change either",
                )
        rollouts, rule = self.rollouts, self.weights.running_requests
        if rollouts.max_staleness == 0 and rule != "finish":
            raise ConfigError(
                "weights.running_requests",
                "has nothing to act on under rollouts.max_staleness 0, where nothing is generated "
                "while weights change",
                found=rule,
                remedy="set rollouts.max_staleness to 1 or more, or this to finish",
            )
        if rollouts.max_staleness > 0 and rollouts.oversample > 1 and rule == "finish":
            raise ConfigError(
                "rollouts.oversample",
                "gains nothing if every push waits for the slowest rollout",
                found=rollouts.oversample,
                remedy="set weights.running_requests to abort or keep, or rollouts.max_staleness "
                "to 0",
            )
        if (
            rollouts.replace_rounds
            and isinstance(self.algorithm, GrpoConfig)
            and self.algorithm.baseline == "batch"
        ):
            raise ConfigError(
                "rollouts.replace_rounds",
                "a batch baseline learns from groups of equal rewards too",
                found=rollouts.replace_rounds,
                remedy="set it to 0, or algorithm.baseline to one of the group",
            )

    def _check_rows(self, task: ReasoningGymTask) -> None:
        trainable = task.rows - task.heldout_rows
        if trainable < self.rollouts.groups_per_step:
            raise ConfigError(
                "task.rows",
                f"leaves {trainable} training problems, fewer than the "
                f"{self.rollouts.groups_per_step} of rollouts.groups_per_step",
                found=task.rows,
                remedy="generate more rows or take smaller steps",
            )

    def _check_data(self, task: DataTask) -> None:
        """Nothing is sampled, so whatever is about sampling must be left alone."""
        if self.generator is not None:
            raise ConfigError(
                "generator",
                f"algorithm {self.algorithm.type} trains on data and generates nothing",
                found=self.generator.type,
                remedy="remove the section",
            )
        for section, given, unused in (
            ("sampling", self.sampling, list(SamplingConfig.model_fields)),
            (
                "rollouts",
                self.rollouts,
                [n for n in RolloutsConfig.model_fields if n != "groups_per_step"],
            ),
            ("evaluation", self.evaluation, ["samples", "max_new_tokens"]),
            ("weights", self.weights, list(WeightsConfig.model_fields)),
        ):
            for key in unused:
                value = given.model_dump()[key]
                if value != type(given).model_fields[key].default:
                    raise ConfigError(
                        f"{section}.{key}",
                        f"means nothing to algorithm {self.algorithm.type}, which samples nothing",
                        found=value,
                        remedy="remove it",
                    )
        rows = 2 if self.algorithm.type == "dpo" else 1
        if rows * task.max_row_tokens > self.policy.microbatch_tokens:
            raise ConfigError(
                "policy.microbatch_tokens",
                f"{rows} of task.max_row_tokens must fit into one micro-batch",
                found=self.policy.microbatch_tokens,
                remedy=f"set it to at least {rows * task.max_row_tokens}, or lower "
                "task.max_row_tokens",
            )


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file with its `extends`, apply `dotted.key=value` overrides, validate.

    Raises:
        ConfigError: one line per problem: file, key, value, remedy.
    """
    layers = read_layers(path)
    values: dict[str, Value] = {}
    for layer in layers:
        values = merge(values, layer)
    algorithm = values.get("algorithm")
    if isinstance(algorithm, dict) and any(o.startswith("algorithm.preset=") for o in overrides):
        values["algorithm"] = without_choices(algorithm)
    layers = [{}, *layers, apply_overrides({}, list(overrides))]
    return validate(RunConfig, apply_overrides(values, list(overrides)), path.name, layers)


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; `load_config` of it gives an equal object."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()
