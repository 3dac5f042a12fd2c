"""Converted checkpoints in the hands of Megatron itself and of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conversion_cases
import megatron_cases as cases
import numpy as np
import pytest
import torch
from megatron_cases import LENGTHS, Case, random_sequences
from megatron_ranks import rank_pool
from rich.console import Console
from safetensors.torch import load_file
from tiny import CLASSES, save_tiny, tiny_model

from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import SINGLE, HfFolder
from megatron_grpo.conversion.lazy_model import hugging_face_logits
from megatron_grpo.conversion.megatron_folder import MegatronFolder

QUIET = Console(quiet=True)
SEQUENCES = random_sequences(LENGTHS, vocab=100)
TP2_PP2 = {"tensor": 2, "pipeline": 2, "sequence": True}
EP2 = {"data": 2, "expert": 2}


def converted(tmp_path: Path, family: Any, layout: Layout, **changes: Any) -> tuple[Path, Path]:
    source = save_tiny(tmp_path / "hf", family, **changes)
    to_megatron(HfFolder(source), tmp_path / "megatron", layout, QUIET)
    return source, tmp_path / "megatron"


@pytest.mark.parametrize(
    ("family", "changes", "layout", "parallel"),
    [
        ("qwen2", {"tied": True}, Layout(), TP2_PP2),
        ("qwen2", {"vocab_size": 100}, Layout(2, 2), {}),  # 256 rows stored, 128 wanted
        ("qwen3", {"vocab_size": 100}, Layout(1, 2), {"tensor": 2}),  # and the other way round
        ("qwen3_moe", {}, Layout(2), EP2),
        ("qwen3_moe", {"mlp_only_layers": []}, Layout(2, 1, 2), {}),  # layers stacked
        ("qwen3_moe", {"mlp_only_layers": []}, Layout(), {"tensor": 2, "sequence": True}),
        ("deepseek_v3", {}, Layout(2), EP2),
        ("deepseek_v3", {"first_k_dense_replace": 0}, Layout(), {"tensor": 2, "sequence": True}),
    ],
)
def test_megatrons_own_loader_takes_what_was_written(
    tmp_path: Path, family: Any, changes: Any, layout: Layout, parallel: dict[str, Any]
) -> None:
    source, checkpoint = converted(tmp_path, family, layout, **changes)
    other = save_tiny(tmp_path / "other", family, seed=1, **changes)
    case = Case(other, parallel, SEQUENCES)
    run = conversion_cases.megatron_loads_case
    results = rank_pool().run(case.config.parallel.world_size, run, case, tmp_path, checkpoint)
    got = {name: array for rank in results for name, array in rank.items()}
    want = load_file(source / SINGLE)
    assert set(got) == set(want)
    assert all(np.array_equal(got[name], tensor.numpy()) for name, tensor in want.items())


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen2", TP2_PP2),
        ("qwen3_moe", {"pipeline": 2, **EP2}),
        ("deepseek_v3", {"pipeline": 2, **EP2}),
    ],
)
def test_a_policy_starts_from_a_megatron_checkpoint_as_from_its_source(
    tmp_path: Path, family: Any, parallel: dict[str, Any]
) -> None:
    source, checkpoint = converted(tmp_path, family, Layout(2), num_hidden_layers=4)
    scores = []
    for folder in (source, checkpoint):
        case = Case(folder, parallel, SEQUENCES)
        where = tmp_path / f"score {folder.name}"
        where.mkdir()
        world = case.config.parallel.world_size
        results = rank_pool().run(world, cases.score_case, [case], where)
        scores.append(dict(pair for rank in results for pair in rank[0]))
    assert all(np.array_equal(scores[0][n], scores[1][n]) for n in scores[0])
    assert len(scores[0]) == len(scores[1]) == len(SEQUENCES)
    target = tmp_path / "exported"
    rank_pool().run(world, cases.export_case, case, tmp_path, target)
    exported = {n: t for f in target.glob("*.safetensors") for n, t in load_file(f).items()}
    want = load_file(source / SINGLE)
    assert set(exported) == set(want) and all(torch.equal(exported[n], want[n]) for n in want)
    assert not any(f.suffix == ".distcp" or "metadata" in f.name for f in target.iterdir())


@pytest.mark.parametrize(
    ("family", "parallel"), [("qwen2", TP2_PP2), ("qwen3_moe", EP2), ("deepseek_v3", EP2)]
)
def test_a_training_checkpoint_converts_to_what_the_run_exports(
    tmp_path: Path, family: Any, parallel: dict[str, Any]
) -> None:
    source = save_tiny(tmp_path / "hf", family, tied=True)
    policy = {"optimizer": {"learning_rate": 1e-2}}
    case = Case(source, parallel, SEQUENCES, policy=policy)
    world = case.config.parallel.world_size
    rank_pool().run(world, conversion_cases.save_and_export_case, case, tmp_path, tmp_path)
    to_hugging_face(MegatronFolder(tmp_path / "training"), tmp_path / "back", QUIET)
    got = load_file(tmp_path / "back" / SINGLE)
    files = (tmp_path / "exported").glob("*.safetensors")
    want = {n: t for file in files for n, t in load_file(file).items()}
    assert set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)
    before = load_file(source / SINGLE)
    assert not torch.equal(got["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_logits_under_scaled_rope_equal_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    changes = {"rope_parameters": {"rope_theta": 1e4, **rope}}
    _, checkpoint = converted(tmp_path, "llama", Layout(), **changes)
    ids = np.random.default_rng(0).integers(3, 130, 300).tolist()
    with torch.no_grad():
        want = tiny_model("llama", **changes)(torch.tensor([ids])).logits[0]
    (got,) = rank_pool().run(1, conversion_cases.logits_case, checkpoint, ids)
    assert np.abs(got - want.numpy()).max() < 1e-4


def test_dynamic_rope_beyond_its_trained_context_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    source = save_tiny(tmp_path / "hf", "llama", rope_parameters=rope, max_position_embeddings=16)
    sequences = random_sequences([(10, 7)])
    with pytest.raises(AssertionError, match="rope_type dynamic: turns positions differently"):
        rank_pool().run(1, cases.score_case, [Case(source, {}, sequences)], tmp_path)


@pytest.mark.parametrize("family", list(CLASSES))
def test_logits_of_both_models_layer_by_layer_equal_transformers(
    tmp_path: Path, family: Any
) -> None:
    source, checkpoint = converted(tmp_path, family, Layout(2))
    ids = np.random.default_rng(0).integers(3, 130, 40).tolist()
    with torch.no_grad():
        want = tiny_model(family)(torch.tensor([ids])).logits[0]
    assert (hugging_face_logits(HfFolder(source), ids) - want).abs().max() < 1e-5
    (got,) = rank_pool().run(1, conversion_cases.logits_case, checkpoint, ids)
    assert np.abs(got - want.numpy()).max() < 1e-4
