"""Checkpoint folders: read lazily, checked by name, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from megatron_grpo.conversion.hf_folder import (
    EMBEDDING,
    HEAD,
    INDEX,
    SINGLE,
    HfFolder,
    begin_folder,
    finish_folder,
    partial_folder,
    write_shard,
)
from megatron_grpo.errors import CheckpointError


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_folder_reads_like_a_single_file(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("qwen2", tied=tied)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) >= 3
    one, many = HfFolder(tmp_path / "one"), HfFolder(tmp_path / "many")
    assert set(one.headers) == set(many.headers) == set(one.spec.hf_names())
    assert ("lm_head.weight" in one.headers) is not tied
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.headers)
    name = "model.layers.1.self_attn.o_proj.weight"
    want = model.state_dict()[name]
    assert torch.equal(many.read(name, 1, 16, 48), want[:, 16:48])
    assert torch.equal(many.read(name, 0, 3, 5), want[3:5])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors.*missing.*layers\.1\.mlp\.up_proj"):
        HfFolder(folder)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tied=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        HfFolder(folder)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    rewrite(folder, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"do not belong.*layers\.2\.mlp\.up_proj"):
        HfFolder(folder)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen2", tied=True)
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    HfFolder(folder)  # a copy says nothing new
    rewrite(folder, lambda t: t[HEAD][-1, -1].add_(1))
    with pytest.raises(CheckpointError, match=r"is not model.embed_tokens.weight.*to false"):
        HfFolder(folder)


def test_layers_that_config_json_forgot_are_not_taken_for_multi_token_prediction(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "deepseek_v3", num_hidden_layers=3)
    fields = json.loads((folder / "config.json").read_text())
    layers = fields["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": layers}))
    with pytest.raises(CheckpointError, match="do not belong to this deepseek_v3 model"):
        HfFolder(folder)


def test_two_sets_of_weights_in_a_folder_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match=f"holds both {SINGLE} and {INDEX}"):
        HfFolder(folder)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(64,\) \(found \(63,\)\)"):
        HfFolder(folder)


def test_a_truncated_file_is_one_clear_error(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        HfFolder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[]", r"weight_map: must give the file of every tensor \(found '\[\]'\)"),
        (b"{}", "weight_map: must give the file"),
        (b'{"weight_map": {"a": 3}}', "weight_map: must give the file"),
        (b'{"weight_map": "a"}', "weight_map: must give the file"),
        (b"\xff\xfe{}", "cannot be read: 'utf-8'"),
        (b"{", "cannot be read: Expecting"),
    ],
)
def test_a_broken_index_is_one_clear_error(tmp_path: Path, text: bytes, problem: str) -> None:
    folder = save_tiny(tmp_path)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=problem):
        HfFolder(folder)


def copy_in_two(source: HfFolder, target: Path) -> None:
    begin_folder(target)
    names = list(source.headers)
    shards, total = {}, 0
    for index, part in enumerate((names[:5], names[5:])):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        manifest = [(n, source.headers[n].shape, source.headers[n].dtype) for n in part]
        stream = ((name, source.read(name)) for name in part)
        total += write_shard(partial_folder(target) / file, manifest, stream)
        shards[file] = part
    finish_folder(target, shards, total, source.side_files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_loads_in_transformers_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("qwen3").to(dtype)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ x }}")
    copy_in_two(HfFolder(tmp_path / "source"), tmp_path / "copy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=dtype)
    want = model.state_dict()
    assert set(loaded.state_dict()) == set(want)
    assert all(torch.equal(t, want[n]) for n, t in loaded.state_dict().items())
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    assert set(index["weight_map"]) == set(want)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    weights = {SINGLE, INDEX}
    others = {f.name for f in (tmp_path / "source").iterdir()} - weights
    assert others == {"config.json", "generation_config.json", "chat_template.jinja"}
    assert others <= {f.name for f in (tmp_path / "copy").iterdir()}


def test_writing_over_an_existing_folder_replaces_it_whole(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "source"))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "stale.txt").write_text("old")
    copy_in_two(source, tmp_path / "copy")
    assert not (tmp_path / "copy" / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "source"]


def test_an_unfinished_write_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    begin_folder(tmp_path / "copy")
    manifest = [("a", (2,), torch.float32), ("b", (2,), torch.float32)]
    stream = iter([("a", torch.zeros(2)), ("c", torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r": b: the stream broke its manifest \(found 'c'\)"):
        write_shard(partial_folder(tmp_path / "copy") / SINGLE, manifest, stream)
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_is_one_clear_error() -> None:
    stream = iter([("a", torch.zeros(1 << 20))])
    with pytest.raises(CheckpointError, match=r"/dev/full: cannot be written.*free space"):
        write_shard(Path("/dev/full"), [("a", (1 << 20,), torch.float32)], stream)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / "one.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "two.safetensors")
    files = {**dict.fromkeys(tensors, "one.safetensors"), "other": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: is in two files.*'one.*'two"):
        HfFolder(folder)


@pytest.mark.parametrize(
    ("names", "problem"),
    [("a", "b: the stream broke .*'its end'"), ("abc", "its end: the stream broke .*'c'")],
)
def test_a_stream_that_is_shorter_or_longer_than_its_manifest_is_refused(
    tmp_path: Path, names: str, problem: str
) -> None:
    manifest = [(name, (2,), torch.float32) for name in "ab"]
    with pytest.raises(CheckpointError, match=problem):
        write_shard(tmp_path / SINGLE, manifest, iter([(n, torch.zeros(2)) for n in names]))
