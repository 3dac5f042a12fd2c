"""The Megatron rank against Hugging Face in the places where such systems go wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_cases as cases
import numpy as np
import pytest
import torch
from huggingface_oracle import Oracle, relative
from megatron_cases import LENGTHS, Case, merged, random_sequences
from megatron_ranks import one, rank_pool
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

from megatron_grpo.algorithms.packing import TokenSequence

OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05}
PLAIN = {"optimizer": OPTIMIZER, "distributed_optimizer": False}
SEQUENCES = random_sequences(LENGTHS)
TP2_SP = {"tensor": 2, "sequence": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[Any, Path] = {}

    def get(family: str = "qwen2", **changes: Any) -> Path:
        key = (family, repr(sorted(changes.items())))
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp("tiny"), family, **changes)
        return made[key]

    return get


def scores(results: list[list[Any]], index: int = 0) -> list[np.ndarray]:
    """Per-sequence log-probabilities of case `index`, in batch order, from all ranks."""
    found = dict(pair for rank in results for pair in rank[index])
    return [found[i] for i in range(len(found))]


def fixed(token_ids: list[int], prompt: int) -> TokenSequence:
    n = len(token_ids)
    return TokenSequence(
        np.array(token_ids, np.int32),
        np.arange(n) >= prompt,
        np.ones(n, np.float32),
        np.full(n, -4.0, np.float32),
    )


@pytest.mark.parametrize("parallel", [{}, TP2_SP], ids=["TP1", "TP2 SP"])
def test_a1_temperature_divides_the_logits_on_every_route(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    batches = [Case(folder(), parallel, SEQUENCES, t, policy=PLAIN) for t in (0.5, 2.0)]
    world = batches[0].config.parallel.world_size
    (tmp_path / "score").mkdir()
    scored = rank_pool().run(world, cases.score_case, batches, tmp_path / "score")
    trained = rank_pool().run(world, cases.train_case, batches, tmp_path)
    for index, temperature in enumerate((0.5, 2.0)):
        oracle = Oracle(tiny_model(), temperature)
        for got, want in zip(scores(scored, index), oracle.scores(SEQUENCES), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)
        want = oracle.backward(SEQUENCES, batches[0].loss)
        assert trained[0][index]["stats"].means["logprob"] == pytest.approx(want["logprob"], 1e-5)
        gradients = {n: a for rank in trained for n, a in rank[index]["gradients"].items()}
        assert relative(gradients, oracle.gradients()) < 1e-5


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": 2}, {"tensor": 2, "pipeline": 2, "sequence": True}, {"pipeline": 2, "data": 2}],
    ids=["PP2", "TP2 PP2 SP", "PP2 DP2"],
)
def test_b5_tied_copies_stay_bitwise_equal_and_export_has_the_source_keys(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    case = Case(folder(tied=True), parallel, SEQUENCES, policy={"optimizer": OPTIMIZER}, steps=2)
    world = case.config.parallel.world_size
    results = rank_pool().run(world, cases.step_case, case, tmp_path)
    half = world // 2
    for first, last in zip(results[:half], results[half:], strict=True):
        (embedding,), (head,) = first["tied_copies"], last["tied_copies"]
        assert np.array_equal(embedding, head)
    start = tiny_model(tied=True).state_dict()["model.embed_tokens.weight"].numpy()
    after = merged(results, "weights")["model.embed_tokens.weight"]
    assert np.abs(after - start).max() > 1e-3
    assert set(merged(results, "weights")) == set(load_file(case.folder / "model.safetensors"))


@pytest.mark.parametrize("distributed", [True, False])
def test_distributed_and_plain_optimizer_take_torchs_steps(
    folder: Any, tmp_path: Path, distributed: bool
) -> None:
    policy = {"optimizer": OPTIMIZER, "distributed_optimizer": distributed}
    case = Case(folder(), {"data": 2}, SEQUENCES, policy=policy)
    results = rank_pool().run(2, cases.step_case, case, tmp_path)
    oracle = Oracle(tiny_model())
    oracle.backward(SEQUENCES, case.loss)
    norm = oracle.step(OPTIMIZER)
    assert one([r["updates"][0].grad_norm for r in results]) == pytest.approx(norm, 1e-5)
    after = {n: p.detach().numpy() for n, p in oracle.model.named_parameters()}
    assert relative(results[0]["weights"], after) < 1e-5


def test_sgd_with_momentum_takes_torchs_steps(folder: Any, tmp_path: Path) -> None:
    sgd = {"type": "sgd", "learning_rate": 0.05, "momentum": 0.5, "max_grad_norm": 0.05}
    policy = {"optimizer": sgd, "distributed_optimizer": False}
    case = Case(folder(), {"data": 2}, SEQUENCES, policy=policy, steps=2)
    results = rank_pool().run(2, cases.step_case, case, tmp_path)
    oracle = Oracle(tiny_model())
    plain = torch.optim.SGD(oracle.model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(2):
        plain.zero_grad()
        oracle.backward(SEQUENCES, case.loss)
        torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.05)
        plain.step()
    after = {n: p.detach().numpy() for n, p in oracle.model.named_parameters()}
    assert relative(results[0]["weights"], after) < 1e-5


@pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is not None, reason="it is installed"
)
def test_muon_without_its_package_is_refused_by_name(folder: Any, tmp_path: Path) -> None:
    policy = {"optimizer": {"type": "muon"}, "distributed_optimizer": False}
    case = Case(folder(), {}, SEQUENCES, policy=policy)
    with pytest.raises(Exception, match="muon needs the emerging_optimizers package"):
        rank_pool().run(1, cases.step_case, case, tmp_path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("overlap", [False, True], ids=["reduce after", "overlap"])
def test_a_step_at_pp2_tp2_sp_equals_the_naive_head(
    folder: Any, tmp_path: Path, overlap: bool, tied: bool
) -> None:
    """The oracle computes the head's logits whole, their log-softmax and its autograd."""
    policy = {"optimizer": OPTIMIZER, "overlap_grad_reduce": overlap}
    case = Case(folder(tied=tied), {"pipeline": 2, **TP2_SP}, SEQUENCES, policy=policy)
    results = rank_pool().run(4, cases.step_case, case, tmp_path)
    oracle = Oracle(tiny_model(tied=tied))
    want = oracle.backward(SEQUENCES, case.loss)
    stats = one([r["stats"][0].means for r in results])
    assert one([r["stats"][0].loss for r in results]) == pytest.approx(want["loss"], rel=1e-5)
    assert stats["logprob"] == pytest.approx(want["logprob"], rel=1e-5)
    assert stats["entropy"] == pytest.approx(want["entropy"], rel=1e-5)
    norm = oracle.step(OPTIMIZER)
    assert one([r["updates"][0].grad_norm for r in results]) == pytest.approx(norm, rel=1e-5)
    assert relative(merged(results, "weights"), oracle.weights()) < 1e-5


