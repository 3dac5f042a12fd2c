"""Where stop tokens come from, and what an engine's environment holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.config import VllmGeneratorConfig, load_config
from megatron_grpo.errors import CheckpointError
from megatron_grpo.generation.engine_env import engine_env, engine_threads
from megatron_grpo.generation.stopping import stop_token_ids


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_generation_config_decides_over_config(tmp_path):
    write(tmp_path, config={"eos_token_id": 2}, generation_config={"eos_token_id": [11, 2]})
    assert stop_token_ids(tmp_path) == (11, 2)


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}])
def test_config_decides_where_generation_config_has_none(tmp_path, generation):
    write(tmp_path, config={"eos_token_id": 2})
    if generation is not None:
        write(tmp_path, generation_config=generation)
    assert stop_token_ids(tmp_path) == (2,)


@pytest.mark.parametrize("bad", [[], "2", [2, None], -1, 2.0, True])
def test_what_is_no_token_id_is_refused(tmp_path, bad):
    write(tmp_path, config={"eos_token_id": bad})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        stop_token_ids(tmp_path)


def test_a_folder_without_one_is_refused(tmp_path):
    write(tmp_path, config={})
    with pytest.raises(CheckpointError, match="neither"):
        stop_token_ids(tmp_path)


def test_threads_are_shared_out_among_the_workers_and_compile_is_off_on_a_cpu_only():
    one = engine_env(VllmGeneratorConfig(), 8, gpu=False)
    assert one["OMP_NUM_THREADS"] == "8" and one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert one["TORCH_COMPILE_DISABLE"] == "1" and one["HF_HUB_OFFLINE"] == "1"
    four = engine_env(VllmGeneratorConfig(tensor=4), 8, gpu=True)
    assert four["OMP_NUM_THREADS"] == "2" and four["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in four


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        ([], 16),  # turn by turn with two ranks
        (["rollouts.max_staleness=1"], 14),
        (["rollouts.max_staleness=1", "policy.threads_per_rank=4", "generator.engines=3"], 2),
        (["rollouts.max_staleness=1", "policy.threads_per_rank=8"], 1),
        (["rollouts.max_staleness=1", "generator.threads=5"], 5),
    ],
)
def test_engines_take_the_cores_that_the_policy_leaves_free_at_that_time(overrides, threads):
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    assert engine_threads(load_config(quickstart, overrides), cores=16) == threads
