"""`megatron-grpo check`, below the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.check.findings import Report, Subject, problems_of, run_rules
from megatron_grpo.check.rules import RULES
from megatron_grpo.config import load_config
from megatron_grpo.errors import ConfigErrors


def check_config(
    path: Path,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    gpus_per_node: int = 8,
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
    return run_rules(RULES, Subject(config, nodes, gpus_per_node, gpu))
