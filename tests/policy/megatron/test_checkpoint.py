"""Training state survives the disk, under the same and under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failing_saves as faults
import megatron_cases as cases
import numpy as np
import pytest
from huggingface_oracle import per_expert, relative
from megatron_cases import LENGTHS, Case, random_sequences
from megatron_ranks import rank_pool
from tiny import save_tiny

from megatron_grpo.config import ReferencePolicyConfig
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.train.backends import load_from_megatron
from megatron_grpo.weights.in_process import InProcessChannel

OPTIMIZER = {
    "learning_rate": 1e-2,
    "schedule": "linear",
    "warmup_steps": 2,
    "decay_steps": 6,
    "eps": 1e-3,
    "weight_decay": 0.1,
}
SEQUENCES = random_sequences(LENGTHS)


def case(folder: Path, parallel: dict[str, Any], **policy: Any) -> Case:
    return Case(folder, parallel, SEQUENCES, policy={"optimizer": OPTIMIZER, **policy})


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model."""
    return {name: array for rank in ranks for name, array in rank.items()}


SGD = {"type": "sgd", "learning_rate": 1e-2, "momentum": 0.5}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"pipeline": 2}, {"tensor": 2, "sequence": True}), ({"data": 2}, {"data": 2})],
    ids=["PP2 TP2", "DP2 DP2"],
)
def test_sgd_keeps_its_momentum_through_a_checkpoint(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2", tied=True)
    policy = {"optimizer": SGD, "distributed_optimizer": False}
    first, second = (Case(source, p, SEQUENCES, policy=policy) for p in (saved, loaded))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    target = tmp_path / "checkpoint"
    straight = rank_pool().run(2, cases.save_case, first, tmp_path / "a", target)
    resumed = rank_pool().run(2, cases.resume_case, second, tmp_path / "b", target)
    want = {name: array for rank in straight for name, array in rank.items()}
    got = {name: array for rank, _, _ in resumed for name, array in rank.items()}
    assert relative(got, want) < 2e-5


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("qwen2", {"data": 2}, {"data": 2}),
        ("qwen2", {"data": 2}, {"tensor": 2, "sequence": True}),
        ("qwen2", {"tensor": 2, "pipeline": 2}, {"data": 2}),
        ("qwen2", {"pipeline": 2}, {}),
        ("qwen3_moe", {"data": 2, "expert": 2}, {"data": 2, "expert": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}, {"tensor": 2, "sequence": True}),
        ("qwen3_moe", {"pipeline": 2, "data": 2, "expert": 2}, {"data": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "one",
)
def test_a_resumed_run_takes_the_step_the_straight_run_took(
    tmp_path: Path, family: Any, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    source = save_tiny(tmp_path / "hf", family, tied=True, num_hidden_layers=4)
    first, second = case(source, saved), case(source, loaded)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    target = tmp_path / "checkpoint"
    straight = rank_pool().run(
        first.config.parallel.world_size, cases.save_case, first, tmp_path / "a", target
    )
    resumed = rank_pool().run(
        second.config.parallel.world_size, cases.resume_case, second, tmp_path / "b", target
    )
    want = {name: array for rank in straight for name, array in rank.items()}
    got = {name: array for rank, _, _ in resumed for name, array in rank.items()}
    if saved == loaded:
        assert all(np.array_equal(got[name], want[name]) for name in want)
    assert relative(got, want) < 2e-5
    assert {(steps, rate) for _, steps, rate in resumed} == {(3, 1e-2)}
    assert not (tmp_path / ".checkpoint.partial").exists()


@pytest.mark.parametrize("loaded", [{"data": 2}, {}], ids=["DP2", "one"])
def test_h4_a_save_holds_the_update_before_it_although_its_weights_were_not_gathered_yet(
    tmp_path: Path, loaded: dict[str, Any]
) -> None:
    """With the gathering put off to the next forward pass, a replica's weights are those before the
    update when the save begins."""
    source = save_tiny(tmp_path / "hf", "qwen2", tied=True)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    plain, first = case(source, {"data": 2}), case(source, {"data": 2}, **overlap)
    second = case(source, loaded, **(overlap if loaded else {}))
    for name in "abc":
        (tmp_path / name).mkdir()
    target = tmp_path / "checkpoint"
    want = merged(rank_pool().run(2, cases.save_case, plain, tmp_path / "a", tmp_path / "other"))
    straight = merged(rank_pool().run(2, cases.save_case, first, tmp_path / "b", target))
    resumed = rank_pool().run(
        second.config.parallel.world_size, cases.resume_case, second, tmp_path / "c", target
    )
    got = merged([arrays for arrays, _, _ in resumed])
    assert all(np.array_equal(straight[name], want[name]) for name in want)
    if loaded:
        assert all(np.array_equal(got[name], want[name]) for name in want)
    assert relative(got, want) < 2e-5
    assert {(steps, rate) for _, steps, rate in resumed} == {(3, 1e-2)}


@pytest.mark.parametrize(
    ("family", "saved", "optimizer"),
    [
        ("qwen2", {"data": 2}, OPTIMIZER),
        ("qwen3_moe", {"tensor": 2, "sequence": True}, OPTIMIZER),
        ("qwen3", {"pipeline": 2}, SGD),
    ],
    ids=["dense DP2", "experts TP2", "sgd PP2"],
)
def test_plain_hugging_face_takes_the_step_the_straight_run_took(
    tmp_path: Path, family: Any, saved: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    source = save_tiny(tmp_path / "hf", family, tied=True)
    policy = {"optimizer": optimizer, "distributed_optimizer": optimizer is OPTIMIZER}
    first = Case(source, saved, SEQUENCES, policy=policy)
    target = tmp_path / "checkpoint"
    straight = rank_pool().run(2, cases.save_case, first, tmp_path, target)
    settings = ReferencePolicyConfig.model_validate({"dtype": "float32", "optimizer": optimizer})
    channel = InProcessChannel((), deadline_s=5.0, num_receivers=0)
    plain = ReferencePolicy(source, settings, channel.sender)
    load_from_megatron(plain, target)
    plain.forward_backward(first.batch(plain.batch_shape), first.loss)
    update = plain.optimizer_step()
    got = {name: p.detach().numpy() for name, p in plain.model.named_parameters()}
    want = {name: array for rank in straight for name, array in rank.items()}
    plain.close()
    assert relative(per_expert(got), want) < 2e-5
    assert update.learning_rate == 1e-2


def test_a_stage_without_experts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3_moe", mlp_only_layers=[1])
    bad = case(source, {"pipeline": 2})
    with pytest.raises(
        AssertionError, match=r"policy\.parallel\.pipeline: stage 1 would hold dense"
    ):
        rank_pool().run(2, cases.score_case, [bad], tmp_path)


def test_loading_what_is_not_a_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2")
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}.*not a training"):
        rank_pool().run(1, cases.resume_case, case(source, {}), tmp_path, tmp_path / "nowhere")


@pytest.fixture(scope="module")
def failing_saves(tmp_path_factory: pytest.TempPathFactory) -> list[faults.FailedSaves]:
    """What both ranks saw of one save after another, each with a fault of its own."""
    folder = tmp_path_factory.mktemp("faults")
    source = save_tiny(folder / "hf", "qwen2", tied=True)
    small = faults.small_disk(folder / "small")
    try:
        cut = case(source, {"data": 2})
        return rank_pool().run(2, faults.failing_saves_case, cut, folder, small)
    finally:
        faults.unmount(small)


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_h3_a_save_that_fails_on_one_rank_is_one_error_on_all_and_leaves_the_one_before(
    failing_saves: list[faults.FailedSaves], fault: str
) -> None:
    if fault == "full disk" and not failing_saves[0].has_small_disk:
        pytest.skip("a small file system can only be mounted by root")
    where, reason = faults.FAULTS[fault]
    for rank, seen in enumerate(failing_saves):
        error, seconds = seen.errors[fault], seen.seconds[fault]
        assert error.startswith("CheckpointError") and reason in error
        assert where in (rank, None) or f"rank {where}: " in error
        assert seconds < cases.DEADLINE_S / 3  # told, not timed out
    assert failing_saves[0].newest[fault] == 1
    assert failing_saves[0].complete[fault] == [1]


def test_h3_after_failed_saves_the_next_one_is_whole_and_training_was_not_touched(
    failing_saves: list[faults.FailedSaves],
) -> None:
    assert failing_saves[0].newest["none"] == len(faults.FAULTS) + 2
    assert all(seen.same_weights for seen in failing_saves)
    assert all(seen.errors["none"] == "" for seen in failing_saves)


def test_h4_an_update_waits_for_a_slow_copy_and_the_save_holds_what_was_before_it(
    failing_saves: list[faults.FailedSaves],
) -> None:
    assert all(seen.waited_s > 0.9 * faults.SLOW_COPY_S for seen in failing_saves)
    assert all(seen.loaded_is_before_update for seen in failing_saves)
