"""Whole checkpoints both ways: bitwise, resharded, resumed, refused."""

from __future__ import annotations

import itertools
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import CLASSES, save_tiny

from megatron_grpo.conversion import boxes, convert
from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import INDEX, SINGLE, HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.conversion.sharding import shard_of
from megatron_grpo.conversion.torch_dist import METADATA, read_box, read_index
from megatron_grpo.errors import CheckpointError, ConfigError

QUIET = Console(quiet=True)
LAYOUTS = (Layout(), Layout(2), Layout(1, 2), Layout(2, 2))


def layouts_for(family: str) -> tuple[Layout, ...]:
    experts = (Layout(1, 1, 2), Layout(2, 2, 2)) if family in ("qwen3_moe", "deepseek_v3") else ()
    return LAYOUTS + experts


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    assert all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in want.items())


def there_and_back(source: Path, tmp_path: Path, layout: Layout, **options: Any) -> Path:
    to_megatron(HfFolder(source), tmp_path / "megatron", layout, QUIET)
    to_hugging_face(MegatronFolder(tmp_path / "megatron"), tmp_path / "back", QUIET, **options)
    return tmp_path / "back"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", list(CLASSES))
def test_the_round_trip_is_bitwise_under_every_layout(
    tmp_path: Path, family: Any, tied: bool
) -> None:
    source = save_tiny(tmp_path / "hf", family, tied=tied)
    for number, layout in enumerate(layouts_for(family)):
        (tmp_path / str(number)).mkdir()
        back = there_and_back(source, tmp_path / str(number), layout)
        assert_same(weights(back), load_file(source / SINGLE))
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("family", list(CLASSES))
def test_every_layout_reads_every_other_layouts_files_bitwise(tmp_path: Path, family: Any) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", family))
    spec = source.spec
    for number, layout in enumerate(layouts_for(family)):
        to_megatron(source, tmp_path / str(number), layout, QUIET)
        written = MegatronFolder(tmp_path / str(number))
        for tensor, rule in itertools.product((1, 2), spec.rules()):
            for layer, expert in itertools.product(spec.layers_of(rule), spec.experts_of(rule)):
                for rank in range(tensor):
                    place = (tensor, rank, expert)
                    got = shard_of(rule, layer, spec, written.read, *place)
                    assert torch.equal(got, shard_of(rule, layer, spec, source.read, *place))


def test_sizes_that_no_box_divides_survive(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(boxes, "BOX_BYTES", 7 * 64 * 4)  # seven rows
    monkeypatch.setattr(boxes, "FILE_BYTES", 50_000)
    source = save_tiny(tmp_path / "hf", "qwen2", vocab_size=131)
    back = there_and_back(source, tmp_path, Layout(2, 2), shard_bytes=70_000)
    assert len(list((tmp_path / "megatron").glob("__*_1.distcp"))) == 4
    assert_same(weights(back), load_file(source / SINGLE))
    index = json.loads((back / INDEX).read_text())
    files = sorted(back.glob("*.safetensors"))
    assert {f: sorted(load_file(back / f)) for f in set(index["weight_map"].values())} == {
        file.name: sorted(n for n, f in index["weight_map"].items() if f == file.name)
        for file in files
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(back).values())
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in files]
    assert len(files) >= 4 and all(
        n <= 70_000 or len(load_file(f)) == 1 for n, f in zip(sizes, files)
    )


