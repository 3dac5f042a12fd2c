"""Where policy and engines sit, and how weights get there: which choices may be combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ONE_GPU = ["generator.colocated=true", "cluster.gpus_per_rank=1", "policy.parallel={pipeline: 1}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generator.colocated=true", "rollouts.max_staleness=1"], "rollouts.max_staleness"),
        ([*ONE_GPU, "generator.tensor=2"], "generator.colocated: .*1 engines of 2 workers"),
        ([*ONE_GPU, "policy.parallel.data=2"], "generator.colocated: .*2 ranks"),
        ([*ONE_GPU, "weights.backend=nccl"], "weights.backend: .*on one GPU"),
        (["weights.backend=cuda_ipc"], "weights.backend: .*on one GPU"),
        (
            ["generator.expert=true", "generator.tensor=2"],
            "generator.expert: vLLM cannot spread experts over .* CPUs",
        ),
    ],
)
def test_choices_that_cannot_work_together_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


def test_a_policy_and_an_engine_may_share_a_gpu():
    assert load_config(QUICKSTART, ONE_GPU).shares_gpu
    assert load_config(QUICKSTART, [*ONE_GPU, "weights.backend=disk"]).shares_gpu
    assert not load_config(QUICKSTART, ["generator.colocated=true"]).shares_gpu
    spread = ["generator.expert=true", "generator.tensor=2", "cluster.gpus_per_rank=1"]
    assert load_config(QUICKSTART, spread).engines.tensor == 2
