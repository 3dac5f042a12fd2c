"""SmolLM2-135M's real weights both ways; needs the folder that `make quickstart` makes."""

from __future__ import annotations

from pathlib import Path

import conversion_cases
import pytest
import torch
from megatron_ranks import rank_pool
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.commands.convert import _TEXT
from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import SINGLE, HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.conversion.smollm2 import DEFAULT_FOLDER, is_complete

FOLDER = DEFAULT_FOLDER.expanduser()


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])
    return float((-logprobs.mean()).exp())


@pytest.mark.slow
@pytest.mark.skipif(not is_complete(FOLDER), reason="SmolLM2 is not in the cache")
def test_real_weights_survive_bitwise_and_compute_the_same(tmp_path: Path) -> None:
    quiet = Console(quiet=True)
    to_megatron(HfFolder(FOLDER), tmp_path / "megatron", Layout(3, 2), quiet)
    to_hugging_face(MegatronFolder(tmp_path / "megatron"), tmp_path / "back", quiet)
    want, got = load_file(FOLDER / SINGLE), load_file(tmp_path / "back" / SINGLE)
    assert set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)
    sides = {f.name for f in FOLDER.iterdir()} - {SINGLE}
    assert {f.name for f in (tmp_path / "back").iterdir()} - {SINGLE} == sides
    ids = AutoTokenizer.from_pretrained(FOLDER)(_TEXT)["input_ids"]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        expected = model(torch.tensor([ids])).logits[0]
    (logits,) = rank_pool().run(1, conversion_cases.logits_case, tmp_path / "megatron", ids)
    assert (torch.from_numpy(logits) - expected).abs().max() < 1e-3
    assert perplexity(torch.from_numpy(logits), ids) == pytest.approx(
        perplexity(expected, ids), abs=5e-3
    )
