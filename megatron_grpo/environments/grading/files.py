"""Files of responses to grade."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.environments.grading.pool import GraderPool
from megatron_grpo.errors import RewardError

_AT_ONCE = 256


def grade_file(path: Path, config: GradingConfig, write: Callable[[str], None]) -> dict[str, int]:
    """Grade every line of a JSON lines file with `response` and `answer`; write one JSON line each,
    in order, as they are done. Returns how many there were of each reason.

    Raises:
        RewardError: the file or a line of it cannot be read; what came before it is written.
    """
    rows = read_rows(path)
    with GraderPool(config) as pool:
        while chunk := list(islice(rows, _AT_ONCE)):
            for verdict in pool.grade(chunk):
                line = {
                    "reward": verdict.reward,
                    "reason": verdict.reason,
                    "extracted": verdict.extracted,
                    "seconds": verdict.seconds,
                }
                write(json.dumps(line))
        return pool.counts()


def read_rows(path: Path) -> Iterator[tuple[str, str]]:
    """(response, answer) of every line that is not blank. Numbers are taken as they are written;
    null is an empty text, which is never right.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(f"{path} line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(
            str(path), f"cannot be read: {error}", remedy="give a JSON lines file"
        ) from error


def _row(where: str, line: str) -> tuple[str, str]:
    remedy = 'write {"response": text, "answer": text}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RewardError(where, f"is no JSON: {error}", remedy=remedy) from error
    if not isinstance(row, dict) or not {"response", "answer"} <= row.keys():
        raise RewardError(where, "needs the fields response and answer", remedy=remedy)
    return as_text(row["response"], where), as_text(row["answer"], where)


def as_text(value: object, where: str) -> str:
    """A text field that may have been written as a number.

    >>> as_text(5, "here"), as_text(5.0, "here"), as_text(None, "here")
    ('5', '5.0', '')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(value)  # also one that no float holds
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise RewardError(where, "must be text or a number", found=value, remedy="convert it to text")
