"""SLURM's short form of node names, written out. Works where `scontrol` is not there: in a
container, on a laptop.
"""

from __future__ import annotations

import itertools
import re

from megatron_grpo.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# More than any cluster has; a typing error must not fill the memory.
MAX_HOSTS = 1 << 20


def expand_hosts(text: str) -> list[str]:
    """Every name, in order, repeated ones included.

    Numbers keep the width of the first of their range; several brackets vary the last one fastest,
    as `scontrol show hostnames` does. Empty text and "(null)" are no host.

    >>> expand_hosts("gpu[01-03,07],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login']
    >>> expand_hosts("r[1-2]n[8-10]")
    ['r1n8', 'r1n9', 'r1n10', 'r2n8', 'r2n9', 'r2n10']

    Raises:
        ConfigError: brackets or ranges that SLURM would not print.
    """
    text = text.strip()
    if text in ("", "(null)"):
        return []
    hosts: list[str] = []
    for entry in _split(text):
        hosts += _expand_entry(entry, text)
        if len(hosts) > MAX_HOSTS:
            raise _refused(text, f"has more than {MAX_HOSTS} names")
    return hosts


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    entries, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _refused(text, "has brackets that do not match")
        if character == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    if depth:
        raise _refused(text, "has brackets that do not match")
    return [*entries, text[start:]]


def _expand_entry(entry: str, text: str) -> list[str]:
    if not entry or re.search(r"\s", entry):
        raise _refused(text, "has an empty name or one with a space")
    parts = re.split(r"\[([^\[\]]*)\]", entry)
    # Every second part stood in brackets.
    choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MAX_HOSTS:
        raise _refused(text, f"has more than {MAX_HOSTS} names")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _refused(text, f"has a range {part!r}")
        first, last = match.group(1), match.group(2) or match.group(1)
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise _refused(text, f"has a range {part!r}")
        width = len(first)
        names += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return names


def _refused(text: str, problem: str) -> ConfigError:
    return ConfigError(
        "node list", problem, found=text, remedy="write it like gpu[01-03,07],login1"
    )
