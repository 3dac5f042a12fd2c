"""The reference policy: the contract, and what is its own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from contracts.policy import GRPO, OPTIMIZER, PolicyContract
from samples import make_group, make_groups
from tiny import save_tiny

from megatron_grpo.batch import BatchShape
from megatron_grpo.config import OptimizerConfig, ReferencePolicyConfig
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.reference import ReferencePolicy, score_logits
from megatron_grpo.policy.reference_optimizer import make_optimizers
from megatron_grpo.policy.schedules import learning_rate_at
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

CONFIG = ReferencePolicyConfig(microbatch_tokens=32, optimizer=OPTIMIZER)


def make_policy(folder: Path, config=CONFIG) -> tuple[ReferencePolicy, InProcessChannel]:
    channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=5.0)
    return ReferencePolicy(folder, config, channel.sender), channel


class ReferenceFixtures(PolicyContract):
    @pytest.fixture(scope="class")
    def made(self, folder):
        return make_policy(folder)

    @pytest.fixture(scope="class")
    def policy(self, made):
        return made[0]

    @pytest.fixture
    def take_push(self, made):
        policy, channel = made

        def take(version):
            with ThreadPoolExecutor(1) as pool:
                pull = pool.submit(lambda: dict(channel.receivers[0].receive(version)))
                return policy.push_weights(version), pull.result(10)

        return take


class TestReferencePolicyOnQwen2(ReferenceFixtures):
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2")


class TestReferencePolicyOnTiedLlama(ReferenceFixtures):
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return save_tiny(tmp_path_factory.mktemp("llama"), "llama", tied=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.4076, -1.4076, -2.4076]),
        (0.5, [-0.1429, -2.1429, -4.1429]),
        (2.0, [-0.6803, -1.1803, -1.6803]),
    ],
)
def test_a1_log_probabilities_by_hand(temperature, expected):
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1)
    logprob_T, entropy_T = score_logits(logits, torch.tensor([0, 1, 2]), temperature)
    assert logprob_T.tolist() == pytest.approx(expected, abs=5e-5)
    entropy = -sum(torch.tensor(e).exp().item() * e for e in expected)
    assert entropy_T.tolist() == pytest.approx([entropy] * 3, abs=5e-4)


def test_an_ignored_target_scores_zero_and_passes_no_gradient():
    logits = torch.randn(2, 5, requires_grad=True)
    logprob_T, _ = score_logits(logits, torch.tensor([3, -100]), 1.0)
    logprob_T.sum().backward()
    assert logprob_T[1].item() == 0.0
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0] * 5


def test_the_batch_may_be_cut_for_any_shape_and_gives_the_same_gradient(folder):
    # The oracle of parallel layouts takes their batches as they are.
    policy, _ = make_policy(folder)
    groups = make_groups(seed=8)
    found = []
    for shape in (BatchShape(microbatch_tokens=512), BatchShape(2, 32, 4, 2)):
        policy.forward_backward(GRPO.make_batch(groups, shape), GRPO.loss)
        found.append([p.grad.clone() for p in policy.model.parameters() if p.grad is not None])
        policy._zero_gradients()
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-7)


def test_the_token_that_pads_learns_like_any_other(folder, tmp_path):
    """Nothing in the mathematics knows the config's pad token; transformers does."""
    group = make_group([1.0, 0.0], prompt_ids=[4, 9, 7])
    rows = []
    for path in (folder, save_tiny(tmp_path / "other", pad_token_id=12)):  # 9, or 12
        policy, _ = make_policy(path)
        policy.forward_backward(
            GRPO.make_batch([group], BatchShape(microbatch_tokens=64)), GRPO.loss
        )
        gradient_VD = policy.model.get_input_embeddings().weight.grad
        assert isinstance(gradient_VD, torch.Tensor)
        rows.append(gradient_VD[9].clone())
    assert rows[0].abs().max() > 0
    assert rows[0].tolist() == rows[1].tolist()


def test_e1_changing_one_sequence_leaves_its_neighbours_bitwise_alone(folder):
    policy, _ = make_policy(folder)
    group = make_group([1.0, 0.0], response_lengths=[6, 5])
    shape = BatchShape(microbatch_tokens=64)
    before = policy.logprobs(GRPO.make_batch([group], shape))
    group.rollouts[0].token_ids[:] = 99
    after = policy.logprobs(GRPO.make_batch([group], shape))
    assert after[1].tolist() == before[1].tolist()
    assert after[0].tolist() != before[0].tolist()


def test_norms_and_biases_are_never_decayed(folder):
    policy, _ = make_policy(folder)
    (optimizer,) = make_optimizers(policy.model, OptimizerConfig(weight_decay=0.1))
    names = {id(p): name for name, p in policy.model.named_parameters()}
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    plain_names = {names[id(p)] for p in plain["params"]}
    assert plain_names == {n for n in names.values() if "norm" in n or n.endswith("bias")}
    assert len(decayed["params"]) + len(plain_names) == len(names)