def test_dtype_is_kept_or_cast_and_config_says_so(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    half = {name: tensor.bfloat16() for name, tensor in load_file(source / SINGLE).items()}
    save_file(half, source / SINGLE, metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    kept = there_and_back(source, tmp_path, Layout(2))
    assert_same(weights(kept), half)
    to_hugging_face(
        MegatronFolder(tmp_path / "megatron"), tmp_path / "cast", QUIET, dtype=torch.float32
    )
    assert_same(weights(tmp_path / "cast"), {n: t.float() for n, t in half.items()})
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float32"


def test_multi_token_prediction_is_left_out_and_config_says_so(tmp_path: Path, caplog: Any) -> None:
    source = save_tiny(tmp_path / "hf", "deepseek_v3", num_mtp_layers=1)
    model = load_file(source / SINGLE)
    beside = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    save_file({**model, **beside}, source / SINGLE, metadata={"format": "pt"})
    back = there_and_back(source, tmp_path, Layout(2))
    assert "1 tensors of multi-token prediction are left out" in caplog.text
    assert_same(weights(back), model)
    for folder, layers in ((source, 1), (tmp_path / "megatron", 0), (back, 0)):
        fields = json.loads((folder / "config.json").read_text())
        assert fields["num_nextn_predict_layers"] == layers
    HfFolder(back)


def test_numbers_that_a_cast_would_make_infinite_are_named(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf")
    name = "model.layers.0.mlp.up_proj.weight"
    model = load_file(source / SINGLE)
    model[name][0, 0] = 1e6
    save_file(model, source / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}, as torch.float16,: holds NaN or infinite"):
        there_and_back(source, tmp_path, Layout(), dtype=torch.float16)


def test_a_side_file_with_the_name_of_one_of_megatrons_is_refused(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf")
    (source / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"metadata.json: has the name of a file of Megatron"):
        there_and_back(source, tmp_path, Layout())


def test_a_routers_bias_is_not_cast(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "deepseek_v3")
    back = there_and_back(source, tmp_path, Layout(), dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    want = load_file(source / SINGLE)
    assert_same(weights(back), {n: t if n == name else t.bfloat16() for n, t in want.items()})
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


def test_c3_side_files_survive_byte_for_byte(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "llama")
    extras = {
        "generation_config.json": '{"eos_token_id": [2, 11]}',
        "chat_template.jinja": "{% for m in messages %}<|{{ m.role }}|>{% endfor %}",
        "tokenizer.json": '{"added_tokens": [{"id": 129, "content": "<x>", "special": true}]}',
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    }
    for name, text in extras.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    back = there_and_back(source, tmp_path, Layout(2, 2))
    found = [
        {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} - {SINGLE}
        for folder in (source, back)
    ]
    side = {*extras, "config.json"}
    assert found == [side, side]
    assert all((back / n).read_bytes() == (source / n).read_bytes() for n in side)


class Interrupted(Exception):
    pass


def test_an_interrupted_conversion_leaves_nothing_and_continues(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(boxes, "FILE_BYTES", 60_000)
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    read, calls = HfFolder.read_block, []

    def counted(self: HfFolder, *args: Any) -> torch.Tensor:
        calls.append(args)
        if stop_after is not None and len(calls) > stop_after:
            raise Interrupted
        return read(self, *args)

    monkeypatch.setattr(HfFolder, "read_block", counted)
    stop_after: int | None = 12
    with pytest.raises(Interrupted):
        to_megatron(source, tmp_path / "out", Layout(), QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.partial", "hf"]
    done = json.loads((tmp_path / ".out.partial" / "progress.json").read_text())["done"]
    assert 1 <= len(done) < 9
    calls.clear()
    stop_after = None
    to_megatron(source, tmp_path / "out", Layout(), QUIET)
    continued = len(calls)
    calls.clear()
    to_megatron(source, tmp_path / "again", Layout(), QUIET)
    assert 0 < continued < len(calls)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "hf", "out"]
    to_hugging_face(MegatronFolder(tmp_path / "out"), tmp_path / "back", QUIET)
    assert_same(weights(tmp_path / "back"), load_file(source.path / SINGLE))


def test_what_was_begun_with_other_settings_is_not_continued(
    tmp_path: Path, monkeypatch: Any
) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    monkeypatch.setattr(convert, "finish_folder", lambda *args: None)
    to_megatron(source, tmp_path / "out", Layout(2), QUIET)
    monkeypatch.undo()
    to_megatron(source, tmp_path / "out", Layout(), QUIET)
    assert len(list((tmp_path / "out").glob("__[0-9]_0.distcp"))) == 1


def test_a_full_disk_is_one_error_and_nothing_under_the_name(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    to_megatron(source, tmp_path / "whole", Layout(), QUIET)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp: cannot be written.*free space"):
            to_megatron(source, tmp_path / "out", Layout(), QUIET)
        with pytest.raises(CheckpointError, match=r"safetensors: cannot be written.*free space"):
            to_hugging_face(MegatronFolder(tmp_path / "whole"), tmp_path / "back", QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (tmp_path / "out").exists() and not (tmp_path / "back").exists()


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        to_megatron(source, tmp_path / "out", Layout(), QUIET)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2")
    tensors = load_file(source / SINGLE)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = bad
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: holds NaN"):
        to_megatron(HfFolder(source), tmp_path / "out", Layout(2), QUIET)
    assert not (tmp_path / "out").exists()


def test_mixed_dtypes_that_megatron_joins_are_refused(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2")
    tensors = load_file(source / SINGLE)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].half()}, source / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"k_proj.*one tensor of torch\.float32"):
        to_megatron(HfFolder(source), tmp_path / "out", Layout(), QUIET)


def test_broken_megatron_checkpoints_are_one_clear_error_each(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))

    def fresh(name: str) -> Path:
        to_megatron(source, tmp_path / name, Layout(), QUIET)
        return tmp_path / name

    cut = fresh("cut")
    whole = (cut / "__0_0.distcp").read_bytes()
    (cut / "__0_0.distcp").write_bytes(whole[:-2000])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is truncated"):
        MegatronFolder(cut)
    gone = fresh("gone")
    (gone / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is missing"):
        MegatronFolder(gone)
    index = fresh("index")
    (index / METADATA).write_bytes((index / METADATA).read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        MegatronFolder(index)
    other = fresh("other")
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, "intermediate_size": 100}))
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight: has another shape"):
        MegatronFolder(other)
    (other / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False}))
    tied = save_tiny(tmp_path / "tied_hf", "qwen2", tied=True)
    to_megatron(HfFolder(tied), tmp_path / "tied", Layout(), QUIET)
    (tmp_path / "tied" / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"output_layer\.weight: is missing"):
        MegatronFolder(tmp_path / "tied")


def test_flipped_bytes_of_a_megatron_checkpoint_are_one_clear_error(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    to_megatron(source, tmp_path / "out", Layout(), QUIET)
    pieces = [p for tensor in read_index(tmp_path / "out").values() for p in tensor.pieces]
    places = random.Random(0)
    for name in (METADATA, "__0_0.distcp"):
        whole = (tmp_path / "out" / name).read_bytes()
        starts = [0] if name == METADATA else [p.start for p in pieces if p.file == name]
        refused = 0
        for _ in range(40):
            at = places.choice(starts) + places.randrange(700)
            flipped = whole[:at] + bytes([whole[at] ^ places.randrange(1, 256)]) + whole[at + 1 :]
            (tmp_path / "out" / name).write_bytes(flipped)
            try:
                for tensor in read_index(tmp_path / "out").values():
                    read_box(tmp_path / "out", tensor, [0] * len(tensor.shape), tensor.shape)
            except CheckpointError as error:
                refused += "\n" not in str(error)
        assert refused >= 5
        (tmp_path / "out" / name).write_bytes(whole)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    to_megatron(source, tmp_path / "out", Layout(), QUIET)
    (tmp_path / "out" / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="no business"):
        read_index(tmp_path / "out")


def test_b4_more_tensor_ranks_than_key_value_heads_are_refused(tmp_path: Path) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf", "qwen2"))
    with pytest.raises(ConfigError, match=r"does not divide the model's 2 key-value heads"):
        to_megatron(source, tmp_path / "out", Layout(4), QUIET)


MEASURE = """
import resource, sys, threading, time
from pathlib import Path
from rich.console import Console
from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
import torch
torch.save(torch.zeros(9), "/dev/null")
torch.zeros(9, dtype=torch.bfloat16).sum()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
base, folder = peak(), Path(sys.argv[1])
to_megatron(HfFolder(folder / "hf"), folder / "m", Layout(2), Console(quiet=True))
there = peak() - base
to_hugging_face(MegatronFolder(folder / "m"), folder / "back", Console(quiet=True))
print(there, peak() - base)
"""


def test_memory_is_bounded_by_the_largest_tensor_and_not_by_the_model(tmp_path: Path) -> None:
    source = save_tiny(
        tmp_path / "hf",
        "llama",
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=4,
        vocab_size=12000,
    )
    size = (source / SINGLE).stat().st_size
    largest = 12000 * 768 * 4
    assert size > 5 * largest
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    there, back = map(int, result.stdout.split())
    slack = 64 << 20
    assert there < 2 * largest + slack and back < 2 * largest + slack, (there, back)
    assert 2 * largest + slack < size  # holding the model would fail
    assert_same(weights(tmp_path / "back"), load_file(source / SINGLE))
