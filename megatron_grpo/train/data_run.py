"""The parts of a run that learns from rows of a file: the same loop, without a generator."""

from __future__ import annotations

from contextlib import ExitStack

from rich.console import Console

from megatron_grpo.algorithms import Dpo, Sft
from megatron_grpo.config import RunConfig
from megatron_grpo.environments.dialogues import DataSet
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import PolicyBackend
from megatron_grpo.rollouts.data_source import DataSource
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train.heldout import HeldoutEvaluator, HeldoutLoss
from megatron_grpo.train.loop import Run
from megatron_grpo.train.metrics import MetricsLog, Phases
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.train.resume import open_records
from megatron_grpo.train.run_folder import RunFolder
from megatron_grpo.train.saver import Saver


def build_data_run(
    config: RunConfig,
    folder: RunFolder,
    data: DataSet,
    policy: PolicyBackend,
    scorer: ReferenceScorer | None,
    saver: Saver,
    console: Console,
    stack: ExitStack,
) -> tuple[Run, HeldoutEvaluator]:
    """Everything but the policy; `stack` closes what is opened here."""
    if config.algorithm.type == "grpo":
        raise ConfigError("algorithm.type", "does not learn from rows")
    algorithm = Dpo(config.algorithm) if config.algorithm.type == "dpo" else Sft(config.algorithm)
    metrics, progress, earlier = stack.enter_context(open_records(config, folder, console))
    evaluator = HeldoutEvaluator(
        data.heldout,
        algorithm,
        policy,
        scorer,
        every=config.evaluation.every,
        last_version=config.steps,
        report=lambda result: report_heldout(result, metrics, console),
    )
    run = Run(
        config,
        DataSource(data.train, config.rollouts.groups_per_step, config.seed, data.fingerprint),
        algorithm,
        policy,
        None,
        evaluator,
        ZarrStore(folder.path / "rollouts"),
        metrics,
        Phases(),
        progress,
        saver,
        scorer,
        earlier,
    )
    return run, evaluator


def report_heldout(result: HeldoutLoss, metrics: MetricsLog, console: Console) -> None:
    values = {"loss": result.loss, **result.means}
    metrics.log(result.version, result.metrics())
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
    console.print(f"held out after {result.version} steps: {shown}")
