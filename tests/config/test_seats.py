"""Where policy and engines sit, and how weights get there: which choices may be combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
IPC = "weights.backend=cuda_ipc"
ONE_GPU = ["generator.colocated=true", "cluster.gpus_per_rank=1", "policy.parallel={pipeline: 1}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generator.colocated=true", "rollouts.max_staleness=1"], "rollouts.max_staleness"),
        ([*ONE_GPU, "weights.backend=nccl"], "weights.backend: .*on the same GPU"),
        (["weights.backend=cuda_ipc"], "weights.backend: .*2 ranks, 1 engines of 1 workers"),
        ([*ONE_GPU, IPC, "generator.tensor=2"], "weights.backend: .*1 engines of 2 workers"),
        ([*ONE_GPU[1:], IPC], "weights.backend: .*share a GPU"),
        (
            ["generator.expert=true", "generator.tensor=2"],
            "generator.expert: vLLM cannot spread experts over .* CPUs",
        ),
    ],
)
def test_choices_that_cannot_work_together_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


def test_a_policy_and_an_engine_may_share_a_gpu_and_its_memory():
    assert load_config(QUICKSTART, [*ONE_GPU, IPC]).weights.backend == "cuda_ipc"
    assert load_config(QUICKSTART, ["generator.colocated=true"]).weights.backend == "auto"
    spread = ["generator.expert=true", "generator.tensor=2", "cluster.gpus_per_rank=1"]
    assert load_config(QUICKSTART, spread).engines.tensor == 2
