"""Runs real steps of a config and gathers what every actor did.

    run.train --> loop phases | grading | ranks' spans | engines' spans --> Measured

The loop is the ordinary one; around it only the algorithm is watched, held-out evaluation is left
out, and the first step is a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from grpo_perf.benchmark_sizes import benchmark_sizes
from grpo_perf.microbenchmark import Speeds, median_of
from grpo_perf.model_shape import Architecture, read_architecture
from megatron_grpo.batch import BatchShape, TrainBatch
from megatron_grpo.config import ChatTask, ClusterConfig, PreferenceTask, RunConfig
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.dialogues import load_data
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Algorithm, Loss
from megatron_grpo.runtime.generator_proxy import RayGenerator
from megatron_grpo.runtime.policy_proxy import RayPolicy
from megatron_grpo.runtime.ray_cluster import Member, read_spans, use_tool
from megatron_grpo.spans import Recording, Span
from megatron_grpo.train.assemble import (
    build_environment,
    build_run,
    build_scorer,
    check_model_folder,
    open_saver,
)
from megatron_grpo.train.backends import cluster_backends, policy_alone
from megatron_grpo.train.data_run import build_data_run
from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.heldout import HeldoutLoss
from megatron_grpo.train.loop import Progress, Run, train
from megatron_grpo.train.run_folder import open_run
from megatron_grpo.train.signals import stop_on_signals
from megatron_grpo.train.updates import updates_per_step
from megatron_grpo.types import RolloutGroup

WARMUP_STEPS = 1
_TRACER = "megatron_grpo.runtime.tracing:Tracer"
_CUDA_WINDOW = "megatron_grpo.runtime.tracing:CudaWindow"
_BENCHMARK = "grpo_perf.microbenchmark:MicroBenchmark"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure.

    Attributes:
        steps: measured, after one warm-up step.
        trace: also a Chrome trace per actor, which slows the steps down.
        ranks: policy ranks that are traced or run under Nsight Systems.
        nsys: run them under it.
    """

    steps: int = 3
    trace: bool = False
    ranks: tuple[int, ...] = (0,)
    nsys: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything the report is made from.

    Attributes:
        step_ends_s: Unix time at which the warm-up and then every step ended; the window that is
            reported lies between the first and the last.
        loop, grading: spans of the training thread and of the environment.
        ranks, engines: spans by name of the actor; `device_bytes` has the peaks of the GPUs.
        work: (groups, batch) of every measured step.
        rank_speeds, engine_speeds: of the micro-benchmark, run on all ranks (engines) at once.
    """

    config: RunConfig
    folder: Path
    model: Architecture
    shape: BatchShape
    dtype: str
    step_ends_s: tuple[float, ...]
    loop: list[Span]
    grading: list[Span]
    ranks: dict[str, list[Span]]
    engines: dict[str, list[Span]]
    work: list[tuple[tuple[RolloutGroup, ...], TrainBatch]]
    rank_speeds: list[Speeds]
    engine_speeds: list[Speeds]
    device_bytes: dict[str, float]
    traces: list[Path]

    @property
    def window_s(self) -> tuple[float, float]:
        return self.step_ends_s[0], self.step_ends_s[-1]

    @property
    def steps(self) -> int:
        return len(self.step_ends_s) - 1


def measure_run(config: RunConfig, options: ProfileOptions, console: Console) -> Measured:
    """Start everything, take a warm-up and `options.steps` steps, and gather the spans.

    Raises:
        ConfigError: the policy has no ranks.
        GrpoError: whatever fails in the run.
    """
    if config.policy.type != "megatron":
        raise ConfigError(
            "policy.type",
            "only ranks and engines of a cluster are profiled",
            found=config.policy.type,
            remedy="set policy.type to megatron (and generator.type to vllm)",
        )
    config = config.model_copy(
        update={
            "name": f"{config.name}-profile",
            "run_dir": config.folder.with_name(f"{config.folder.name}-profile"),
            "steps": WARMUP_STEPS + options.steps,
            "cluster": _cluster(config, options),
        }
    )
    check_model_folder(config.model.folder)
    if config.reference_folder is not None:
        check_model_folder(config.reference_folder, "algorithm.reference_path")
    with ExitStack() as stack:
        run, members, engines = _start(config, console, stack)
        actors = Actors(members, engines, config)
        model = read_architecture(config.model.folder)
        before = actors.speeds(model)
        traces = actors.trace_paths(config.folder, options)
        algorithm = WatchedAlgorithm(run.algorithm)
        progress = StepMarks(run.progress, WARMUP_STEPS, lambda: actors.start(traces))
        train(replace(run, algorithm=algorithm, evaluator=NoEvaluation(), progress=progress))
        device_bytes = actors.stop(traces)
        run.source.close()  # engines that run ahead would be measured working
        after = actors.speeds(model)
        deadline_s = config.cluster.step_deadline_s
        return Measured(
            config=config,
            folder=config.folder,
            model=model,
            shape=run.policy.batch_shape,
            dtype=resolve_dtype(config.policy.dtype, gpu=actors.gpu),
            step_ends_s=progress.unix_times(),
            loop=run.phases.spans.read(),
            grading=run.source.spans.read() if isinstance(run.source, Recording) else [],
            ranks=read_spans(members, deadline_s),
            engines=read_spans(engines, deadline_s),
            work=algorithm.steps(updates_per_step(config))[WARMUP_STEPS:],
            rank_speeds=_medians(before[0], after[0]),
            engine_speeds=_medians(before[1], after[1]),
            device_bytes=device_bytes,
            traces=list(traces.values()),
        )


def _cluster(config: RunConfig, options: ProfileOptions) -> ClusterConfig:
    """With the chosen ranks under Nsight Systems.

    Raises:
        ConfigError: --nsys without GPUs, or a rank that does not exist.
    """
    assert config.policy.type == "megatron"
    world = config.policy.parallel.world_size
    outside = [rank for rank in options.ranks if rank >= world]
    if (options.trace or options.nsys) and outside:
        raise ConfigError(
            "--ranks", f"the policy has {world} ranks", found=outside[0], remedy="count from 0"
        )
    if not options.nsys:
        return config.cluster
    if config.cluster.gpus_per_rank == 0:
        raise ConfigError(
            "--nsys", "shows what GPUs do, and this run has none", remedy="use --trace"
        )
    return config.cluster.model_copy(update={"nsys_ranks": options.ranks})


def _start(
    config: RunConfig, console: Console, stack: ExitStack
) -> tuple[Run, list[Member], list[Member]]:
    """(run, policy ranks, engines). An earlier profile is moved aside."""
    stop = stack.enter_context(stop_on_signals())
    # The state is saved where checkpoint.every says: not once more after the last step, and none is
    # best, as nothing is evaluated.
    checkpoint = config.checkpoint.model_copy(update={"keep_best": 0})
    endless = config.model_copy(update={"steps": config.steps + 1, "checkpoint": checkpoint})
    opened = open_run(config, console.print, fresh=True, accept_changes=False)
    folder = stack.enter_context(opened)
    tokenizer = ChatTokenizer(config.model.folder)
    if config.generator is None:
        if not isinstance(config.task, ChatTask | PreferenceTask):
            raise ConfigError("task.type", "holds no rows to train on")
        data = load_data(config.task, tokenizer)
        policy = stack.enter_context(policy_alone(config))
        saver = open_saver(endless, folder, policy, stop, console, stack)
        scorer = build_scorer(config, policy)
        run, _ = build_data_run(config, folder, data, policy, scorer, saver, console, stack)
        return run, _members(policy), []
    environment = build_environment(config, tokenizer)
    stack.callback(environment.close)
    console.print(f"[bold]{config.name}[/bold]: starting; the first step is a warm-up")
    policy, generator = stack.enter_context(cluster_backends(config))
    saver = open_saver(endless, folder, policy, stop, console, stack)
    run, _ = build_run(
        config, folder, tokenizer, environment, policy, generator, saver, console, stack
    )
    return run, _members(policy), _members(generator)


def _medians(before: Sequence[Sequence[Speeds]], after: Sequence[Sequence[Speeds]]) -> list[Speeds]:
    """Of what was measured on both sides of the steps: the machine may be shared."""
    return [median_of([*one, *two]) for one, two in zip(before, after, strict=True)]


def _members(proxy: object) -> list[Member]:
    if not isinstance(proxy, RayPolicy | RayGenerator):
        raise ConfigError("policy.type", "is not made of actors", found=type(proxy).__name__)
    return proxy.members


class Actors:
    """Ranks and engines, and the tools that are used beside them."""

    def __init__(self, ranks: list[Member], engines: list[Member], config: RunConfig) -> None:
        self._ranks = ranks
        self._engines = engines
        self._config = config
        self._deadline_s = config.cluster.step_deadline_s
        self.gpu = config.cluster.gpus_per_rank > 0

    def speeds(self, model: Architecture) -> tuple[list[list[Speeds]], list[list[Speeds]]]:
        """Rounds of ranks and of engines. On GPUs, where an engine's workers have processes of
        their own, an engine is taken to be as fast as a rank."""
        arguments = (benchmark_sizes(self._config, model, gpu=self.gpu),)
        ranks = self._use(self._ranks, _BENCHMARK, [arguments] * len(self._ranks), "measure")
        if self.gpu:
            return ranks, ranks[:1] * len(self._engines)
        each = [arguments] * len(self._engines)
        return ranks, self._use(self._engines, _BENCHMARK, each, "measure")

    def trace_paths(self, folder: Path, options: ProfileOptions) -> dict[str, Path]:
        """By actor, of those that are to be traced."""
        if not options.trace:
            return {}
        traced = [self._ranks[rank] for rank in options.ranks] + self._engines[:1]
        return {
            member.name: (folder / f"trace_{member.name.replace(' ', '_')}.json.gz").resolve()
            for member in traced
        }

    def start(self, traces: Mapping[str, Path]) -> None:
        """What has to begin with the first measured step."""
        self._trace(traces, "start")
        if self.gpu:
            self._use(self._ranks, _CUDA_WINDOW, [()] * len(self._ranks), "start")

    def stop(self, traces: Mapping[str, Path]) -> dict[str, float]:
        """Peak bytes on the device by rank; empty on CPUs."""
        self._trace(traces, "stop")
        if not self.gpu:
            return {}
        peaks = self._use(self._ranks, _CUDA_WINDOW, [()] * len(self._ranks), "stop")
        return {member.name: float(peak) for member, peak in zip(self._ranks, peaks)}

    def _trace(self, traces: Mapping[str, Path], verb: str) -> None:
        traced = [m for m in [*self._ranks, *self._engines] if m.name in traces]
        self._use(traced, _TRACER, [(traces[m.name],) for m in traced], verb)

    def _use(
        self,
        members: Sequence[Member],
        tool: str,
        arguments: Sequence[tuple[object, ...]],
        verb: str,
    ) -> list:
        return use_tool(members, tool, arguments, verb, self._deadline_s)


class WatchedAlgorithm:
    """An algorithm whose batches are kept for counting; see protocols.Algorithm."""

    def __init__(self, inner: Algorithm) -> None:
        self._inner = inner
        self._seen: list[tuple[tuple[RolloutGroup, ...], TrainBatch]] = []

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch:
        batch = self._inner.make_batch(groups, shape)
        self._seen.append((tuple(groups), batch))
        return batch

    def steps(self, updates: int) -> list[tuple[tuple[RolloutGroup, ...], TrainBatch]]:
        """The whole batch of every step. A step of several updates cuts it into as many parts
        afterwards.
        """
        return self._seen[:: 1 if updates == 1 else 1 + updates]

    @property
    def loss(self) -> Loss:
        """The inner one itself: it travels to the ranks, the batches must not."""
        return self._inner.loss


class NoEvaluation:
    @property
    def results(self) -> Sequence[Evaluation | HeldoutLoss]:
        return ()

    def evaluate_if_due(self, version: int) -> dict[str, float]:
        return {}


class StepMarks:
    """Notes when steps end, and starts the measured window after the warm-up."""

    def __init__(self, shown: Progress, warmup: int, start: Callable[[], None]) -> None:
        self._shown = shown
        self._warmup = warmup
        self._start = start
        self._done = 0
        self._ends: list[float] = []

    def advance(self, values: Mapping[str, float]) -> None:
        self._shown.advance(values)
        self._done += 1
        if self._done == self._warmup:
            self._start()
        if self._done >= self._warmup:
            self._ends.append(time.monotonic())

    def unix_times(self) -> tuple[float, ...]:
        offset = time.time() - time.monotonic()
        return tuple(end + offset for end in self._ends)
