"""Every family under every layout, from a checkpoint converted for another one, against plain
Hugging Face: sizes that nothing divides, heads wider than hidden / heads, tied and untied.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import megatron_cases as cases
import numpy as np
import pytest
from huggingface_oracle import Oracle
from megatron_cases import LENGTHS, Case, random_sequences
from megatron_ranks import rank_pool
from rich.console import Console
from tiny import CLASSES, save_tiny, tiny_model

from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_megatron
from megatron_grpo.conversion.hf_folder import HfFolder

SEQUENCES = random_sequences(LENGTHS)
MIXTURES = ("qwen3_moe", "deepseek_v3")
LAYOUTS = [
    (family, *sizes)
    for family in CLASSES
    for sizes in itertools.product((1, 2), (1, 2), (1, 2) if family in MIXTURES else (1,))
]


def odd(family: str, tied: bool) -> dict[str, Any]:
    wide = {"head_dim": 24} if family == "llama" else {}
    return {"tied": tied, "vocab_size": 131, "num_hidden_layers": 4, **wide}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, bool], Path] = {}

    def get(family: Any, tied: bool) -> Path:
        if (family, tied) not in made:
            folder = tmp_path_factory.mktemp(family)
            source = HfFolder(save_tiny(folder / "hf", family, **odd(family, tied)))
            layout = Layout(2, 2, 2 if family in MIXTURES else 1)
            to_megatron(source, folder / "megatron", layout, Console(quiet=True))
            made[family, tied] = folder / "megatron"
        return made[family, tied]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("family", "tensor", "pipeline", "expert"), LAYOUTS)
def test_logprobs_of_every_layout_equal_transformers(
    checkpoints: Any,
    tmp_path: Path,
    family: Any,
    tensor: int,
    pipeline: int,
    expert: int,
    tied: bool,
) -> None:
    parallel = {"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline, "expert": expert}
    if tensor == 1:
        parallel["data"] = expert
    elif expert > 1:  # experts over the tensor ranks
        parallel["expert_tensor"] = 1
    case = Case(checkpoints(family, tied), parallel, SEQUENCES)
    results = rank_pool().run(case.config.parallel.world_size, cases.score_case, [case], tmp_path)
    got = dict(pair for rank in results for pair in rank[0])
    want = Oracle(tiny_model(family, **odd(family, tied))).scores(SEQUENCES)
    assert sorted(got) == list(range(len(want)))
    for index, values in got.items():
        np.testing.assert_allclose(values, want[index], atol=1e-4)
