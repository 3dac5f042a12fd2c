"""Generating ahead: which choices may be combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.running_requests=keep"], "weights.running_requests: .*max_staleness 0"),
        (
            ["rollouts.max_staleness=1", "rollouts.oversample=1.5"],
            "rollouts.oversample: gains nothing if every push waits",
        ),
        (["rollouts.oversample=0.5"], "rollouts.oversample"),
        (
            ["rollouts.replace_rounds=2", "algorithm.baseline=batch"],
            "rollouts.replace_rounds: a batch baseline learns",
        ),
    ],
)
def test_choices_that_make_no_sense_together_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


def test_everything_is_off_by_default_and_legal_together():
    default = load_config(QUICKSTART)
    assert default.rollouts.extra_groups == default.rollouts.replace_rounds == 0
    assert default.weights.running_requests == "finish"
    overrides = ["rollouts.max_staleness=2", "weights.running_requests=abort"]
    overrides += ["rollouts.oversample=1.3", "rollouts.replace_rounds=4"]
    config = load_config(QUICKSTART, overrides)
    assert config.rollouts.extra_groups == 3  # 0.3 * 8 = 2.4
