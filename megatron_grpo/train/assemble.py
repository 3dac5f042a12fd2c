"""From a config to a running whole: the only place that turns `type:` strings into classes.

Order matters: everything that can be wrong without a model (data, folders, tokenizer) is looked at
first; then ranks and engines start side by side; then the weight channel joins them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_grpo.config import (
    ChatTask,
    PreferenceTask,
    RunConfig,
)
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Algorithm, Environment, Generator, PolicyBackend
from megatron_grpo.train.backends import cluster_backends, policy_alone, reference_backends
from megatron_grpo.train.data_summary import (
    DataSummary,
    print_data_summary,
    said_left_out,
    summarize_data,
    write_data_summary,
)
from megatron_grpo.train.evaluate import Evaluator
from megatron_grpo.train.evaluation_report import report_evaluation
from megatron_grpo.train.loop import Run, train
from megatron_grpo.train.metrics import Phases
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.train.resume import open_records, restore
from megatron_grpo.train.run_folder import MODEL_FOLDER, RunFolder, open_run
from megatron_grpo.train.saver import Saver
from megatron_grpo.train.signals import StopRequest, stop_on_signals
from megatron_grpo.train.stages import run_in_stages
from megatron_grpo.train.summary import Summary, print_summary, summarize, write_summary
from megatron_grpo.train.task_environments import build_environment, mixture_of

if TYPE_CHECKING:
    pass


def run_training(
    config: RunConfig,
    console: Console | None = None,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
) -> Summary | DataSummary | None:
    """Train as configured, from the start or from where an earlier process left the run; leave
    config.yaml, metrics, rollouts, checkpoints, the trained model and summary.json in its folder.

    Args:
        fresh: move an earlier run of this folder aside.
        accept_changes: go on with an earlier run under a config that changes what is learned: the
            next stage of a recipe, say. Any layout can go on with any other's checkpoint.

    Returns None if the run was finished already.

    Raises:
        RunStopped: a signal asked for it; calling this again goes on.
        GrpoError: one line saying what failed, where, and what to do.
    """
    console = console or Console()
    if config.stages:
        check_stage_folders(config)
        return run_in_stages(
            config, console, run_training, fresh=fresh, accept_changes=accept_changes
        )
    check_folders(config)
    opened = open_run(config, console.print, fresh=fresh, accept_changes=accept_changes)
    with stop_on_signals() as stop, opened as folder:
        if folder.finished:
            console.print(
                f"[bold]{config.name}[/bold] has finished its {folder.steps_done} steps "
                f"({folder.path}); go on with steps=..., or start anew with --fresh or name=..."
            )
            return None
        begin = run_sampled if config.generator is not None else run_on_data
        return begin(config, folder, stop, console, accept_changes)


def run_sampled(
    config: RunConfig, folder: RunFolder, stop: StopRequest, console: Console, accept: bool
) -> Summary:
    """Learn from what the policy samples (grpo)."""
    started = time.perf_counter()
    with ExitStack() as stack:
        from megatron_grpo.environments.chat import ChatTokenizer

        tokenizer = ChatTokenizer(config.model.folder)
        environment = build_environment(config, tokenizer)
        stack.callback(environment.close)
        console.print(
            f"[bold]{config.name}[/bold]: starting {config.policy.type} and {config.engines.type}"
        )
        backends = reference_backends if config.policy.type == "reference" else cluster_backends
        policy, generator = stack.enter_context(backends(config))
        saver = open_saver(config, folder, policy, stop, console, stack)
        run, evaluator = build_run(
            config, folder, tokenizer, environment, policy, generator, saver, console, stack
        )
        restore(run, folder, console, accept=accept)
        setup_s = time.perf_counter() - started
        records = train(run)
        with run.phases("export"):
            policy.export(folder.path / MODEL_FOLDER)
        gpu = config.cluster.gpus_per_rank > 0
        dtypes = tuple(resolve_dtype(b.dtype, gpu=gpu) for b in (config.policy, config.engines))
        summary = summarize(
            config,
            policy.layout,
            (dtypes[0], dtypes[1]),
            records,
            evaluator.results,
            setup_s,
            time.perf_counter() - started,
            run.phases.take(),
        )
    write_summary(summary, folder.path / "summary.json")
    print_summary(summary, console, folder.path)
    return summary


def run_on_data(
    config: RunConfig, folder: RunFolder, stop: StopRequest, console: Console, accept: bool
) -> DataSummary:
    """Learn from rows of a file (sft, dpo): the same loop, without a generator."""
    from megatron_grpo.environments.chat import ChatTokenizer
    from megatron_grpo.environments.dialogues import load_data
    from megatron_grpo.train.data_run import build_data_run

    started = time.perf_counter()
    if not isinstance(config.task, ChatTask | PreferenceTask):
        raise ConfigError("task.type", "holds no rows to train on")
    data = load_data(config.task, ChatTokenizer(config.model.folder))
    with ExitStack() as stack:
        console.print(
            f"[bold]{config.name}[/bold]: starting {config.policy.type}; {len(data.train)} rows, "
            f"{len(data.heldout)} held out{said_left_out(data.left_out)}"
        )
        policy = stack.enter_context(policy_alone(config))
        saver = open_saver(config, folder, policy, stop, console, stack)
        scorer = build_scorer(config, policy)
        run, evaluator = build_data_run(config, folder, data, policy, scorer, saver, console, stack)
        restore(run, folder, console, accept=accept)
        records = train(run)
        with run.phases("export"):
            policy.export(folder.path / MODEL_FOLDER)
        summary = summarize_data(
            config,
            policy.layout,
            resolve_dtype(config.policy.dtype, gpu=config.cluster.gpus_per_rank > 0),
            len(data.train),
            data.left_out,
            records,
            evaluator.results,
            time.perf_counter() - started,
            run.phases.take(),
        )
    write_data_summary(summary, folder.path / "summary.json")
    print_data_summary(summary, console, folder.path)
    return summary


def open_saver(
    config: RunConfig,
    folder: RunFolder,
    policy: PolicyBackend,
    stop: StopRequest,
    console: Console,
    stack: ExitStack,
) -> Saver:
    saver = Saver(
        folder.checkpoints,
        config.checkpoint,
        policy,
        folder.origin,
        stop,
        last_step=config.steps,
        saved_step=folder.steps_done,
        say=console.print,
    )
    stack.callback(saver.close)
    return saver


def build_run(
    config: RunConfig,
    folder: RunFolder,
    tokenizer,
    environment: Environment,
    policy: PolicyBackend,
    generator: Generator,
    saver: Saver,
    console: Console,
    stack: ExitStack,
) -> tuple[Run, Evaluator]:
    from megatron_grpo.algorithms.advantages import has_zero_spread
    from megatron_grpo.generation.shared import SharedGenerator
    from megatron_grpo.rollouts.sources import LiveSource
    from megatron_grpo.rollouts.zarr_store import ZarrStore

    shared = SharedGenerator(generator)
    metrics, progress, earlier = stack.enter_context(open_records(config, folder, console))
    evaluator = Evaluator(
        config.evaluation,
        environment,
        shared.view("evaluation"),
        tokenizer.decode,
        config.sampling.max_new_tokens,
        config.steps,
        config.cluster.step_deadline_s,
        config.seed,
        report=lambda result, problems: report_evaluation(
            result, problems, metrics, console, folder.path
        ),
    )
    source = LiveSource(
        environment,
        shared.view("training"),
        tokenizer.decode,
        config.rollouts,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.seed,
        deadline_s=config.cluster.step_deadline_s,
        mixture=mixture_of(environment),
        running_requests=config.weights.running_requests,
        has_spread=lambda group: not has_zero_spread(group.rewards.tolist()),
        busy_s=shared.busy_s,
    )
    stack.callback(source.close)
    run = Run(
        config,
        source,
        build_grpo(config),
        policy,
        generator,
        evaluator,
        ZarrStore(folder.path / "rollouts"),
        metrics,
        Phases(),
        progress,
        saver,
        build_scorer(config, policy),
        earlier,
    )
    return run, evaluator


def build_scorer(config: RunConfig, policy: PolicyBackend) -> ReferenceScorer | None:
    if config.reference_folder is None:
        return None
    sampled = config.algorithm.type == "grpo"
    return ReferenceScorer(policy, config.sampling.temperature, remember=not sampled)


def build_grpo(config: RunConfig) -> Algorithm:
    from megatron_grpo.algorithms.grpo import Grpo

    if config.algorithm.type != "grpo":
        raise ConfigError("algorithm.type", "does not learn from samples")
    return Grpo(config.algorithm, config.sampling.temperature, config.sampling.max_new_tokens)


def check_stage_folders(config: RunConfig) -> None:
    """Those of every stage, so that none is found missing after days."""
    for stage, resolved in zip(config.stages, config.stage_configs(), strict=True):
        try:
            check_folders(resolved, renewed=stage.renew_reference)
        except ConfigError as error:
            where = f"stage {stage.name}: {error.where}"
            raise ConfigError(
                where, error.problem, found=error.found, remedy=error.remedy
            ) from error


def check_folders(config: RunConfig, *, renewed: bool = False) -> None:
    """Models that the run reads: the policy's first weights, and the frozen one's.

    Args:
        renewed: the frozen one is made by the run itself, when its stage begins.

    Raises:
        ConfigError: one of them is no model folder.
    """
    check_model_folder(config.model.folder)
    if config.reference_folder is not None and not renewed:
        check_model_folder(config.reference_folder, "algorithm.reference_path")


def check_model_folder(folder: Path, key: str = "model.path") -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            key,
            "holds no config.json",
            found=str(folder),
            remedy="give a Hugging Face folder, or write one with: "
            "python -m megatron_grpo.conversion.smollm2",
        )
