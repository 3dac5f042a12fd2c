"""`megatron-grpo eval`: the held-out problems of a run config, without training."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from megatron_grpo.config import GrpoConfig, ModelConfig, RunConfig
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.errors import CheckpointError, ConfigError
from megatron_grpo.train.assemble import (
    build_environment,
    check_model_folder,
)
from megatron_grpo.train.backends import cluster_backends, reference_backends
from megatron_grpo.train.checkpoints import (
    Checkpoint,
    list_checkpoints,
    newest_whole,
    problem_of,
)
from megatron_grpo.train.evaluate import Evaluation, Evaluator, scored
from megatron_grpo.train.evaluation_report import print_evaluation, write_evaluation
from megatron_grpo.train.loop import push_weights
from megatron_grpo.train.run_folder import CHECKPOINTS
from megatron_grpo.train.saver import POLICY_FOLDER


def run_evaluation(
    config: RunConfig, checkpoint: Path | None, output: Path | None, console: Console
) -> Evaluation:
    """Score the config's model, or a checkpoint, with the config's own backends.

    Args:
        checkpoint: a Hugging Face folder, a checkpoint of a run (`checkpoints/step-...`, or what
            a policy saved), or a run's folder, whose newest intact checkpoint is meant.
        output: JSON file; if None, evaluation.json beside the weights, or in the run's folder.

    Raises:
        GrpoError: one line saying what failed, where, and what to do.
    """
    if config.generator is None:
        raise ConfigError(
            "algorithm.type",
            "samples nothing, so there is no answer to score",
            found=config.algorithm.type,
            remedy="give a config that trains with grpo",
        )
    where, saved = config.model.folder, None
    if checkpoint is not None:
        where = find_checkpoint(checkpoint, console)
        if _is_hugging_face(where):
            config = config.model_copy(update={"model": ModelConfig(path=where)})
        else:
            saved = _policy_files(where, config)
    check_model_folder(config.model.folder)
    # Scores need no frozen model, and the algorithm none of its settings.
    config = config.model_copy(update={"algorithm": GrpoConfig()})
    with ExitStack() as stack:
        tokenizer = ChatTokenizer(config.model.folder)
        environment = build_environment(config, tokenizer)
        stack.callback(environment.close)
        backends = reference_backends if config.policy.type == "reference" else cluster_backends
        policy, generator = stack.enter_context(backends(config))
        if saved is not None:
            policy.load(saved)
        push_weights(policy, generator, 0, config.weights.deadline_s)
        evaluator = Evaluator(
            config.evaluation,
            environment,
            generator,
            tokenizer.decode,
            config.sampling.max_new_tokens,
            0,
            config.cluster.step_deadline_s,
            config.seed,
            report=lambda *_: None,
        )
        problems = evaluator.sample()
    result = scored(0, problems)
    print_evaluation(result, problems, console, title=f"{where}")
    path = output or _beside(where)
    write_evaluation(result, problems, path)
    console.print(f"every sample is in [bold]{path}[/bold]")
    return result


def find_checkpoint(given: Path, console: Console) -> Path:
    """The newest intact checkpoint of a run's folder; anything else as it is.

    Raises:
        ConfigError: no such folder.
        CheckpointError: the run, or the checkpoint, has nothing intact.
    """
    if not given.is_dir():
        raise ConfigError("--checkpoint", "is no folder", found=str(given), remedy="check the path")
    whole = _manifest_of(given)
    if whole is not None:
        problem = problem_of(whole)
        if problem:
            raise CheckpointError(str(given), problem, remedy="give another checkpoint of the run")
        return given
    if not (given / CHECKPOINTS).is_dir():
        return given
    newest = newest_whole(given / CHECKPOINTS, console.print)
    if newest is None:
        raise CheckpointError(
            str(given), "has no checkpoint yet", remedy="wait for one, or give the model's folder"
        )
    console.print(f"scoring the run's checkpoint after step {newest.step}")
    return newest.folder


def _manifest_of(folder: Path) -> Checkpoint | None:
    found = [one for one in list_checkpoints(folder.parent) if one.folder == folder]
    return found[0] if found else None


def _is_hugging_face(folder: Path) -> bool:
    """Megatron's own checkpoints hold a config.json too."""
    return (folder / "config.json").is_file() and not (folder / "metadata.json").is_file()


def _policy_files(folder: Path, config: RunConfig) -> Path:
    """What `policy.load` reads.

    Raises:
        CheckpointError: another kind of policy saved it.
    """
    files = folder / POLICY_FOLDER if (folder / POLICY_FOLDER).is_dir() else folder
    kinds = {"metadata.json": "megatron", "state.json": "reference"}
    kind = next((kind for name, kind in kinds.items() if (files / name).is_file()), "")
    if kind != config.policy.type:
        raise CheckpointError(
            str(folder),
            f"was saved by a {kind} policy" if kind else "is neither a model nor a checkpoint",
            found=None if not kind else f"policy.type {config.policy.type}",
            remedy="give the config it was trained with, or a Hugging Face folder",
        )
    return files


def _beside(where: Path) -> Path:
    """Not inside a checkpoint of a run, which goes when newer ones come."""
    if where.parent.name == CHECKPOINTS:
        return where.parent.parent / f"evaluation-{where.name}.json"
    return where / "evaluation.json"
