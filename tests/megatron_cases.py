"""What the ranks of `megatron_ranks` run: a MegatronRank on one batch, and its results as numpy
arrays.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch, token_weights
from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch, masked_sum
from megatron_grpo.config import MegatronPolicyConfig, ModelConfig
from megatron_grpo.errors import ConfigError, GrpoError
from megatron_grpo.policy.megatron.backend import MegatronRank
from megatron_grpo.policy.megatron.export import gathered_tensors
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.rendezvous import Rendezvous

DEADLINE_S = 45.0
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RatioLoss:
    """A loss with everything a real one has: ratios, advantages, entropy, per-token weights,
    statistics.
    """

    entropy_coefficient: float = 0.01

    def per_token(self, logprob_T: Tensor, entropy_T: Tensor, mb: MicroBatch) -> Tensor:
        ratio_T = (logprob_T - mb.behavior_logprob_T).exp()
        return -ratio_T * mb.advantage_T - self.entropy_coefficient * entropy_T

    def __call__(self, logprob_T: Tensor, entropy_T: Tensor, mb: MicroBatch) -> LossOutput:
        assert len(logprob_T) == len(entropy_T) == mb.num_tokens
        loss = (mb.loss_weight_T * self.per_token(logprob_T, entropy_T, mb)).sum()
        sums = {
            "entropy": masked_sum(entropy_T, mb.mask_T),
            "logprob": masked_sum(logprob_T, mb.mask_T),
        }
        largest = torch.where(mb.mask_T, logprob_T.detach(), -torch.inf).max()
        return LossOutput(loss, sums, {"logprob": largest})


@dataclass(frozen=True)
class Case:
    """One layout on one batch.

    Attributes:
        parallel: keys of ParallelConfig.
        sequences: the batch, cut here for the layout's own shape.
    """

    folder: Path
    parallel: dict[str, Any]
    sequences: tuple[TokenSequence, ...]
    temperature: float = 1.0
    microbatch_tokens: int = 32
    policy: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    loss: RatioLoss = RatioLoss()
    frozen: Path | None = None

    @property
    def config(self) -> MegatronPolicyConfig:
        return MegatronPolicyConfig.model_validate(
            {
                "dtype": "float32",
                "microbatch_tokens": self.microbatch_tokens,
                "parallel": self.parallel,
                **self.policy,
            }
        )

    def batch(self, shape: BatchShape) -> TrainBatch:
        return make_batch(self.sequences, shape, self.temperature)


def make_batch(
    sequences: tuple[TokenSequence, ...], shape: BatchShape, temperature: float = 1.0
) -> TrainBatch:
    trained = np.array([s.num_trained_tokens for s in sequences])
    return make_train_batch(
        sequences,
        shape,
        token_weight_S=token_weights(trained, "token_mean"),
        temperature=temperature,
        metrics={},
    )


def random_sequences(
    lengths: list[tuple[int, int]], vocab: int = 130, seed: int = 0
) -> tuple[TokenSequence, ...]:
    """(prompt, response) lengths -> random sequences with advantages and behaviour logprobs.

    Ids start at 3: Hugging Face gives the padding id's embedding no gradient, Megatron does.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    for prompt, response in lengths:
        n = prompt + response
        sequences.append(
            TokenSequence(
                token_ids=rng.integers(3, vocab, n).astype(np.int32),
                loss_mask=np.arange(n) >= prompt,
                advantages=np.full(n, rng.normal(), np.float32),
                behavior_logprobs=(-4.5 + 0.3 * rng.normal(size=n)).astype(np.float32),
            )
        )
    return tuple(sequences)


LENGTHS = [(4, 6), (3, 12), (9, 2), (2, 1), (5, 13), (7, 4), (2, 9)]


