"""`megatron-grpo eval`: the held-out problems of a run config, without training."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from megatron_grpo.config import GrpoConfig, ModelConfig, RunConfig
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.errors import ConfigError
from megatron_grpo.train.assemble import (
    build_environment,
    check_model_folder,
)
from megatron_grpo.train.backends import cluster_backends, reference_backends
from megatron_grpo.train.evaluate import Evaluation, Evaluator, scored
from megatron_grpo.train.evaluation_report import print_evaluation, write_evaluation
from megatron_grpo.train.loop import push_weights
from megatron_grpo.train.saver import POLICY_FOLDER


def run_evaluation(
    config: RunConfig, checkpoint: Path | None, output: Path | None, console: Console
) -> Evaluation:
    """Score the config's model, or a checkpoint, with the config's own backends.

    Args:
        checkpoint: a Hugging Face folder, or a folder that a policy saved during training.
        output: JSON file; evaluation.json beside the weights if None.

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
    saved = checkpoint
    if checkpoint is not None and (checkpoint / "config.json").is_file():
        config = config.model_copy(update={"model": ModelConfig(path=checkpoint)})
        saved = None
    check_model_folder(config.model.folder)
    # Scores need no frozen model, and the algorithm none of its settings.
    config = config.model_copy(update={"algorithm": GrpoConfig()})
    where = config.model.folder if saved is None else saved
    with ExitStack() as stack:
        tokenizer = ChatTokenizer(config.model.folder)
        environment = build_environment(config, tokenizer)
        stack.callback(environment.close)
        backends = reference_backends if config.policy.type == "reference" else cluster_backends
        policy, generator = stack.enter_context(backends(config))
        if saved is not None:
            policy.load(saved / POLICY_FOLDER if (saved / POLICY_FOLDER).is_dir() else saved)
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
    path = output or where / "evaluation.json"
    write_evaluation(result, problems, path)
    console.print(f"every sample is in [bold]{path}[/bold]")
    return result