@pytest.mark.parametrize(
    "parallel", [{"data": 2}, {"data": 2, **TP2_SP}, {"pipeline": 2}, {"pipeline": 2, **TP2_SP}]
)
@pytest.mark.parametrize("param_gather", [False, True])
def test_overlapped_reduction_gives_the_same_weights(
    folder: Any, tmp_path: Path, parallel: dict[str, Any], param_gather: bool
) -> None:
    after = []
    for overlap in (False, True):
        where = tmp_path / str(overlap)
        where.mkdir()
        policy = {
            "optimizer": OPTIMIZER,
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap and param_gather,
        }
        case = Case(folder(), parallel, SEQUENCES, policy=policy, steps=3)
        world = case.config.parallel.world_size
        after.append(merged(rank_pool().run(world, cases.step_case, case, where), "weights"))
    assert relative(after[1], after[0]) < 1e-6


def test_b6_padded_vocabulary_rows_reach_neither_softmax_nor_optimizer_nor_export(
    folder: Any, tmp_path: Path
) -> None:
    case = Case(folder(), {"tensor": 2}, SEQUENCES, policy={"optimizer": OPTIMIZER})
    results = rank_pool().run(2, cases.padding_case, case, tmp_path)
    assert [r["padding"] for r in results] == [0, 126]  # 256 physical rows
    plain, poisoned = dict(results[0]["plain"]), dict(results[0]["poisoned"])
    assert len(plain) == len(SEQUENCES)
    assert all(np.array_equal(plain[i], poisoned[i]) for i in plain)
    assert one([(r["no_gradient"], r["still_zero"]) for r in results]) == (True, True)
    shapes = results[0]["exported"]
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (130, 64)


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "pipeline": 2}], ids=["TP1", "TP2 PP2"])
def test_c1_rope_is_right_at_position_500(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    sequences = random_sequences([(500, 10), (20, 1)])
    case = Case(folder("llama"), parallel, sequences, microbatch_tokens=540)
    world = case.config.parallel.world_size
    results = rank_pool().run(world, cases.score_case, [case], tmp_path)
    want = Oracle(tiny_model("llama")).scores(sequences)
    for got, expected in zip(scores(results), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "pipeline": 2}], ids=["TP1", "TP2 PP2"])
