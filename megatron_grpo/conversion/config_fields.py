"""Typed access to the fields of a config.json; a missing or odd one is an error with its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeGuard

from megatron_grpo.config.base import Value
from megatron_grpo.errors import CheckpointError


def is_positive(value: Value) -> TypeGuard[int | float]:
    """Whether this is a number of use: not a flag, finite as a float, above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


class Reader:
    """Typed access to fields; errors name the field and the file."""

    def __init__(self, fields: Mapping[str, Value], where: str) -> None:
        self.fields = fields
        self.where = where

    def error(
        self, name: str, problem: str, found: object = None, remedy: str = ""
    ) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}", problem, found=found, remedy=remedy)

    def missing(self, name: str) -> bool:
        return self.fields.get(name) is None

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if not is_positive(value):
            problem = "is missing" if value is None else "must be a positive finite number"
            raise self.error(name, problem, value, "take config.json from the model's author")
        return float(value)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise self.error(name, "must be a whole number", value)
        return int(value)

    def whole(self, name: str) -> int:
        """As `count`, and it may be 0."""
        return 0 if self.fields.get(name) == 0 else self.count(name)

    def required_flag(self, name: str) -> bool:
        if self.missing(name):
            raise self.error(name, "is missing", remedy="take config.json from the model's author")
        return self.flag(name, absent=False)

    def flag(self, name: str, absent: bool) -> bool:
        value = self.fields.get(name, absent)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", value)
        return value

    def divide(self, name: str, whole: int, by: int) -> int:
        """whole / by, where `name` is the field that gave `by`."""
        if whole % by:
            raise self.error(name, f"does not divide {whole}", by)
        return whole // by
