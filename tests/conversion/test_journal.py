"""What is continued after an interruption, and what is begun anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from tiny import save_tiny

from megatron_grpo.conversion.boxes import Layout
from megatron_grpo.conversion.convert import to_hugging_face, to_megatron
from megatron_grpo.conversion.hf_folder import SINGLE, HfFolder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.errors import CheckpointError

QUIET = Console(quiet=True)


def no_room(*_: object) -> None:
    raise OSError("No space left on device")


def test_no_room_for_the_tokenizer_costs_no_weights(tmp_path: Path, monkeypatch: Any) -> None:
    source = HfFolder(save_tiny(tmp_path / "hf"))

    def there() -> None:
        to_megatron(source, tmp_path / "there", Layout(), QUIET)

    def back() -> None:
        to_hugging_face(MegatronFolder(tmp_path / "there"), tmp_path / "back", QUIET)

    for convert, name, file in ((there, "there", "__0_0.distcp"), (back, "back", SINGLE)):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", no_room)
            with pytest.raises(CheckpointError, match="No space left on device; free space"):
                convert()
        assert not (tmp_path / name).exists()
        written = (tmp_path / f".{name}.partial" / file).stat().st_mtime_ns
        convert()
        assert (tmp_path / name / file).stat().st_mtime_ns == written
        assert not (tmp_path / name / "progress.json").exists()


def test_what_was_begun_with_a_config_that_was_mended_since_is_not_continued(
    tmp_path: Path, monkeypatch: Any
) -> None:
    source = save_tiny(tmp_path / "hf")
    to_megatron(HfFolder(source), tmp_path / "there", Layout(), QUIET)
    like = tmp_path / "like"
    like.mkdir()
    fields = json.loads((source / "config.json").read_text())
    for vocab in (100, 130):  # the first is a mistake that padding hides
        (like / "config.json").write_text(json.dumps({**fields, "vocab_size": vocab}))
        (like / "tokenizer.json").write_text("{}")
        with monkeypatch.context() as patch:
            if vocab == 100:
                patch.setattr(shutil, "copyfile", no_room)
            folder = MegatronFolder(tmp_path / "there", like)
            try:
                to_hugging_face(folder, tmp_path / "back", QUIET)
            except CheckpointError:
                assert vocab == 100
    assert load_file(tmp_path / "back" / SINGLE)["lm_head.weight"].shape == (130, 64)
