"""What a check has to say, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from rich.console import Console
from rich.text import Text

from megatron_grpo.config import RunConfig
from megatron_grpo.errors import ConfigErrors, GrpoError
from megatron_grpo.runtime.placement import Node

Level = Literal["problem", "warning", "ok", "unknown"]
_ORDER: tuple[Level, ...] = ("problem", "warning", "unknown", "ok")
_MARKS = {"problem": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is right, wrong, or could not be seen from here.

    Attributes:
        rule: name of the rule that found it.
        where: key, file or node.
    """

    level: Level
    where: str
    text: str
    remedy: str = ""
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Machines:
    """The nodes that a job will ask for.

    Attributes:
        cpus_per_node: None is not known.
        engine_nodes: more of them, for engines alone; the others are then for the policy alone.
    """

    nodes: int
    gpus_per_node: int = 8
    cpus_per_node: int | None = None
    engine_nodes: int = 0
    engine_gpus_per_node: int = 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node + self.engine_nodes * self.engine_gpus_per_node

    def as_nodes(self) -> list[Node]:
        """For a placement. A node whose cores nobody counted has enough of them for its GPUs."""
        policy = self._some("node", self.nodes, self.gpus_per_node)
        engines = self._some("engine-node", self.engine_nodes, self.engine_gpus_per_node)
        if engines:
            policy = [replace(node, role="policy") for node in policy]
        return policy + [replace(node, role="engine") for node in engines]

    def _some(self, name: str, count: int, gpus: int) -> list[Node]:
        cpus = gpus if self.cpus_per_node is None else self.cpus_per_node
        return [Node(f"{name}{i:04d}", gpus, cpus) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: a config, and the cluster it is meant for.

    Attributes:
        machines: None if nobody said; then nothing is said about room.
        gpu: a row of grpo_perf.hardware; "" is not known.
    """

    config: RunConfig
    machines: Machines | None = None
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named question with the reason it is asked."""

    name: str
    why: str
    ask: Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, problems first."""

    findings: tuple[Finding, ...] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """0: nothing stops the run. 1: something does."""
        return int(any(finding.level == "problem" for finding in self.findings))


def run_rules(rules: Sequence[Rule], subject: Subject) -> Report:
    """Ask every rule; one that is refused an answer by an error of ours has found a problem."""
    found: list[Finding] = []
    for rule in rules:
        try:
            answers = list(rule.ask(subject))
        except GrpoError as error:
            answers = list(problems_of(error))
        found += [Finding(a.level, a.where, a.text, a.remedy, a.rule or rule.name) for a in answers]
    return report_of(found)


def report_of(findings: Iterable[Finding]) -> Report:
    """Problems first, otherwise as found."""
    return Report(tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.level))))


def problems_of(error: GrpoError, rule: str = "") -> Iterator[Finding]:
    """An error as findings, one per line of it."""
    for one in error.errors if isinstance(error, ConfigErrors) else (error,):
        text = one.problem if one.found is None else f"{one.problem} (found {one.found!r})"
        yield Finding("problem", one.where, text, one.remedy, rule)


def as_json(report: Report) -> str:
    """For scripts: {"ok": bool, "findings": [{level, where, text, remedy, rule}]}."""
    findings = [asdict(finding) for finding in report.findings]
    return json.dumps({"ok": report.exit_code == 0, "findings": findings}, indent=1)


def show(report: Report, console: Console) -> None:
    """Problems with their remedies beneath; what is right on one line in the end."""
    good = [finding for finding in report.findings if finding.level == "ok"]
    for finding in report.findings:
        if finding.level == "ok":
            continue
        mark = (f"{finding.level:<8}", _MARKS[finding.level])
        console.print(Text.assemble(mark, (finding.where, "bold"), f": {finding.text}"))
        if finding.remedy:
            console.print(Text.assemble(" " * 8, ("-> ", "dim"), finding.remedy))
    for finding in good:
        console.print(Text.assemble((f"{'ok':<8}", "green"), finding.where, f": {finding.text}"))
    problems = sum(finding.level == "problem" for finding in report.findings)
    if problems:
        noun = "problem" if problems == 1 else "problems"
        console.print(Text(f"{problems} {noun} would stop this run", "bold red"))
    else:
        console.print(Text("nothing found that would stop this run", "bold green"))
