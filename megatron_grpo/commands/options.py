"""Options that several commands take, and how they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE ...]", help="e.g. steps=50 policy.parallel.tensor=2"),
]


def wide_console() -> Console:
    """As wide as the terminal; wide enough for tables where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)
