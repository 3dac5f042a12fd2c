"""Files of pieces: what is stored, and what is said when it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
from torch import Tensor

from megatron_grpo.conversion import torch_dist
from megatron_grpo.conversion.torch_dist import Stored, read_box, write_pieces
from megatron_grpo.errors import CheckpointError

Boxes = Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def boxes(numbers: Tensor, sizes: tuple[int, ...]) -> Boxes:
    yield "a", (0,) * len(sizes), sizes, numbers


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (OSError(28, "No space left on device"), "pieces: cannot be written.*No space left"),
        (KeyboardInterrupt("Ctrl-C"), "^Ctrl-C$"),
    ],
)
def test_what_stops_a_piece_half_written_is_called_by_its_name(
    tmp_path: Path, monkeypatch: Any, reason: BaseException, said: str
) -> None:
    save = torch.save

    class Stopped:
        def __init__(self) -> None:
            self.writes = 0

        def write(self, data: bytes) -> int:
            self.writes += 1
            if self.writes == 3:
                raise reason
            return len(data)

        def flush(self) -> None: ...

    def stopped(value: Tensor, out: object) -> None:
        save(value, cast(BinaryIO, Stopped()))

    monkeypatch.setattr(torch_dist.torch, "save", stopped)
    expected = CheckpointError if isinstance(reason, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=said):
        write_pieces(tmp_path / "pieces", boxes(torch.zeros(9), (9,)))


def test_what_reading_raises_is_not_called_an_error_of_writing(tmp_path: Path) -> None:
    def broken() -> Boxes:
        yield from boxes(torch.zeros(9), (9,))
        raise RuntimeError("of the reader")

    with pytest.raises(RuntimeError, match="of the reader"):
        write_pieces(tmp_path / "pieces", broken())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_is_stored_without_what_it_is_a_view_of(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(5000.0).view(100, 50).to(dtype)
    for view in (whole, whole[10:20], whole[:, 7:8], whole[3:4, 1:2], whole.t()[49:]):
        shape = tuple(view.shape)
        (piece,) = write_pieces(tmp_path / "pieces", boxes(view, shape))
        assert piece.length < view.nbytes + 2000
        got = read_box(tmp_path, Stored(shape, dtype, (piece,)), [0, 0], shape)
        assert got.dtype == dtype and torch.equal(got, view)
