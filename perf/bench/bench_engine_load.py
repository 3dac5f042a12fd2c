"""What new weights cost a vLLM engine once they have arrived: our way, and the least that writing
slices into parameters by a table would cost.

    python perf/bench/bench_engine_load.py [--json] [--rounds 5]

On a model of SmolLM2-135M's shape, float32, random weights, one worker on a CPU. `reload_s` is what
a push does: vLLM's reload with its own loaders. `packing_s` is the part of it in which kernels pack
their matrices, which either way needs. `copy_s` writes the same elements into plain tensors of the
same shapes, as a table of slices would at best. So a table could save no more than
reload_s - packing_s - copy_s, which `loaders_s` is. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from bench_weight_exchange import config_of, flat_model, spec_of
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_grpo.config import VllmGeneratorConfig
from megatron_grpo.generation.engine_env import engine_env
from megatron_grpo.generation.vllm_cpu_reload import repack_tied_head

MODEL = "SmolLM2-135M"


def reload_once(
    model: nn.Module, tensors: Mapping[str, Tensor], config: ModelConfig
) -> tuple[float, float]:
    """(seconds of everything, seconds of packing among them)."""
    packing = 0.0
    original = UnquantizedLinearMethod.process_weights_after_loading

    def timed(self, layer: nn.Module) -> None:
        nonlocal packing
        begin = time.perf_counter()
        original(self, layer)
        packing += time.perf_counter() - begin

    UnquantizedLinearMethod.process_weights_after_loading = timed
    try:
        started = time.perf_counter()
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))  # pyright: ignore[reportCallIssue]
        layerwise.finalize_layerwise_reload(model, config)
        begin = time.perf_counter()
        repack_tied_head(model)
        ended = time.perf_counter()
        return ended - started, packing + ended - begin
    finally:
        UnquantizedLinearMethod.process_weights_after_loading = original


def measure(model: nn.Module, config: ModelConfig, rounds: int) -> dict[str, object]:
    _, tensors = flat_model(spec_of(MODEL))
    parameters = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reloads, packings, copies = [], [], []
    for _ in range(rounds):
        reload_s, packing_s = reload_once(model, tensors, config)
        reloads.append(reload_s)
        packings.append(packing_s)
        started = time.perf_counter()
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
        copies.append(time.perf_counter() - started)
    whole, packing, copy = map(statistics.median, (reloads, packings, copies))
    return {
        "model": MODEL,
        "reload_s": round(whole, 4),
        "packing_s": round(packing, 4),
        "copy_s": round(copy, 4),
        "loaders_s": round(whole - packing - copy, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    env = engine_env(VllmGeneratorConfig(), 1, gpu=False)
    if not env.items() <= os.environ.items():  # torch and vLLM read it when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **env})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fields = {**config_of(MODEL), "architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=256,
                enforce_eager=True,
                kv_cache_memory_bytes=64 << 20,
            )
        )
        config = engine.model_config
        [row] = engine.apply_model(lambda model: measure(model, config, arguments.rounds))
    if arguments.json:
        json.dump(row, sys.stdout, indent=1)
        print()
        return
    print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
