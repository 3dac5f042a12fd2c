"""Strict, frozen run configuration; reaches no torch, so a laptop can check a config."""

from megatron_grpo.config.algorithm import AlgorithmConfig, DpoConfig, GrpoConfig, SftConfig
from megatron_grpo.config.backends import (
    ClusterConfig,
    DType,
    MegatronPolicyConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceGeneratorConfig,
    ReferencePolicyConfig,
    RunningRequests,
    VllmGeneratorConfig,
    WeightsConfig,
)
from megatron_grpo.config.checkpoint import CheckpointConfig
from megatron_grpo.config.data import DialogueTask, MathTask, ProblemData, ProblemTask
from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.config.parallel import ModelShape, ParallelConfig
from megatron_grpo.config.rollouts import EvaluationConfig, RolloutsConfig, SamplingConfig
from megatron_grpo.config.run import RunConfig, dump_config, load_config
from megatron_grpo.config.tasks import ChatTask, DataTask, PreferenceTask, ReasoningGymTask

__all__ = [
    "AlgorithmConfig",
    "ChatTask",
    "CheckpointConfig",
    "ClusterConfig",
    "DType",
    "DataTask",
    "DialogueTask",
    "DpoConfig",
    "EvaluationConfig",
    "GradingConfig",
    "GrpoConfig",
    "MathTask",
    "MegatronPolicyConfig",
    "ModelConfig",
    "ModelShape",
    "OptimizerConfig",
    "ParallelConfig",
    "PreferenceTask",
    "ProblemData",
    "ProblemTask",
    "ReasoningGymTask",
    "ReferenceGeneratorConfig",
    "ReferencePolicyConfig",
    "RolloutsConfig",
    "RunConfig",
    "RunningRequests",
    "SamplingConfig",
    "SftConfig",
    "VllmGeneratorConfig",
    "WeightsConfig",
    "dump_config",
    "load_config",
]
