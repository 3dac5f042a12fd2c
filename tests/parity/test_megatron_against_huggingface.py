"""Every layout of the Megatron policy against plain Hugging Face and autograd: one process, no
packing, no cutting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_oracle import Oracle, relative
from megatron_cases import LENGTHS, Case, merged, random_sequences, step_case
from megatron_ranks import one, rank_pool
from tiny import save_tiny, tiny_model

OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05}
SEQUENCES = random_sequences(LENGTHS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def get(family: str, tied: bool, layers: int) -> Path:
        key = (family, tied, layers)
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny")
            made[key] = save_tiny(folder, family, tied=tied, num_hidden_layers=layers)
        return made[key]

    return get


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "TP2 SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "PP2 of 3 and 1 layers": {"pipeline": 2, "last_stage_layers": 1},
    "PP2 VPP2 of 2 and 4 layers": {
        "pipeline": 2,
        "virtual_pipeline": 2,
        "first_stage_layers": 2,
    },
    "CP2": {"context": 2},
    "DP2": {"data": 2},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "TP2 PP2 SP": {"tensor": 2, "pipeline": 2, "sequence": True},
    "TP2 PP2 VPP2 SP": {
        "tensor": 2,
        "pipeline": 2,
        "virtual_pipeline": 2,
        "sequence": True,
    },
    "TP2 CP2 SP": {"tensor": 2, "context": 2, "sequence": True},
    "PP2 DP2": {"pipeline": 2, "data": 2},
    "CP2 DP2": {"context": 2, "data": 2},
    "EP2": {"data": 2, "expert": 2},
    "EP4": {"data": 4, "expert": 4},
    "PP2 EP2": {"pipeline": 2, "data": 2, "expert": 2},
    "TP2 ETP1 SP": {"tensor": 2, "sequence": True, "expert_tensor": 1},
    "TP2 ETP1 EP2 SP": {"tensor": 2, "sequence": True, "expert_tensor": 1, "expert": 2},
    "TP2 DP2 EP2 SP": {"tensor": 2, "sequence": True, "data": 2, "expert": 2},
}

EVERYWHERE = [
    (family, tied, layout, 1.0)
    for family, tied in (("qwen2", True), ("llama", False), ("qwen3", True))
    for layout in ("TP1", "TP2", "TP2 SP", "PP2", "TP2 PP2 SP")
]
ONCE = [
    ("qwen2", False, "TP2 PP2", 0.7),
    ("llama", True, "PP2 VPP2", 1.0),
    ("qwen2", True, "TP2 PP2 VPP2 SP", 0.7),
    ("qwen2", True, "PP2 of 3 and 1 layers", 1.0),
    ("llama", True, "PP2 VPP2 of 2 and 4 layers", 0.7),
    ("qwen3", False, "CP2", 0.7),
    ("qwen3", True, "TP2 CP2 SP", 1.0),
    ("llama", True, "DP2", 0.7),
    ("llama", True, "PP2 DP2", 1.0),
    ("qwen2", False, "CP2 DP2", 1.0),
    ("mistral", False, "TP2 PP2 SP", 1.0),
]
EXPERTS = [
    ("qwen3_moe", tied, layout, 1.0)
    for tied, layout in (
        (False, "TP1"),
        (True, "TP2 SP"),
        (False, "EP2"),
        (False, "EP4"),
        (True, "PP2 EP2"),
        (False, "TP2 ETP1 SP"),
        (False, "TP2 ETP1 EP2 SP"),
        (True, "TP2 DP2 EP2 SP"),
    )
] + [
    ("deepseek_v3", False, "TP1", 1.0),
    ("deepseek_v3", True, "TP2 SP", 1.0),
    ("deepseek_v3", False, "CP2", 0.7),
    ("deepseek_v3", True, "PP2 EP2", 1.0),
    ("deepseek_v3", False, "TP2 PP2 SP", 1.0),
    ("deepseek_v3", False, "TP2 ETP1 EP2 SP", 1.0),
    ("deepseek_v3", True, "TP2 DP2 EP2 SP", 1.0),
]


@pytest.mark.parametrize(("family", "tied", "layout", "temperature"), EVERYWHERE + ONCE + EXPERTS)
def test_loss_gradients_and_one_step_equal_huggingface(
    folders: Any, tmp_path: Path, family: str, tied: bool, layout: str, temperature: float
) -> None:
    parallel = LAYOUTS[layout]
    layers = 6 if layout.endswith("2 and 4 layers") else 4
    world = int(
        np.prod([v for k, v in parallel.items() if k in ("tensor", "pipeline", "context", "data")])
    )
    case = Case(
        folders(family, tied, layers),
        parallel,
        SEQUENCES,
        temperature,
        policy={"optimizer": OPTIMIZER, "distributed_optimizer": False},
    )
    results = rank_pool().run(world, step_case, case, tmp_path)
    oracle = Oracle(tiny_model(family, tied=tied, num_hidden_layers=layers), temperature)
    scores = oracle.scores(SEQUENCES)
    for index, values in (pair for r in results for pair in r["logprobs"]):
        np.testing.assert_allclose(values, scores[index], atol=1e-4)
    found = sorted(index for r in results for index, _ in r["logprobs"])
    assert found == list(range(len(SEQUENCES)))
    want = oracle.backward(SEQUENCES, case.loss)
    stats = [r["stats"][0] for r in results]
    loss = one([s.loss for s in stats])
    assert loss == pytest.approx(want["loss"], rel=1e-5)
    assert one([s.means for s in stats])["entropy"] == pytest.approx(want["entropy"], rel=1e-5)
    assert stats[0].means["logprob"] == pytest.approx(want["logprob"], rel=1e-5)
    assert stats[0].maxima["logprob"] == pytest.approx(want["logprob_max"], rel=1e-5)
    assert relative(merged(results, "gradients"), oracle.gradients()) < 1e-5
    norm = one([r["updates"][0].grad_norm for r in results])
    assert norm == pytest.approx(oracle.step(OPTIMIZER), rel=1e-5)
    assert one([r["updates"][0].learning_rate for r in results]) == 1e-2
    assert relative(merged(results, "weights"), oracle.weights()) < 1e-5