@contextmanager
def running(rank: int, world: int, case: Case, folder: Path) -> Iterator[MegatronRank]:
    """A started MegatronRank. `folder` is where rank 0 leaves its address for the others."""
    policy = MegatronRank(
        case.config, ModelConfig(path=case.folder), 1, rank, world, DEADLINE_S, case.frozen
    )
    address = folder / "rendezvous"
    if rank == 0:
        opened = policy.open_rendezvous()
        (folder / "writing").write_text(f"{opened.host} {opened.port}")
        (folder / "writing").rename(address)
    try:
        policy.start(_wait_for(address))
        yield policy
    finally:
        policy.close()
        gc.collect()


def _wait_for(address: Path) -> Rendezvous:
    until = time.monotonic() + DEADLINE_S
    while not address.exists():
        assert time.monotonic() < until, "rank 0 did not open its rendezvous"
        time.sleep(0.01)
    host, port = address.read_text().split()
    return Rendezvous(host, int(port))


def gradients(policy: MegatronRank) -> Arrays:
    """Summed gradients under Hugging Face names, on the root of each stage."""
    parts = policy._started
    bound = [
        replace(item, parameter=torch.nn.Parameter(item.parameter.main_grad.clone()))
        for item in parts.bound
        if item.parameter.requires_grad
    ]
    return {n: t.numpy().copy() for n, t in gathered_tensors(bound, parts.spec, None)}


def weights(policy: MegatronRank) -> Arrays:
    parts = policy._started
    policy._sync_parameters()
    return {n: t.numpy().copy() for n, t in gathered_tensors(parts.bound, parts.spec, None)}


def step_case(rank: int, world: int, case: Case, folder: Path) -> dict[str, Any]:
    """One forward_backward with its gradients, then `steps` optimizer steps on the same batch."""
    with running(rank, world, case, folder) as policy:
        batch = case.batch(policy.batch_shape)
        mine = batch.replicas[policy.data_parallel_rank]
        scored = policy.logprobs(mine, case.temperature)
        result: dict[str, Any] = {"logprobs": scored, "updates": [], "stats": []}
        for step in range(case.steps):
            result["stats"].append(policy.forward_backward(mine, case.temperature, case.loss))
            if step == 0 and not policy._config.distributed_optimizer:
                if policy._started.engine.needs_sum:
                    policy._started.updater.sum_gradients()
                    policy._started.engine._overlap = True  # already summed
                result["gradients"] = gradients(policy)
            result["updates"].append(policy.optimizer_step())
            policy._started.engine._overlap = policy._config.overlap_grad_reduce
        result["weights"] = weights(policy)
        result["tied_copies"] = [
            item.parameter.detach().numpy().copy()
            for item in policy._started.bound
            if item.rule.megatron in ("embedding.word_embeddings.weight", "output_layer.weight")
        ]
        return result


def merged(results: list[dict[str, Any]], key: str) -> Arrays:
    """Named arrays of all roots."""
    return {name: array for result in results for name, array in result[key].items()}


def score_case(rank: int, world: int, cases: list[Case], folder: Path) -> list[Any]:
    """Log-probabilities of several batches under one layout: (replica's results, per case)."""
    with running(rank, world, cases[0], folder) as policy:
        results = []
        for case in cases:
            batch = case.batch(policy.batch_shape)
            mine = batch.replicas[policy.data_parallel_rank]
            results.append(policy.logprobs(mine, case.temperature))
        return results


