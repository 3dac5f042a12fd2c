"""What every protocols.Algorithm must do. Subclass it, name the class Test..., give `algorithm`."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest
import torch
from samples import make_groups
from torch import Tensor

from megatron_grpo.batch import BatchShape, MicroBatch, TrainBatch
from megatron_grpo.errors import GrpoError
from megatron_grpo.protocols import Algorithm

VOCAB = 130
SHAPES = [
    BatchShape(),
    BatchShape(microbatch_tokens=16),
    BatchShape(data_parallel=2, microbatch_tokens=24, sequence_multiple=4),
    BatchShape(data_parallel=3, microbatch_tokens=32, sequence_multiple=2, microbatch_multiple=2),
]


def microbatches_of(batch: TrainBatch) -> list[MicroBatch]:
    return [microbatch for replica in batch.replicas for microbatch in replica]


def loss_and_gradient(algorithm: Algorithm, batch: TrainBatch) -> tuple[float, Tensor]:
    """Of a model whose log-probability of a token is an entry of a table; the table's gradient."""
    random = torch.Generator().manual_seed(3)
    table = -4 * torch.rand(VOCAB, generator=random, dtype=torch.float64)
    table.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in microbatches_of(batch):
        logprob_T = table[microbatch.target_ids_T.clamp(min=0)]
        total = total + algorithm.loss(logprob_T, -logprob_T.exp() * logprob_T, microbatch).loss
    [gradient] = torch.autograd.grad(total, table)
    return float(total), gradient


class AlgorithmContract:
    """`groups` may be overridden by algorithms with groups of another form."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        raise NotImplementedError("give the algorithm under test")

    @pytest.fixture
    def groups(self):
        return make_groups(num_groups=5, group_size=4, seed=5)

    def test_every_sampled_token_is_a_target_once_unless_it_is_masked(self, algorithm, groups):
        sampled = sorted(
            int(token)
            for group in groups
            for rollout in group.rollouts
            for token in rollout.token_ids[rollout.loss_mask]
        )
        for shape in SHAPES:
            found = sorted(
                token
                for microbatch in microbatches_of(algorithm.make_batch(groups, shape))
                for token in microbatch.target_ids_T[microbatch.mask_T].tolist()
            )
            assert found == sampled

    def test_the_batch_fits_the_shape_and_says_what_it_holds(self, algorithm, groups):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for shape in SHAPES:
            batch = algorithm.make_batch(groups, shape)
            assert len(batch.replicas) == shape.data_parallel
            assert len({len(replica) for replica in batch.replicas}) == 1
            assert len(batch.replicas[0]) % shape.microbatch_multiple == 0
            assert max(mb.num_tokens for mb in microbatches_of(batch)) <= shape.microbatch_tokens
            assert batch.num_sequences == len(rollouts)
            assert batch.num_tokens == sum(rollout.num_tokens for rollout in rollouts)
            trained = sum(int(mb.mask_T.sum()) for mb in microbatches_of(batch))
            assert batch.num_loss_tokens == trained

    def test_d1_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(self, algorithm, groups):
        loss, gradient = loss_and_gradient(algorithm, algorithm.make_batch(groups, SHAPES[0]))
        assert gradient.abs().max() > 1e-4
        for shape in SHAPES[1:]:
            again, other = loss_and_gradient(algorithm, algorithm.make_batch(groups, shape))
            assert again == pytest.approx(loss, rel=1e-6)
            torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-9)

    def test_loss_and_gradient_do_not_depend_on_the_order_of_groups(self, algorithm, groups):
        loss, gradient = loss_and_gradient(algorithm, algorithm.make_batch(groups, SHAPES[1]))
        turned = algorithm.make_batch(groups[::-1], SHAPES[1])
        again, other = loss_and_gradient(algorithm, turned)
        assert again == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-9)

    def test_d4_values_outside_the_mask_reach_neither_loss_nor_statistics(self, algorithm, groups):
        batch = algorithm.make_batch(groups, SHAPES[2])
        for microbatch in microbatches_of(batch):
            logprob_T = torch.linspace(-3, -0.1, microbatch.num_tokens)
            entropy_T = torch.linspace(0.1, 3, microbatch.num_tokens)
            noise = torch.full_like(logprob_T, float("nan"))
            clean = algorithm.loss(logprob_T, entropy_T, microbatch)
            dirty_logprob_T = torch.where(microbatch.mask_T, logprob_T, noise).requires_grad_()
            dirty_entropy_T = torch.where(microbatch.mask_T, entropy_T, noise)
            dirty = algorithm.loss(dirty_logprob_T, dirty_entropy_T, microbatch)
            dirty.loss.backward()
            assert dirty.loss.item() == clean.loss.item()
            for name, value in clean.sums.items():
                assert dirty.sums[name].tolist() == value.tolist()
                assert not value.requires_grad
            for name, value in clean.maxima.items():
                assert dirty.maxima[name].item() == value.item()
            assert dirty_logprob_T.grad is not None
            assert dirty_logprob_T.grad[~microbatch.mask_T].tolist() == [0.0] * int(
                (~microbatch.mask_T).sum()
            )

    def test_every_microbatch_reports_the_same_names(self, algorithm, groups):
        names = set()
        for microbatch in microbatches_of(algorithm.make_batch(groups, SHAPES[3])):
            zeros = torch.zeros(microbatch.num_tokens)
            output = algorithm.loss(zeros, zeros, microbatch)
            names.add((tuple(output.sums), tuple(output.maxima)))
        assert len(names) == 1

    def test_the_same_groups_give_the_same_batch(self, algorithm, groups):
        first = microbatches_of(algorithm.make_batch(groups, SHAPES[2]))
        second = microbatches_of(algorithm.make_batch(groups, SHAPES[2]))
        for one, two in zip(first, second, strict=True):
            for name in (field.name for field in fields(MicroBatch)):
                a, b = getattr(one, name), getattr(two, name)
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b

    def test_the_loss_survives_pickling_as_it_crosses_to_the_ranks(self, algorithm, groups):
        batch = algorithm.make_batch(groups, SHAPES[1])
        copied_loss, copied_batch = pickle.loads(pickle.dumps((algorithm.loss, batch)))
        for microbatch, copy in zip(
            microbatches_of(batch), microbatches_of(copied_batch), strict=True
        ):
            logprob_T = torch.linspace(-3, -0.1, microbatch.num_tokens)
            ours = algorithm.loss(logprob_T, logprob_T, microbatch)
            theirs = copied_loss(logprob_T, logprob_T, copy)
            assert ours.loss.item() == theirs.loss.item()

    def test_no_groups_at_all_are_refused(self, algorithm):
        with pytest.raises(GrpoError):
            algorithm.make_batch([], BatchShape())
