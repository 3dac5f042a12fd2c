"""What every protocols.PolicyBackend must do, held against plain Hugging Face and autograd.

Subclass it, name the class Test..., and give the fixtures `folder` (the tiny checkpoint the policy
was made from), `policy` (made once per class, with OPTIMIZER and a small micro-batch), `take_push`.
Each test starts from the weights and optimizer state the policy was born with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from samples import make_groups
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_grpo.algorithms import Grpo
from megatron_grpo.batch import LossOutput, MicroBatch, TrainBatch
from megatron_grpo.config import GrpoConfig, OptimizerConfig
from megatron_grpo.errors import CheckpointError, PolicyError
from megatron_grpo.protocols import PolicyBackend, PushReport

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    min_learning_rate=1e-3,
    schedule="cosine",
    warmup_steps=2,
    decay_steps=6,
    weight_decay=0.1,
    max_grad_norm=0.05,
)
TEMPERATURE = 0.7
GRPO = Grpo(GrpoConfig(dual_clip=3.0, entropy_coefficient=0.1), temperature=TEMPERATURE)


@dataclasses.dataclass(frozen=True)
class NotANumber:
    """A loss that poisons the gradient."""

    def __call__(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput:
        return LossOutput(logprob_T.sum() * float("nan"), {}, {})


class Oracle:
    """The tiny model, trained by the book: whole sequences, one at a time, torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.get_input_embeddings().padding_idx = None  # or one row's gradient is left out
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            eps=OPTIMIZER.eps,
        )

    def score(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy), each [L - 1], of tokens 1 .. L - 1 of one sequence."""
        logits = self.model(input_ids=token_ids[None].long()).logits[0, :-1] / TEMPERATURE
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, token_ids[1:, None].long())[:, 0], entropy

    def backward(self, batch: TrainBatch) -> float:
        """Gradients of the batch, sequence by sequence; returns the loss."""
        total = 0.0
        for microbatch in (mb for replica in batch.replicas for mb in replica):
            bounds = microbatch.cu_seqlens.tolist()
            logprob_T = torch.zeros(microbatch.num_tokens)
            entropy_T = torch.zeros(microbatch.num_tokens)
            for start, length in zip(bounds, microbatch.sequence_tokens, strict=False):
                ids = microbatch.token_ids_T[start : start + length]
                logprob, entropy = self.score(ids)
                where = torch.arange(start, start + length - 1)
                logprob_T = logprob_T.index_put((where,), logprob)
                entropy_T = entropy_T.index_put((where,), entropy)
            loss = GRPO.loss(logprob_T, entropy_T, microbatch).loss
            loss.backward()
            total += float(loss)
        return total

    def gradient_norm(self) -> float:
        squares = [
            p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None
        ]
        return float(torch.stack(squares).sum().sqrt())

    def step(self, rate: float) -> None:
        norm = self.gradient_norm()
        for parameter in self.model.parameters():
            if parameter.grad is not None and norm > 0.05:
                parameter.grad *= 0.05 / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class PolicyContract:
    """See the module's docstring. `tolerance` is relative, for losses and gradients in fp32."""

    tolerance = 1e-5

    @pytest.fixture(scope="class")
    def folder(self) -> Path:
        raise NotImplementedError("give the tiny Hugging Face folder")

    @pytest.fixture(scope="class")
    def policy(self) -> PolicyBackend:
        raise NotImplementedError("give the policy under test, made from `folder`")

    @pytest.fixture
    def take_push(self) -> Callable[[int], tuple[PushReport, dict[str, Tensor]]]:
        """A function of a version that lets the policy push it, and returns what was received."""
        raise NotImplementedError("give a push and its receiver")

    @pytest.fixture(scope="class")
    def birth(self, policy, tmp_path_factory) -> Path:
        path = tmp_path_factory.mktemp("birth") / "checkpoint"
        policy.save(path).result()
        return path

    @pytest.fixture(autouse=True)
    def newborn(self, policy, birth) -> None:
        policy.load(birth)

    @pytest.fixture
    def oracle(self, folder) -> Oracle:
        return Oracle(folder)

    def batch(self, policy: PolicyBackend, seed: int = 1) -> TrainBatch:
        """On-policy up to noise: a ratio near 1 leaves some tokens free and clips others."""
        groups = make_groups(num_groups=3, group_size=4, seed=seed)
        batch = GRPO.make_batch(groups, policy.batch_shape)
        scored = policy.logprobs(batch)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        random = torch.Generator().manual_seed(seed)
        for rollout, logprob in zip(rollouts, scored, strict=True):
            noise = 0.3 * torch.randn(len(logprob), generator=random).numpy()
            sampled = rollout.loss_mask[1:]
            rollout.behavior_logprobs[1:][sampled] = (logprob + noise)[sampled]
        return GRPO.make_batch(groups, policy.batch_shape)

    def exported(self, policy: PolicyBackend, folder: Path) -> dict[str, Tensor]:
        policy.export(folder)
        found: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= load_file(file)
        return found

    def train(self, policy: PolicyBackend, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            losses.append(policy.forward_backward(self.batch(policy, seed), GRPO.loss).loss)
            policy.optimizer_step()
        return losses

    def test_a1_log_probabilities_equal_hugging_face_at_the_temperature(self, policy, oracle):
        groups = make_groups(num_groups=3, group_size=4, seed=2)
        found = policy.logprobs(GRPO.make_batch(groups, policy.batch_shape))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout, values in zip(rollouts, found, strict=True):
            with torch.no_grad():
                expected, _ = oracle.score(torch.from_numpy(rollout.token_ids))
            torch.testing.assert_close(torch.from_numpy(values), expected, rtol=0, atol=1e-4)

    def test_loss_and_gradient_norm_equal_autograd_on_the_plain_model(self, policy, oracle):
        batch = self.batch(policy)
        stats = policy.forward_backward(batch, GRPO.loss)
        update = policy.optimizer_step()
        assert stats.loss == pytest.approx(oracle.backward(batch), rel=self.tolerance)
        assert update.grad_norm == pytest.approx(oracle.gradient_norm(), rel=10 * self.tolerance)
        assert update.grad_norm > 0.05  # so that the next test really clips

    def test_weights_after_optimizer_steps_equal_adamw_on_the_plain_model(
        self, policy, oracle, tmp_path
    ):
        # Rates by hand: warm-up 1/2 and 2/2 of 1e-2, then the peak itself.
        for step, rate in enumerate([5e-3, 1e-2, 1e-2]):
            batch = self.batch(policy, seed=step)
            policy.forward_backward(batch, GRPO.loss)
            oracle.backward(batch)
            assert policy.optimizer_step().learning_rate == pytest.approx(rate, rel=1e-9)
            oracle.step(rate)
        found = self.exported(policy, tmp_path / "out")
        expected = oracle.weights()
        assert set(found) == set(expected)
        for name, value in found.items():
            # Adam divides by the gradient's own size: where that is noise, so is its direction.
            difference = (value - expected[name]).abs()
            assert difference.mean() < 2e-5, name
            assert difference.max() < 2e-3, name

    def test_a_reset_optimizer_has_neither_moments_nor_steps_and_the_weights_it_had(
        self, policy, oracle, folder, tmp_path
    ):
        self.train(policy, range(0, 2))
        trained = self.exported(policy, tmp_path / "trained")
        policy.reset_optimizer()
        kept = self.exported(policy, tmp_path / "kept")
        assert all(torch.equal(kept[name], value) for name, value in trained.items())
        with torch.no_grad():
            for name, parameter in oracle.weights().items():
                parameter.copy_(trained[name])
        for step, rate in enumerate([5e-3, 1e-2]):  # the warm-up comes again
            batch = self.batch(policy, seed=7 + step)
            policy.forward_backward(batch, GRPO.loss)
            oracle.backward(batch)
            assert policy.optimizer_step().learning_rate == pytest.approx(rate, rel=1e-9)
            oracle.step(rate)
        found = self.exported(policy, tmp_path / "out")
        for name, value in oracle.weights().items():
            difference = (found[name] - value).abs()
            assert difference.mean() < 2e-5, name
            assert difference.max() < 2e-3, name

    def test_statistics_are_means_over_all_trained_tokens(self, policy, oracle):
        batch = self.batch(policy)
        stats = policy.forward_backward(batch, GRPO.loss)
        entropies, differences = [], []
        with torch.no_grad():
            for microbatch in (mb for replica in batch.replicas for mb in replica):
                bounds = microbatch.cu_seqlens.tolist()
                for start, length in zip(bounds, microbatch.sequence_tokens, strict=False):
                    here = slice(start, start + length - 1)
                    logprob, entropy = oracle.score(microbatch.token_ids_T[start : start + length])
                    mask = microbatch.mask_T[here]
                    entropies += entropy[mask].tolist()
                    behavior = microbatch.behavior_logprob_T[here]
                    differences += (logprob - behavior)[mask].abs().tolist()
        count = len(entropies)
        assert count == batch.num_loss_tokens
        assert stats.means["entropy"] == pytest.approx(sum(entropies) / count, rel=1e-4)
        mean = sum(differences) / count
        assert stats.means["logprob_abs_diff_mean"] == pytest.approx(mean, rel=1e-3)
        assert stats.maxima["logprob_abs_diff_max"] == pytest.approx(max(differences), rel=1e-3)

    def test_two_passes_give_twice_the_gradient_and_the_step_clears_it(self, policy, birth):
        batch = self.batch(policy)
        policy.forward_backward(batch, GRPO.loss)
        once = policy.optimizer_step().grad_norm
        policy.load(birth)
        policy.forward_backward(batch, GRPO.loss)
        policy.forward_backward(batch, GRPO.loss)
        assert policy.optimizer_step().grad_norm == pytest.approx(2 * once, rel=1e-5)
        policy.load(birth)
        policy.forward_backward(batch, GRPO.loss)
        assert policy.optimizer_step().grad_norm == pytest.approx(once, rel=1e-6)

    def test_a_gradient_that_is_not_finite_raises_and_moves_nothing(self, policy, tmp_path):
        batch = self.batch(policy)
        before = self.exported(policy, tmp_path / "before")
        policy.forward_backward(batch, NotANumber())
        with pytest.raises(PolicyError, match="not finite"):
            policy.optimizer_step()
        after = self.exported(policy, tmp_path / "after")
        assert all(torch.equal(after[name], value) for name, value in before.items())
        policy.forward_backward(batch, GRPO.loss)  # and the poison is gone
        policy.optimizer_step()

    def test_d2_a_batch_without_loss_has_zero_loss_and_zero_gradient(self, policy):
        groups = make_groups(num_groups=2, group_size=2, seed=4)
        for group in groups:
            for rollout in group.rollouts:
                rollout.loss_mask[:] = False
        stats = policy.forward_backward(GRPO.make_batch(groups, policy.batch_shape), GRPO.loss)
        assert stats.loss == 0.0
        assert all(value == 0.0 for value in stats.means.values())
        assert policy.optimizer_step().grad_norm == 0.0

    def test_export_has_the_sources_tensors_bitwise_and_loads_in_hugging_face(
        self, policy, folder, tmp_path
    ):
        found = self.exported(policy, tmp_path / "out")
        source = load_file(folder / "model.safetensors")
        assert set(found) == set(source)
        assert all(torch.equal(found[name], value) for name, value in source.items())
        ids = torch.tensor([[5, 6, 7, 8]])
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        expected = Oracle(folder).model(ids).logits
        torch.testing.assert_close(reloaded(ids).logits, expected, rtol=0, atol=1e-5)

    def test_a_push_delivers_the_current_weights_under_its_version(
        self, policy, take_push, tmp_path
    ):
        for version in (3, 4):
            self.train(policy, range(version, version + 1))
            report, received = take_push(version)
            expected = self.exported(policy, tmp_path / str(version))
            assert (report.version, report.num_tensors) == (version, len(expected))
            assert report.sent_bytes == sum(value.nbytes for value in received.values())
            assert set(received) == set(expected)
            for name, value in received.items():
                assert torch.equal(value.cpu().to(expected[name].dtype), expected[name]), name

    def test_h4_training_goes_on_from_a_save_as_if_nothing_had_happened(self, policy, tmp_path):
        self.train(policy, range(0, 2))
        policy.save(tmp_path / "checkpoint").result()
        straight = self.train(policy, range(2, 5))
        weights = self.exported(policy, tmp_path / "straight")
        policy.load(tmp_path / "checkpoint")
        assert self.train(policy, range(2, 5)) == straight
        again = self.exported(policy, tmp_path / "again")
        assert all(torch.equal(again[name], value) for name, value in weights.items())

    def test_h1_the_learning_rate_goes_on_where_the_save_left_it(self, policy, tmp_path):
        batch = self.batch(policy)

        def rates(count: int) -> list[float]:
            found = []
            for _ in range(count):
                policy.forward_backward(batch, GRPO.loss)
                found.append(policy.optimizer_step().learning_rate)
            return found

        # Cosine from 1e-2 to 1e-3 over steps 2 .. 6: 1e-3 + 9e-3 (1 + cos(pi k / 4)) / 2
        expected = [5e-3, 1e-2, 1e-2, 8.681981e-3, 5.5e-3, 2.318019e-3, 1e-3]
        first = rates(3)
        policy.save(tmp_path / "checkpoint").result()
        assert first + rates(4) == pytest.approx(expected, rel=1e-6)
        policy.load(tmp_path / "checkpoint")
        assert rates(1) == pytest.approx(expected[3:4], rel=1e-6)

    def test_a_folder_without_a_whole_checkpoint_is_refused(self, policy, tmp_path):
        with pytest.raises(CheckpointError):
            policy.load(tmp_path)
