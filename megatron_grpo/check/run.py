"""`megatron-grpo check`, below the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_grpo.check.findings import (
    Finding,
    Machines,
    Report,
    Subject,
    problems_of,
    report_of,
    run_rules,
)
from megatron_grpo.check.rules import RULES
from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigErrors


def check_config(
    path: Path,
    overrides: Sequence[str] = (),
    machines: Machines | None = None,
    gpu: str = "",
) -> Report:
    """Everything that can be said without a GPU.

    Raises:
        ConfigError: the file cannot be read at all, or an override is none.
    """
    try:
        config = load_config(path, list(overrides))
    except ConfigErrors as error:
        return Report(tuple(problems_of(error, "config")))
    names = [f"stage {stage.name}: " for stage in config.stages] or [""]
    found: dict[Finding, None] = {}
    for name, stage in zip(names, config.stage_configs(), strict=True):
        report = run_rules(RULES, Subject(stage, machines, gpu))
        known = {replace(finding, where="") for finding in found}
        for finding in report.findings:  # what was said of an earlier stage is not said again
            if replace(finding, where="") not in known:
                found[replace(finding, where=f"{name}{finding.where}")] = None
    return report_of(found)
