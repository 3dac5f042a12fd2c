"""Distributions of response lengths, as given on the command line."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.errors import ConfigError

_SYNTAX = "constant:N, lognormal:MEDIAN,SIGMA, file:PATH (one length per line) or a run's folder"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths in tokens, cut at `longest`.

    Attributes:
        draw: one length from a random generator.
        mean: estimated from 20,000 draws where there is no closed form.
    """

    text: str
    longest: int
    draw: Callable[[random.Random], int]
    mean: float


def lengths_among(text: str, values: Iterable[int], longest: int) -> Lengths:
    """Draws from recorded lengths.

    Raises:
        ConfigError: there are none.
    """
    kept = [min(value, longest) for value in values if value > 0]
    if not kept:
        raise ConfigError(f"lengths {text}", "holds no length", remedy="record some first")
    return Lengths(text, longest, lambda generator: generator.choice(kept), sum(kept) / len(kept))


def parse_lengths(text: str, longest: int) -> Lengths:
    """Read `constant:N`, `lognormal:MEDIAN,SIGMA` or `file:PATH`.

    Raises:
        ConfigError: none of these, or numbers out of range.

    >>> parse_lengths("constant:100", 50).mean
    50.0
    """
    kind, _, rest = text.partition(":")
    if kind == "constant" and rest.isdigit() and int(rest) > 0:
        value = min(int(rest), longest)
        return Lengths(text, longest, lambda generator: value, float(value))
    if kind == "lognormal":
        return _lognormal(text, rest, longest)
    if kind == "file":
        return _recorded(text, Path(rest).expanduser(), longest)
    raise ConfigError("lengths", "is not a distribution", found=text, remedy=f"write {_SYNTAX}")


def _lognormal(text: str, rest: str, longest: int) -> Lengths:
    try:
        median, sigma = (float(part) for part in rest.split(","))
    except ValueError:
        median = sigma = -1.0
    if not (median > 0 and 0 <= sigma < 10):
        raise ConfigError(
            "lengths", "needs a positive median and a sigma", found=text, remedy=f"write {_SYNTAX}"
        )
    centre = math.log(median)

    def draw(generator: random.Random) -> int:
        return max(1, min(longest, round(generator.lognormvariate(centre, sigma))))

    return Lengths(text, longest, draw, _mean_of(draw))


def _recorded(text: str, path: Path, longest: int) -> Lengths:
    try:
        values = [int(word) for word in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"lengths {path}", f"cannot be read: {error}", remedy="one length per line"
        ) from error
    return lengths_among(text, values, longest)


def _mean_of(draw: Callable[[random.Random], int]) -> float:
    generator = random.Random(0)
    return sum(draw(generator) for _ in range(20_000)) / 20_000
