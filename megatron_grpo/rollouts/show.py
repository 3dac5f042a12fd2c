"""Rollouts as a person wants to read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatron_grpo.rollouts.zarr_store import StepSummary
from megatron_grpo.types import Rollout, RolloutGroup

Sample = tuple[RolloutGroup, Rollout]


def show_steps(summaries: Sequence[StepSummary], most: int, console: Console) -> None:
    """A table of the last `most` steps."""
    table = Table(title=f"{len(summaries)} steps", title_justify="left")
    for heading in ("step", "rollouts", "reward", "solved", "spread", "tokens", "longest", "cut"):
        table.add_column(heading, justify="right")
    for one in summaries[-most:]:
        rewards = np.array([r for group in one.rewards for r in group])
        spread = sum(max(group) > min(group) for group in one.rewards)
        solved = sum(max(group) > 0 for group in one.rewards)
        tokens = np.array(one.response_tokens)
        table.add_row(
            str(one.step),
            str(len(rewards)),
            f"{rewards.mean():.3f}" if len(rewards) else "-",
            f"{solved}/{len(one.rewards)}",
            f"{spread}/{len(one.rewards)}",
            f"{tokens.mean():.1f}" if len(tokens) else "-",
            str(tokens.max(initial=0)),
            str(one.truncated),
        )
    console.print(table)
    console.print(
        "solved: groups with a reward above 0; spread: groups whose rewards differ; cut: rollouts "
        "that ran out of tokens",
        style="dim",
    )


def pick(groups: Sequence[RolloutGroup], *, best: int, worst: int) -> list[Sample]:
    """The `best` highest and `worst` lowest rewards, ties in the order they were recorded."""
    samples = [(group, rollout) for group in groups for rollout in group.rollouts]
    up = sorted(samples, key=lambda sample: sample[1].reward.value)
    down = sorted(samples, key=lambda sample: -sample[1].reward.value)
    return [*down[:best], *up[:worst]]


def show_sample(step: int, sample: Sample, console: Console) -> None:
    """One rollout: where it comes from, its prompt, its response, its grade."""
    group, rollout = sample
    reward = rollout.reward
    sampled = rollout.behavior_logprobs[rollout.loss_mask]
    versions = rollout.versions[rollout.loss_mask]
    title = Text.assemble(
        (printable(rollout.rollout_id), "bold"),
        "  reward ",
        (f"{reward.value:g}", "bold green" if reward.value > 0 else "bold red"),
    )
    # The policy had made step - 1 updates when it trained on this.
    ages = f"{step - 1 - versions.max()} to {step - 1 - versions.min()}" if len(versions) else "-"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, value in (
        ("prompt", group.prompt.prompt_id),
        ("gold answer", group.prompt.answer),
        ("extracted", reward.extracted),
        ("reason", reward.reason),
        (
            "tokens",
            f"{rollout.prompt_tokens} prompt, {rollout.num_trained_tokens} sampled, ended by "
            f"{rollout.finish_reason} after {rollout.generate_s:.2f} s",
        ),
        ("log-probability", f"{sampled.mean():.3f} per token" if len(sampled) else "-"),
        ("age in versions", ages),
        ("seed", str(rollout.seed)),
    ):
        if value:
            facts.add_row(name, Text(printable(value)))
    body = Group(
        Text(printable(group.prompt.text)),
        Rule("response", style="dim", align="left"),
        Text(printable(rollout.text)),
        Rule(style="dim"),
        facts,
    )
    console.print(Panel(body, title=title, title_align="left"))


def printable(text: str) -> str:
    r"""Whatever a model wrote, safe on a terminal: control characters as \x1b, stray halves of
    surrogate pairs as they are written in Python; line breaks and tabs stay.

    >>> print(printable("a\x1b[31m\ud83d"))
    a\x1b[31m\ud83d
    """
    return "".join(
        c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) > 127) else repr(c)[1:-1]
        for c in text
    )
