"""The table of everything that is looked at, with the reason for each."""

from __future__ import annotations

from megatron_grpo.check.data import check_task
from megatron_grpo.check.findings import Rule
from megatron_grpo.check.layout import (
    check_context,
    check_layout,
    check_memory,
    check_placement,
    check_replicas,
)
from megatron_grpo.check.machine import check_disk, check_packages
from megatron_grpo.check.model_folder import check_model_folders

# What the config's own types refuse (misspelt keys, values out of range, compositions that cannot
# work) is found before any of these.
RULES = (
    Rule(
        "model folder",
        "a wrong tokenizer or a shard that is missing shows after the model was loaded everywhere",
        check_model_folders,
    ),
    Rule("layout", "every rank holds an equal part of heads, widths, layers", check_layout),
    Rule("context", "positions a model was not trained on give noise", check_context),
    Rule("replicas", "a replica without work makes the others wait", check_replicas),
    Rule("placement", "a tensor group or an engine does not cross nodes", check_placement),
    Rule("memory", "running out of it shows in the first step", check_memory),
    Rule("task", "rows and reward decide what is learned", check_task),
    Rule("disk", "a full disk loses the newest checkpoint", check_disk),
    Rule("packages", "an interface that moved shows as an obscure error", check_packages),
)
