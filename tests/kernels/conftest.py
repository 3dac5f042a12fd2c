"""Puts the helpers beside these tests on the path, and keeps gloo workers for the whole session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from logprob_workers import GlooWorld


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[GlooWorld]:
    world = GlooWorld()
    yield world
    world.close()
