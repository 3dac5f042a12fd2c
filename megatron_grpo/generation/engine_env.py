"""Environment of an engine's process: read by vLLM and torch when they are imported, so set before.

Imports neither: the driver, which starts engines, needs no vLLM.
"""

from __future__ import annotations

from megatron_grpo.config import MegatronPolicyConfig, RunConfig, VllmGeneratorConfig
from megatron_grpo.devices import HUGE_PAGES


def engine_threads(config: RunConfig, cores: int) -> int:
    """CPU threads of each engine, where the config leaves that open; see VllmGeneratorConfig.

    Threads that outnumber the cores wait for each other by spinning: with two of them beside two
    ranks on two cores the asynchronous quickstart was slower than taking turns.
    """
    engines = config.engines
    if isinstance(engines, VllmGeneratorConfig) and engines.threads is not None:
        return engines.threads
    taken = 0
    if isinstance(config.policy, MegatronPolicyConfig) and config.rollouts.max_staleness > 0:
        taken = config.policy.parallel.world_size * config.policy.threads_per_rank
    count = engines.engines if isinstance(engines, VllmGeneratorConfig) else 1
    return max(1, (cores - taken) // count)


def engine_env(config: VllmGeneratorConfig, threads: int, *, gpu: bool) -> dict[str, str]:
    """Variables for the process that will hold a VllmEngine.

    Args:
        threads: CPU threads of the whole engine, shared out among its workers.
        gpu: whether the engine has GPUs.
    """
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # One worker lives in our process, where weights change between steps without a message to
        # another one. Several need processes of their own, and vLLM's engine core with them.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.tensor == 1 else "1",
        "OMP_NUM_THREADS": str(max(1, threads // config.tensor)),
    }
    if not gpu:
        env |= HUGE_PAGES
        # Eager mode still compiles small helpers with a C++ compiler, some 20 s at the first batch.
        env["TORCH_COMPILE_DISABLE"] = "1"
        # Workers share cores with each other and with the policy: the scheduler places them better
        # than a fixed binding, which vLLM refuses anyway where there are fewer NUMA nodes than
        # workers.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return env
