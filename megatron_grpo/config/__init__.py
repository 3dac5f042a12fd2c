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
    VllmGeneratorConfig,
    WeightsConfig,
)
from megatron_grpo.config.checkpoint import CheckpointConfig
from megatron_grpo.config.parallel import ModelShape, ParallelConfig
from megatron_grpo.config.run import (
    ChatTask,
    DataTask,
    EvaluationConfig,
    PreferenceTask,
    ReasoningGymTask,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    dump_config,
    load_config,
)

__all__ = [
    "AlgorithmConfig",
    "ChatTask",
    "CheckpointConfig",
    "ClusterConfig",
    "DType",
    "DataTask",
    "DpoConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "MegatronPolicyConfig",
    "ModelConfig",
    "ModelShape",
    "OptimizerConfig",
    "ParallelConfig",
    "PreferenceTask",
    "ReasoningGymTask",
    "ReferenceGeneratorConfig",
    "ReferencePolicyConfig",
    "RolloutsConfig",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "VllmGeneratorConfig",
    "WeightsConfig",
    "dump_config",
    "load_config",
]