def train_case(rank: int, world: int, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Statistics and gradients of several batches under one layout, each from zero."""
    with running(rank, world, cases[0], folder) as policy:
        results = []
        for case in cases:
            batch = case.batch(policy.batch_shape)
            mine = batch.replicas[policy.data_parallel_rank]
            stats = policy.forward_backward(mine, case.temperature, case.loss)
            policy._started.updater.sum_gradients()
            results.append({"stats": stats, "gradients": gradients(policy)})
            policy._started.updater.zero_grad()
        return results


def accumulate_case(rank: int, world: int, case: Case, folder: Path) -> dict[str, Any]:
    """The same batch twice, then one step; and once what is left behind."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        first = policy.forward_backward(mine, 1.0, case.loss)
        problem = ""
        try:
            policy.forward_backward(mine, 1.0, case.loss)
        except ConfigError as error:
            problem = str(error)
        update = policy.optimizer_step()
        policy.forward_backward(mine, 1.0, case.loss)
        again = policy.optimizer_step()
        return {"stats": first, "problem": problem, "norms": (update.grad_norm, again.grad_norm)}


@dataclass(frozen=True)
class PoisonedLoss(RatioLoss):
    """Not a number in the gradient, as from an infinite ratio."""

    def __call__(self, logprob_T: Tensor, entropy_T: Tensor, mb: MicroBatch) -> LossOutput:
        return LossOutput((logprob_T * torch.inf * mb.loss_weight_T).sum(), {}, {})


def poison_case(rank: int, world: int, case: Case, folder: Path) -> tuple[str, bool, float]:
    """A step with non-finite gradients: the error, whether weights stayed, the next norm."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        before = weights(policy)
        policy.forward_backward(mine, 1.0, PoisonedLoss())
        problem = ""
        try:
            policy.optimizer_step()
        except GrpoError as error:
            problem = str(error)
        after = weights(policy)
        same = all(np.array_equal(before[name], after[name]) for name in before)
        policy.forward_backward(mine, 1.0, case.loss)
        return problem, same, policy.optimizer_step().grad_norm


def padding_case(rank: int, world: int, case: Case, folder: Path) -> dict[str, Any]:
    """The padding rows after two steps with weight decay, and scores with them at +10."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        tables = [
            item.parameter
            for item in policy._started.bound
            if item.rule.megatron in ("embedding.word_embeddings.weight", "output_layer.weight")
        ]
        shard = tables[0].shape[0]
        real = min(shard, max(0, 130 - rank * shard))
        policy.forward_backward(mine, 1.0, case.loss)
        no_gradient = not any(vars(table)["main_grad"][real:].any() for table in tables)
        policy.optimizer_step()
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        plain = policy.logprobs(mine, 1.0)
        still_zero = not any(table[real:].any() for table in tables)
        with torch.no_grad():
            for table in tables:
                table[real:] = 10.0
        return {
            "padding": shard - real,
            "plain": plain,
            "poisoned": policy.logprobs(mine, 1.0),
            "no_gradient": no_gradient,
            "still_zero": still_zero,
            "exported": {n: a.shape for n, a in weights(policy).items()},
        }


def export_case(rank: int, world: int, case: Case, folder: Path, target: Path) -> None:
    """Load and export, untouched."""
    with running(rank, world, case, folder) as policy:
        policy.export(target)


def exchange_case(
    rank: int, world: int, case: Case, folder: Path, target: Path, exchanges: list[Exchange]
) -> list[PushReport]:
    """Train a step, export, then push to one fleet after the other."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        policy.export(target)
        reports = []
        for exchange in exchanges:
            policy.connect_weights(exchange)
            reports.append(policy.push_weights(1))
        return reports


def biases_case(rank: int, world: int, case: Case, folder: Path) -> Arrays:
    """The routers' biases on this rank after a step, by name."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        exact = [item for item in policy._started.bound if item.rule.exact]
        return {item.hf_names[0]: item.parameter.numpy().copy() for item in exact}


def norms_case(rank: int, world: int, case: Case, folder: Path) -> list[float]:
    """eps of every norm module."""
    with running(rank, world, case, folder) as policy:
        modules = [m for chunk in policy._started.wrapped for m in chunk.modules()]
        return [m.eps for m in modules if isinstance(m, torch.nn.RMSNorm)]


def save_case(rank: int, world: int, case: Case, folder: Path, target: Path) -> Arrays:
    """Two steps, save, a third step."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        for step in range(3):
            if step == 2:
                policy.begin_save(target)
            policy.forward_backward(mine, 1.0, case.loss)
            policy.optimizer_step()
        policy.finish_save()  # it was written while the third step changed the weights
        return weights(policy)


def resume_case(
    rank: int, world: int, case: Case, folder: Path, target: Path
) -> tuple[Arrays, int, float]:
    """Load, then the third step."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.load(target)
        policy.forward_backward(mine, 1.0, case.loss)
        update = policy.optimizer_step()
        return weights(policy), policy._started.updater.steps, update.learning_rate
