"""`convert` as a user types it: what is verified, what is told, what is continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from toy import save_toy_tokenizer
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.conversion import convert as conversion
from megatron_grpo.conversion.hf_folder import SINGLE
from megatron_grpo.errors import CheckpointError


def run(*words: object) -> str:
    """What `convert` prints on standard output."""
    done = CliRunner().invoke(app, ["convert", *map(str, words)], catch_exceptions=False)
    if isinstance(done.exception, Exception):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("megatron") / "out"
    assert run("to-megatron", folder, target, "--tensor", 2, "--pipeline", 2) == f"wrote {target}\n"
    return target


def difference(printed: str) -> float:
    return float(printed.split("differ by at most ")[1].split()[0])


def test_both_directions_are_verified_on_a_text_in_the_models_own_tokens(tmp_path):
    source = save_toy_tokenizer(save_tiny(tmp_path / "hf", "qwen3", tied=True))
    there = run("to-megatron", source, tmp_path / "mcore", "--tensor", 2, "--verify")
    assert "on a text: logits of" in there and difference(there) < 1e-5
    back = run("to-hf", tmp_path / "mcore", tmp_path / "back", "--dtype", "bf16", "--verify")
    # Both read the weights that were cast: only the order of additions is between them.
    assert difference(back) < 1e-4


def test_without_a_tokenizer_random_tokens_are_compared(checkpoint, tmp_path):
    printed = run("to-hf", checkpoint, tmp_path / "back", "--verify")
    assert "on random tokens, for want of a tokenizer: logits of 96 tokens" in printed
    assert difference(printed) < 1e-5


@pytest.mark.parametrize("swapped", ["mlp.{}_proj", "self_attn.{}_proj"])
def test_c5_a_swap_of_equal_shapes_fails_the_verification(folder, tmp_path, swapped, monkeypatch):
    """The gate for the up projection, keys for values: nothing but the logits can tell."""
    pair = ("gate", "up") if swapped.startswith("mlp") else ("k", "v")
    tensors = load_file(folder / SINGLE)
    one, two = (f"model.layers.1.{swapped.format(name)}.weight" for name in pair)
    wrong = {**tensors, one: tensors[two], two: tensors[one]}
    other = tmp_path / "wrong"
    other.mkdir()
    save_file(wrong, other / SINGLE, metadata={"format": "pt"})
    (other / "config.json").write_text((folder / "config.json").read_text())
    write = conversion.to_megatron

    def converting_the_wrong_one(source, *arguments):
        write(type(source)(other), *arguments)

    monkeypatch.setattr(conversion, "to_megatron", converting_the_wrong_one)
    with pytest.raises(CheckpointError, match="computes other logits than"):
        run("to-megatron", folder, tmp_path / "out", "--verify")


def test_a_tokenizer_that_is_broken_is_named_after_the_weights_are_written(checkpoint, tmp_path):
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text((checkpoint / "config.json").read_text())
    (like / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CheckpointError, match=r"tokenizer that cannot be read.*weights were"):
        run("to-hf", checkpoint, tmp_path / "back", "--like", like, "--verify")
    assert (tmp_path / "back" / SINGLE).is_file()


def test_what_was_begun_like_another_folder_is_not_continued(checkpoint, tmp_path, monkeypatch):
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text((checkpoint / "config.json").read_text())
    (like / "generation_config.json").write_text('{"eos_token_id": 7}')
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "finish_folder", lambda *args: None)
        run("to-hf", checkpoint, tmp_path / "back")
    written = tmp_path / ".back.partial" / SINGLE
    before = written.stat().st_mtime_ns
    monkeypatch.setenv("HOME", str(tmp_path))
    run("to-hf", checkpoint, tmp_path / "back", "--like", "~/like")
    assert (tmp_path / "back" / SINGLE).stat().st_mtime_ns > before
    kept = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert kept == {"eos_token_id": 7}
