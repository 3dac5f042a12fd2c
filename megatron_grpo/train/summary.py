"""What a run came to: summary.json for machines, a short table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_grpo.config import RunConfig
from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.records import TRAINING_PHASES, StepRecord, rate


@dataclass(frozen=True, slots=True)
class Summary:
    """Written to summary.json. Log-probability differences are between trainer and generator, on
    the same tokens under the same weights (synchronous runs), averaged over all trained tokens of
    the run.

    Attributes:
        trainer_idle_share: of the steps' time outside evaluations, the part in which training
            waited for rollouts.
        engines_idle_share: of the steps' time, the part in which no request was in flight.
        staleness: share of the sampled tokens by age in weight versions, over all steps.
    """

    name: str
    policy_backend: str
    generator_backend: str
    layout: str
    policy_dtype: str
    generator_dtype: str
    seed: int
    steps: int
    heldout_accuracy_before: float
    heldout_accuracy_after: float
    heldout_standard_error: float
    heldout_problems: int
    heldout_samples: int
    train_reward_first: float
    train_reward_last: float
    logprob_abs_diff_mean: float
    logprob_abs_diff_max: float
    generated_tokens: int
    generated_tokens_per_s: float
    trained_tokens: int
    trained_tokens_per_s: float
    step_s_median: float
    trainer_idle_share: float
    engines_idle_share: float
    staleness: Mapping[str, float]
    wall_s: float
    seconds: Mapping[str, float]


def summarize(
    config: RunConfig,
    layout: str,
    dtypes: tuple[str, str],
    records: Sequence[StepRecord],
    evaluations: Sequence[Evaluation],
    setup_s: float,
    wall_s: float,
    rest: Mapping[str, float],
) -> Summary:
    """Combine the records of a finished run.

    Args:
        dtypes: of policy and generator.
        rest: seconds of phases outside the steps.
    """
    seconds: dict[str, float] = {"setup": setup_s}
    for part in [record.seconds for record in records] + [rest]:
        for phase, spent in part.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    generated = sum(record.generated_tokens for record in records)
    generation_s = sum(record.generation_s for record in records)
    trained = sum(record.trained_tokens for record in records)
    learned = [r for r in records if "logprob_abs_diff_mean" in r.metrics]
    weighted = sum(r.metrics["logprob_abs_diff_mean"] * r.generated_tokens for r in learned)
    scored = sum(r.generated_tokens for r in learned)
    steps = sorted(record.step_s for record in records)
    return Summary(
        name=config.name,
        policy_backend=config.policy.type,
        generator_backend=config.engines.type,
        layout=layout,
        policy_dtype=dtypes[0],
        generator_dtype=dtypes[1],
        seed=config.seed,
        steps=len(records),
        heldout_accuracy_before=evaluations[0].accuracy,
        heldout_accuracy_after=evaluations[-1].accuracy,
        heldout_standard_error=evaluations[-1].standard_error,
        heldout_problems=evaluations[-1].problems,
        heldout_samples=evaluations[-1].samples,
        train_reward_first=records[0].metrics["reward_mean"],
        train_reward_last=records[-1].metrics["reward_mean"],
        logprob_abs_diff_mean=weighted / scored if scored else 0.0,
        logprob_abs_diff_max=max((r.metrics["logprob_abs_diff_max"] for r in learned), default=0.0),
        generated_tokens=generated,
        generated_tokens_per_s=generated / generation_s if generation_s else 0.0,
        trained_tokens=trained,
        trained_tokens_per_s=rate(trained, seconds, TRAINING_PHASES),
        step_s_median=steps[len(steps) // 2],
        trainer_idle_share=trainer_idle_share(records),
        engines_idle_share=engines_idle_share(records),
        staleness=staleness_of(records),
        wall_s=wall_s,
        seconds={phase: round(spent, 3) for phase, spent in seconds.items()},
    )


def trainer_idle_share(records: Sequence[StepRecord]) -> float:
    waited = sum(r.seconds.get(phase, 0.0) for r in records for phase in ("generate", "drain"))
    spent = sum(r.step_s - r.seconds.get("evaluate", 0.0) for r in records)
    return waited / spent if spent else 0.0


def engines_idle_share(records: Sequence[StepRecord]) -> float:
    busy = sum(r.metrics.get("engines_busy_s", 0.0) for r in records)
    spent = sum(r.step_s for r in records)
    return max(0.0, 1.0 - busy / spent) if spent else 0.0


def staleness_of(records: Sequence[StepRecord]) -> dict[str, float]:
    """Age in weight versions -> share of all sampled tokens."""
    counts: dict[str, float] = {}
    for record in records:
        for name, share in record.metrics.items():
            age = name.removeprefix("staleness/")
            if age != name:
                counts[age] = counts.get(age, 0.0) + share * record.generated_tokens
    total = sum(counts.values())
    return {age: count / total for age, count in sorted(counts.items())} if total else {}


def write_summary(summary: Summary, path: Path) -> None:
    path.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def print_summary(summary: Summary, console: Console, folder: Path) -> None:
    table = Table(
        title=f"{summary.name}: {summary.steps} steps, {summary.layout}", title_style="bold"
    )
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row(
        f"held-out accuracy ({summary.heldout_problems} problems x {summary.heldout_samples})",
        f"{summary.heldout_accuracy_before:.3f}",
        f"[bold]{summary.heldout_accuracy_after:.3f}[/bold] ± {summary.heldout_standard_error:.3f}",
    )
    table.add_row(
        "training reward", f"{summary.train_reward_first:.3f}", f"{summary.train_reward_last:.3f}"
    )
    console.print(table)
    console.print(
        f"trainer and generator agree on log-probabilities to {summary.logprob_abs_diff_mean:.1e} "
        f"on average ({summary.policy_dtype} and {summary.generator_dtype}); "
        f"generated {summary.generated_tokens_per_s:.0f} and trained "
        f"{summary.trained_tokens_per_s:.0f} tokens/s; {summary.wall_s:.0f} s in all"
    )
    ages = ", ".join(f"{share:.0%} {age}" for age, share in summary.staleness.items())
    console.print(
        f"training waited {summary.trainer_idle_share:.0%} of the time, engines "
        f"{summary.engines_idle_share:.0%}; age of the tokens in weight versions: {ages}"
    )
    console.print(
        f"everything is in [bold]{folder}[/bold]: summary.json, metrics.jsonl, tensorboard, model"
    )