def test_c3_export_keeps_side_files_and_invents_none(tmp_path):
    source = save_tiny(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    policy, _ = make_policy(source)
    policy.export(tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in source.iterdir()}
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept == {"eos_token_id": [2, 11]}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    (source / "generation_config.json").unlink()
    policy.export(tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()


def test_export_onto_its_own_source_is_refused(folder):
    policy, _ = make_policy(folder)
    with pytest.raises(CheckpointError, match="was read from"):
        policy.export(folder)


def test_save_with_pending_gradients_is_refused(folder, tmp_path):
    policy, _ = make_policy(folder)
    policy.forward_backward(GRPO.make_batch(make_groups(), policy.batch_shape), GRPO.loss)
    with pytest.raises(CheckpointError, match="gradients have accumulated"):
        policy.save(tmp_path / "checkpoint").result()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(folder, tmp_path):
    other = save_tiny(tmp_path / "other", num_hidden_layers=1)
    make_policy(other)[0].save(tmp_path / "checkpoint").result()
    policy, _ = make_policy(folder)
    before = [p.detach().clone() for p in policy.model.parameters()]
    with pytest.raises(CheckpointError, match=r"does not fit the model.*layers\.1"):
        policy.load(tmp_path / "checkpoint")
    for old, new in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_save_that_was_cut_short_is_refused(folder, tmp_path):
    policy, _ = make_policy(folder)
    policy.save(tmp_path / "checkpoint").result()
    (tmp_path / "checkpoint" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        policy.load(tmp_path / "checkpoint")


def test_bfloat16_computes_coarsely_but_keeps_fp32_weights(folder):
    fine, _ = make_policy(folder)
    coarse, _ = make_policy(folder, ReferencePolicyConfig(dtype="bfloat16"))
    batch = GRPO.make_batch(make_groups(), BatchShape(microbatch_tokens=64))
    assert {p.dtype for p in coarse.model.parameters()} == {torch.float32}
    gaps = [abs(a - b).max() for a, b in zip(fine.logprobs(batch), coarse.logprobs(batch))]
    assert 0 < max(gaps) < 0.1
    assert coarse.forward_backward(batch, GRPO.loss).loss == pytest.approx(
        fine.forward_backward(batch, GRPO.loss).loss, rel=0.05, abs=0.05
    )


def test_h1_schedules_by_hand():
    linear = OptimizerConfig(
        learning_rate=1.0, min_learning_rate=0.2, schedule="linear", warmup_steps=2, decay_steps=6
    )
    found = [learning_rate_at(step, linear) for step in range(8)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine", decay_steps=2)
    assert [learning_rate_at(s, cosine) for s in range(4)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    wsd = OptimizerConfig(
        learning_rate=1.0, schedule="wsd", warmup_steps=2, stable_steps=3, decay_steps=9
    )
    found = [learning_rate_at(step, wsd) for step in range(11)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    constant = OptimizerConfig(learning_rate=3e-4)
    assert [learning_rate_at(s, constant) for s in (0, 1, 999)] == [3e-4] * 3


def step_once(policy: ReferencePolicy) -> dict[str, torch.Tensor]:
    """How one step on a fixed batch moves every parameter."""
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    policy.forward_backward(GRPO.make_batch(make_groups(seed=3), policy.batch_shape), GRPO.loss)
    policy.optimizer_step()
    return {n: p.detach() - before[n] for n, p in policy.model.named_parameters()}


def test_muon_orthogonalises_the_layers_matrices_and_leaves_the_rest_to_adam(folder):
    """A rate of 1e-3 moves a [32, 16] matrix by 1e-3 * 0.2 * sqrt(32) alike in its main directions
    (five Newton-Schulz steps end near 1, not at it), however unlike the gradient's; AdamW's first
    step moves the largest elements of the rest by 1e-3.
    """
    optimizer = OptimizerConfig(type="muon", learning_rate=1e-3, max_grad_norm=None, eps=1e-12)
    policy, _ = make_policy(folder, CONFIG.model_copy(update={"optimizer": optimizer}))
    moved = step_once(policy)
    for name, change in moved.items():
        if change.ndim == 2 and ".layers." in name:
            scale = 1e-3 * 0.2 * max(change.shape) ** 0.5
            singular = torch.linalg.svdvals(change.double()) / scale
            main = singular[: len(singular) // 4]
            assert 0.68 < float(main.min()) <= float(main.max()) < 1.25, name
        else:
            largest = float(change.abs().max())
            assert largest == pytest.approx(1e-3, rel=1e-2), name


def test_sgd_steps_by_its_momentum(folder):
    """Equal gradients g: the buffer is g, then 0.5 g + g', and the step is the rate times it."""
    optimizer = OptimizerConfig(type="sgd", learning_rate=0.1, momentum=0.5, max_grad_norm=None)
    policy, _ = make_policy(folder, CONFIG.model_copy(update={"optimizer": optimizer}))
    first, second = step_once(policy), step_once(policy)
    again, _ = make_policy(folder, CONFIG.model_copy(update={"optimizer": optimizer}))
    step_once(again)
    batch = GRPO.make_batch(make_groups(seed=3), again.batch_shape)
    again.forward_backward(batch, GRPO.loss)
    for name, parameter in again.model.named_parameters():
        assert parameter.grad is not None
        expected = 0.5 * first[name] - 0.1 * parameter.grad
        torch.testing.assert_close(second[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
def test_every_optimizer_continues_exactly_from_its_checkpoint(folder, tmp_path, kind):
    config = CONFIG.model_copy(update={"optimizer": OptimizerConfig(type=kind, learning_rate=1e-2)})
    straight, _ = make_policy(folder, config)
    step_once(straight)
    straight.save(tmp_path / kind).result()
    resumed, _ = make_policy(folder, config)
    resumed.load(tmp_path / kind)
    expected, found = step_once(straight), step_once(resumed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_optimizer_is_refused(folder, tmp_path):
    make_policy(folder)[0].save(tmp_path / "adam").result()
    sgd = CONFIG.model_copy(update={"optimizer": OptimizerConfig(type="sgd")})
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors.*does not fit"):
        make_policy(folder, sgd)[0].load(tmp_path / "adam")