def test_c2_head_dim_query_key_norms_and_eps_come_from_the_config(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    path = folder("qwen3", rms_norm_eps=1e-3)
    case = Case(path, parallel, SEQUENCES)
    world = case.config.parallel.world_size
    (tmp_path / "eps").mkdir()
    eps = rank_pool().run(world, cases.norms_case, case, tmp_path / "eps")
    assert {value for rank in eps for value in rank} == {1e-3}
    if world == 1:
        assert len(eps[0]) == 2 * 4 + 1  # input, mlp, q, k of two layers, and the final one
    got = scores(rank_pool().run(world, cases.score_case, [case], tmp_path))
    want = Oracle(tiny_model("qwen3", rms_norm_eps=1e-3)).scores(SEQUENCES)
    assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("parallel", [{}, {"data": 2}, {"context": 2}, {"context": 2, "data": 2}])
def test_d1_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    oracle = Oracle(tiny_model())
    sequences = random_sequences([(3, 2), (3, 6), (4, 9), (5, 1), (2, 3)])
    batches = [
        Case(folder(), parallel, sequences, microbatch_tokens=tokens, policy=PLAIN)
        for tokens in (16, 64)
    ]
    want = oracle.backward(sequences, batches[0].loss)
    world = batches[0].config.parallel.world_size
    for index, case in enumerate(batches):
        where = tmp_path / str(index)
        where.mkdir()
        results = rank_pool().run(world, cases.train_case, [case], where)
        assert results[0][0]["stats"].loss == pytest.approx(want["loss"], rel=1e-5)
        assert relative(results[0][0]["gradients"], oracle.gradients()) < 1e-5


def test_d3_ranks_without_response_tokens_take_part_in_everything(
    folder: Any, tmp_path: Path
) -> None:
    sequences = random_sequences([(14, 2)])  # replica 1 gets filler, one context rank no response
    case = Case(folder(), {"context": 2, "data": 2}, sequences, policy=PLAIN)
    results = rank_pool().run(4, cases.train_case, [case], tmp_path)
    oracle = Oracle(tiny_model())
    want = oracle.backward(sequences, case.loss)
    stats = one([r[0]["stats"].means for r in results])
    assert stats["logprob"] == pytest.approx(want["logprob"], rel=1e-5)
    assert stats["entropy"] == pytest.approx(want["entropy"], rel=1e-5)
    assert one([r[0]["stats"].loss for r in results]) == pytest.approx(want["loss"], rel=1e-5)
    assert relative(results[0][0]["gradients"], oracle.gradients()) < 1e-5


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"pipeline": 2, "data": 2}])
def test_d3_statistics_are_the_same_on_all_stages_even_with_nothing_trained(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    prompts_only = random_sequences([(5, 0), (3, 0)])
    batches = [Case(folder(), parallel, s, policy=PLAIN) for s in (SEQUENCES, prompts_only)]
    world = batches[0].config.parallel.world_size
    results = rank_pool().run(world, cases.train_case, batches, tmp_path)
    want = Oracle(tiny_model()).backward(SEQUENCES, batches[0].loss)
    assert one([r[0]["stats"].means for r in results])["entropy"] == pytest.approx(want["entropy"])
    empty = one([(r[1]["stats"].loss, r[1]["stats"].means) for r in results])
    assert empty == (0.0, {"entropy": 0.0, "logprob": 0.0})
    for rank in results:
        assert all(not array.any() for array in rank[1]["gradients"].values())


@pytest.mark.parametrize("parallel", [{}, TP2_SP, {"context": 2}], ids=["TP1", "TP2 SP", "CP2"])
def test_d4_exactly_the_response_tokens_are_trained(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    batches = [
        Case(folder(), parallel, sequences, policy=PLAIN)
        for sequences in (
            (fixed([11, 12, 13, 14, 15], 3),),
            (
                fixed([11, 12, 13, 14], 3),
                fixed([7, 2], 1),
            ),  # one-token responses, one ending in EOS
        )
    ]
    world = batches[0].config.parallel.world_size
    results = rank_pool().run(world, cases.train_case, batches, tmp_path)
    for index, trained in enumerate(([(0, 2), (0, 3)], [(0, 2), (1, 0)])):
        oracle = Oracle(tiny_model())
        logprobs = [oracle.logprobs(s.token_ids)[0] for s in batches[index].sequences]
        want = torch.stack([logprobs[s][t] for s, t in trained])
        stats = results[0][index]["stats"]
        assert stats.means["logprob"] == pytest.approx(float(want.mean()), rel=1e-5)
        oracle.backward(batches[index].sequences, batches[index].loss)
        gradients = {n: a for rank in results for n, a in rank[index]["gradients"].items()}
        assert relative(gradients, oracle.gradients()) < 1e-5


@pytest.mark.parametrize("parallel", [{}, TP2_SP, {"context": 2}], ids=["TP1", "TP2 SP", "CP2"])
def test_e1_packed_sequences_do_not_see_each_other(
    folder: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    one_pack = random_sequences([(4, 6), (3, 5), (2, 9)])
    changed = (random_sequences([(4, 6)], seed=9)[0], *one_pack[1:])
    alone = [(sequence,) for sequence in one_pack]
    many = random_sequences([(1, k) for k in range(17)] * 3)
    batches = [
        Case(folder(), parallel, sequences, microbatch_tokens=tokens)
        for sequences, tokens in [(one_pack, 64), (changed, 64), *((a, 64) for a in alone)]
    ]
    world = batches[0].config.parallel.world_size
    results = rank_pool().run(world, cases.score_case, batches, tmp_path)
    packed, other = scores(results, 0), scores(results, 1)
    assert not np.array_equal(packed[0], other[0])
    assert np.array_equal(packed[1], other[1]) and np.array_equal(packed[2], other[2])
    for index in range(3):
        np.testing.assert_allclose(packed[index], scores(results, 2 + index)[0], atol=1e-5)
    (tmp_path / "many").mkdir()
    case = Case(folder(), parallel, many, microbatch_tokens=1024)
    results = rank_pool().run(world, cases.score_case, [case], tmp_path / "many")
    want = Oracle(tiny_model()).scores(many)
    for got, expected in zip(scores(results), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_e2_context_parallel_equals_one_rank_for_every_short_length(
    folder: Any, tmp_path: Path
) -> None:
    lengths = [(n - r, r) for n in range(1, 21) for r in range(0, n)]
    order = np.random.default_rng(0).permutation(len(lengths))
    sequences = random_sequences([lengths[i] for i in order])
    case = Case(folder(), {"context": 2}, sequences, microbatch_tokens=128, policy=PLAIN)
    (tmp_path / "train").mkdir()
    scored = rank_pool().run(2, cases.score_case, [case], tmp_path)
    trained = rank_pool().run(2, cases.train_case, [case], tmp_path / "train")
    oracle = Oracle(tiny_model())
    for got, want in zip(scores(scored), oracle.scores(sequences), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    want = oracle.backward(sequences, case.loss)
    stats = trained[0][0]["stats"]
    assert stats.loss == pytest.approx(want["loss"], rel=1e-5)
    assert stats.means["entropy"] == pytest.approx(want["entropy"], rel=1e-5)
    assert relative(trained[0][0]["gradients"], oracle.gradients()) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["DP2", "PP2"])
def test_gradients_accumulate_over_calls_until_a_step(
    folder: Any, tmp_path: Path, parallel: dict[str, Any], dtype: str, tolerance: float
) -> None:
    """In bfloat16 the sums are fp32 all the same: two calls make twice the gradient of one."""
    free = {**OPTIMIZER, "max_grad_norm": None, "learning_rate": 1e-12}
    policy = {"optimizer": free, "dtype": dtype}
    case = Case(folder(), parallel, SEQUENCES, policy=policy)
    results = rank_pool().run(2, cases.accumulate_case, case, tmp_path)
    oracle = Oracle(tiny_model())
    oracle.backward(SEQUENCES, case.loss)
    norm = oracle.step(OPTIMIZER)
    for result in results:
        assert result["problem"] == ""
        twice, once = result["norms"]
        assert once == pytest.approx(norm, tolerance)
        assert twice == pytest.approx(2 * once, 1e-4)


def test_accumulating_under_overlap_is_refused_by_name(folder: Any, tmp_path: Path) -> None:
    policy = {"optimizer": OPTIMIZER, "overlap_grad_reduce": True}
    case = Case(folder(), {"data": 2}, SEQUENCES, policy=policy)
    results = rank_pool().run(2, cases.accumulate_case, case, tmp_path)
    assert all("policy.overlap_grad_reduce" in r["problem"] for r in results)


def test_a_non_finite_gradient_raises_everywhere_and_leaves_the_weights_alone(
    folder: Any, tmp_path: Path
) -> None:
    case = Case(folder(), {"pipeline": 2}, SEQUENCES, policy={"optimizer": OPTIMIZER})
    results = rank_pool().run(2, cases.poison_case, case, tmp_path)
    oracle = Oracle(tiny_model())
    oracle.backward(SEQUENCES, case.loss)
    want = oracle.step(OPTIMIZER)
    for problem, unchanged, norm in results:
        assert "optimizer step 0: the gradient norm is not finite" in problem
        assert unchanged
        assert norm == pytest.approx(want, 1e-4)
