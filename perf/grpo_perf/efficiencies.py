"""The fitted and assumed efficiencies of the cost model: named, between 0 and 1, with their origin.

The values are in efficiencies.json, which `python -m grpo_perf.fit --write` writes. Each says how
much of an ideal rate is reached; the ideal rates are the hardware table and the constants below.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_grpo.config.base import Section, validate

Efficiency = Annotated[float, Field(gt=0, le=1)]

# Ideal costs that no data sheet states. Each is a floor that a good implementation reaches.
KERNEL_LAUNCH_S = 5e-6
"""One kernel launched from the host (CUDA documentation and microbenchmarks: 4 to 7 us)."""
GRAPH_KERNEL_S = 2e-6
"""One small kernel within a CUDA graph, end to start of the next included."""
COLLECTIVE_LATENCY_INSIDE_S = 8e-6
"""Small all-reduce within a scale-up domain."""
COLLECTIVE_LATENCY_OUTSIDE_S = 25e-6
"""Small all-reduce over a few nodes of one InfiniBand fabric."""
KERNELS_DENSE_LAYER = 25
"""Kernels of one forward pass of a dense layer without graphs: norms, projections, rotary
embedding, attention, gated feed-forward, residuals."""
KERNELS_EXPERT_LAYER = 60
"""The same with experts: plus router, top-k, permutation, two exchanges, grouped products."""
GRAPH_KERNELS_DENSE_LAYER = 12
GRAPH_KERNELS_EXPERT_LAYER = 20
"""The same in an inference engine with fused kernels."""
PUSH_LAUNCHES_PER_TENSOR = 20
"""Host calls to export one tensor: view, cast, gather over each axis, conversion, copy."""


class Efficiencies(Section):
    """Shares of ideal rates that real systems reach."""

    matmul: Efficiency
    """Of the peak matrix rate, by the large products of training and scoring."""
    decode_bandwidth: Efficiency
    """Of the memory bandwidth, by an engine reading weights and KV cache."""
    decode_issue: Efficiency
    """Of the rate at which a graph replays small kernels, by a decode step with its scheduler and
    sampler."""
    training_issue: Efficiency
    """Of the rate at which a host launches kernels, by the layers of a training pass; small where
    dropless expert layers wait for their split sizes on the host."""
    network: Efficiency
    """Of any link, by collectives: bandwidth and, as its inverse, latency."""
    push_issue: Efficiency
    """Of the rate of host calls, by the export and loading of single tensors in a weight push."""
    host_link: Efficiency
    """Of the link to host memory, by offloading and reloading a colocated policy."""
    busy: Efficiency
    """Share of a step's wall time in which one of the modelled phases runs; the rest is the driver:
    prompts, rewards, batches, logs."""


class Record(Section):
    """One efficiency as it is stored."""

    value: Efficiency
    origin: str
    expected: Efficiency
    """Centre of the prior of the fit."""
    basis: str
    """Where that expectation comes from."""
    spread: Annotated[float, Field(ge=0)]
    """Standard deviation of its logarithm under the prior; 0 is fixed, not fitted."""


class EfficiencyFile(Section):
    """efficiencies.json."""

    about: str
    records: dict[str, Record]

    @property
    def efficiencies(self) -> Efficiencies:
        values = {name: record.value for name, record in self.records.items()}
        return Efficiencies.model_validate(values)


def stored_path() -> Path:
    """Where the fit writes."""
    return Path(str(files("grpo_perf").joinpath("efficiencies.json")))


def read_efficiency_file(path: Path | None = None) -> EfficiencyFile:
    source = path or stored_path()
    return validate(EfficiencyFile, json.loads(source.read_text(encoding="utf-8")), source.name)


def stored_efficiencies() -> Efficiencies:
    """The efficiencies this package ships."""
    return read_efficiency_file().efficiencies
