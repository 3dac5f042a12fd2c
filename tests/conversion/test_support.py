"""What `convert list` says is what the code does and the tests compare."""

from __future__ import annotations

import pytest
from conversion.test_config_json import config
from parity.test_megatron_against_huggingface import EVERYWHERE, EXPERTS, LAYOUTS, ONCE
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import ParallelConfig
from megatron_grpo.conversion.config_json import parse_model_spec
from megatron_grpo.conversion.config_rope import ROPE_FIELDS
from megatron_grpo.conversion.families import FAMILIES
from megatron_grpo.conversion.support import ROPE_KINDS, SUPPORT
from megatron_grpo.errors import CheckpointError

AXES = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context"}


def test_the_list_names_the_families_and_rope_kinds_that_exist() -> None:
    assert set(SUPPORT) == set(FAMILIES)
    assert set(ROPE_KINDS) == set(ROPE_FIELDS)


@pytest.mark.parametrize("family", list(SUPPORT))
def test_every_verified_axis_is_in_a_parity_case_of_the_family(family: str) -> None:
    cases = [LAYOUTS[case[2]] for case in EVERYWHERE + ONCE + EXPERTS if case[0] == family]
    layouts = [ParallelConfig(**case) for case in cases]
    for axis in SUPPORT[family].layouts:
        if axis in AXES:
            assert any(getattr(layout, AXES[axis]) > 1 for layout in layouts), axis
        elif axis == "EP":
            assert any(layout.expert > 1 for layout in layouts)
        elif axis == "ETP":
            widths = {layout.expert_tensor or layout.tensor for layout in layouts}
            assert widths == {1, 2}
        else:
            assert axis in ("SP", "TP with SP")
            assert any(layout.tensor > 1 and layout.sequence for layout in layouts)


@pytest.mark.parametrize(
    ("family", "field"), [(f, field) for f, s in SUPPORT.items() for field in s.refused]
)
def test_what_is_said_to_be_refused_is(family: str, field: str) -> None:
    values = {"sliding_window": 16, "moe_layer_freq": 2, "norm_topk_prob": False, "topk_group": 3}
    value = values.get(field, True)
    with pytest.raises(CheckpointError, match=field):
        parse_model_spec(config(family, **{field: value}), "config.json")


def test_the_command_prints_it() -> None:
    printed = CliRunner().invoke(app, ["convert", "list"])
    assert printed.exit_code == 0
    assert all(family in printed.output for family in FAMILIES)
