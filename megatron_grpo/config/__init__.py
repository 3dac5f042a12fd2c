"""Strict, frozen run configuration; reaches no torch, so a laptop can check a config."""

from megatron_grpo.config.algorithm import AlgorithmConfig, GrpoConfig
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
from megatron_grpo.config.parallel import ModelShape, ParallelConfig
from megatron_grpo.config.run import (
    EvaluationConfig,
    ReasoningGymTask,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    dump_config,
    load_config,
)

__all__ = [
    "AlgorithmConfig",
    "ClusterConfig",
    "DType",
    "EvaluationConfig",
    "GrpoConfig",
    "MegatronPolicyConfig",
    "ModelConfig",
    "ModelShape",
    "OptimizerConfig",
    "ParallelConfig",
    "ReasoningGymTask",
    "ReferenceGeneratorConfig",
    "ReferencePolicyConfig",
    "RolloutsConfig",
    "RunConfig",
    "SamplingConfig",
    "VllmGeneratorConfig",
    "WeightsConfig",
    "dump_config",
    "load_config",
]
