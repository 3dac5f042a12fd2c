"""Speed and memory of `convert` on a synthetic checkpoint, beside copying the same files.

    python perf/bench/bench_convert.py [FOLDER] [--layers 20] [--vocab 128256] [--json]

Writes about 0.44 GB per layer and 2.1 GB for the vocabulary, three times, in a folder of its own
under FOLDER (runs/), and removes it again: `--layers 2 --vocab 8192` is one GB. Layers are an even
number, for two stages. Each part runs in a process of its own; nothing is held in memory between
them. Without --json, exit status 1 if a conversion has less than half the speed of copying, or
takes more than twice the largest tensor plus 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.conversion.hf_folder import write_shard

GIB = 1 << 30
SPEED_OF_COPYING = 0.5
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MEASURE = """
import resource, sys, time
from pathlib import Path
from rich.console import Console
from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
what, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
start = time.monotonic()
if what == "to-megatron":
    to_megatron(HfFolder(source), target, Layout(2, 2), Console(quiet=True))
else:
    to_hugging_face(MegatronFolder(source), target, Console(quiet=True))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(time.monotonic() - start, peak)
"""


def write_source(folder: Path, config: Mapping[str, object]) -> int:
    """Random numbers, one shard per four layers or so; the bytes written."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(folder / "config.json")
    block = torch.randn(1 << 24).mul_(0.02).bfloat16()
    names, weight_map, total = list(spec.hf_names()), {}, 0
    for number, start in enumerate(range(0, len(names), 40)):
        part = names[start : start + 40]
        file = f"model-{number:05d}.safetensors"

        def numbers(name: str) -> torch.Tensor:
            shape = torch.Size(spec.hf_shape(name))
            return block.repeat(-(-shape.numel() // len(block)))[: shape.numel()].view(shape)

        manifest = [(name, spec.hf_shape(name), torch.bfloat16) for name in part]
        total += write_shard(folder / file, manifest, ((name, numbers(name)) for name in part))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy(source: Path, target: Path) -> float:
    """Seconds to copy the files and see them on the disk, as the converter does."""
    start = time.monotonic()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb+") as written:
            os.fsync(written.fileno())
    return time.monotonic() - start


def convert(what: str, source: Path, target: Path) -> tuple[float, int]:
    run = [sys.executable, "-c", MEASURE, what, str(source), str(target)]
    seconds, peak = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), int(peak)


def measure(folder: Path, config: Mapping[str, object]) -> Iterator[dict[str, float | str]]:
    """One row for each direction."""
    total = write_source(folder / "hf", config)
    largest = int(str(config["vocab_size"])) * int(str(config["hidden_size"])) * 2
    for what, source, target in (("to-megatron", "hf", "m"), ("to-hf", "m", "back")):
        # The same files, before and after: what else the machine does falls on both.
        copies = [copy(folder / source, folder / "copy")]
        shutil.rmtree(folder / "copy")
        seconds, peak = convert(what, folder / source, folder / target)
        copies.append(copy(folder / source, folder / "copy"))
        shutil.rmtree(folder / "copy")
        yield {
            "what": what,
            "model_bytes": total,
            "largest_tensor_bytes": largest,
            "convert_s": seconds,
            "copy_s": statistics.mean(copies),
            "speed_of_copying": statistics.mean(copies) / seconds,
            "peak_bytes": peak,
            "allowed_bytes": 2 * largest + GIB,
        }
        shutil.rmtree(folder / source)


def verdicts(row: Mapping[str, float | str]) -> list[str]:
    """What a row misses; empty if nothing."""
    missed = []
    if float(row["speed_of_copying"]) < SPEED_OF_COPYING:
        missed.append("too slow")
    if float(row["peak_bytes"]) > float(row["allowed_bytes"]):
        missed.append("too much memory")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=CONFIG["vocab_size"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder / "bench_convert"
    config = {
        **CONFIG,
        "num_hidden_layers": arguments.layers,
        "vocab_size": arguments.vocab,
    }
    rows = []
    try:
        for row in measure(folder, config):
            rows.append({**row, "missed": verdicts(row)})
            if not arguments.json:
                print(
                    f"{row['what']}: {float(row['model_bytes']) / GIB:.2f} GiB in "
                    f"{row['convert_s']:.1f} s, {row['speed_of_copying']:.2f} of the speed of "
                    f"copying ({row['copy_s']:.1f} s; at least {SPEED_OF_COPYING}); peak "
                    f"{float(row['peak_bytes']) / GIB:.2f} GiB of "
                    f"{float(row['allowed_bytes']) / GIB:.2f} GiB allowed: "
                    f"{', '.join(verdicts(row)) or 'ok'}",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(rows))
    elif any(row["missed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
