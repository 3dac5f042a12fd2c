"""Weights in and out of the model under their Hugging Face names, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.conversion.families import CANONICAL_NAMES, ModelSpec
from megatron_grpo.conversion.hf_folder import (
    SINGLE,
    HfFolder,
    begin_folder,
    finish_folder,
    partial_folder,
    write_shard,
)
from megatron_grpo.conversion.rules import Direct
from megatron_grpo.conversion.sharding import join, shard_of
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron import mesh
from megatron_grpo.policy.megatron.model import DecoderModel

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.(.*)$")


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter of this rank with the rule that ties it to its Hugging Face tensors.

    Attributes:
        layer: global layer index; 0 outside the layers.
    """

    parameter: torch.nn.Parameter
    rule: Direct
    layer: int

    @property
    def hf_names(self) -> list[str]:
        return [name.format(layer=self.layer) for name in self.rule.hf]


def bind_parameters(chunks: Sequence[DecoderModel], spec: ModelSpec) -> list[BoundParameter]:
    """Every parameter of this pipeline rank with its rule, in model order."""
    bound = []
    for model in chunks:
        for name, parameter in model.named_parameters():
            match = _LAYER.match(name)
            layer, template = 0, name
            if match:
                layer = model.global_layer(int(match[2]))
                template = f"{match[1]}{{layer}}.{CANONICAL_NAMES.get(match[3], match[3])}"
            rule = spec.rule_for(template)
            _mark_sharded(parameter, rule)
            bound.append(BoundParameter(parameter, rule, layer))
    return bound


def _mark_sharded(parameter: torch.nn.Parameter, rule: Direct) -> None:
    """Say which parameters differ between tensor ranks.

    Megatron sets these as a side effect of random initialisation, which we skip; the global
    gradient norm counts a parameter without them on tensor rank 0 only.
    """
    if rule.axis is not None:
        vars(parameter).update(
            tensor_model_parallel=True, partition_dim=rule.axis, partition_stride=1
        )


def load_weights(bound: Sequence[BoundParameter], folder: HfFolder) -> None:
    """Fill this rank's parameters from a checkpoint, reading only this rank's share of it."""
    size, rank = mesh.tensor_group().size(), mesh.tensor_group().rank()
    with torch.no_grad():
        for item in bound:
            shard = shard_of(item.rule, item.layer, folder.spec, folder.read, size, rank)
            if shard.shape != item.parameter.shape:
                raise CheckpointError(
                    ", ".join(item.hf_names),
                    f"makes a shard unlike the model's {tuple(item.parameter.shape)}",
                    found=tuple(shard.shape),
                    remedy="this is a fault of the conversion table; report it",
                )
            item.parameter.copy_(shard)


def stored_tensors(
    bound: Sequence[BoundParameter], spec: ModelSpec
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and full shape of what this pipeline rank gives to the outside, in sending order."""
    for item in bound:
        if item.rule.stored:
            for name in item.hf_names:
                yield name, spec.hf_shape(name)


def gathered_tensors(
    bound: Sequence[BoundParameter], spec: ModelSpec, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their Hugging Face names, on the root of each pipeline stage.

    Every tensor rank of the root's group must run the iterator to its end; others than the root
    get nothing from it. Cast to `dtype` before travelling. Holds one parameter at a time.
    """
    size = mesh.tensor_group().size()
    for item in bound:
        if not item.rule.stored:
            continue
        shard = item.parameter.detach()
        shard = shard if dtype is None else shard.to(dtype)
        whole = item.rule.axis is None or size == 1
        shards = [shard] if whole else _gather_to_root(shard)
        if mesh.is_stage_root():
            yield from join(item.rule, item.layer, spec, shards)


def _gather_to_root(shard: Tensor) -> list[Tensor]:
    group = mesh.tensor_group()
    root = dist.get_global_rank(group, 0)
    shard = shard.contiguous()
    if dist.get_rank() != root:
        dist.gather(shard, None, dst=root, group=group)
        return []
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.gather(shard, shards, dst=root, group=group)
    return shards


def export_folder(bound: Sequence[BoundParameter], source: HfFolder, target: Path) -> None:
    """Write a Hugging Face checkpoint: one weight file per pipeline stage, index, side files.
    Collective.

    The folder appears whole under its name, or not at all.

    Raises:
        CheckpointError: on every rank, with the first failure of any rank.
    """
    stage, stages = mesh.stage()
    file = SINGLE if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
    first = dist.get_rank() == 0
    agree(attempt(lambda: begin_folder(target)) if first else None)
    written: list[tuple[str, list[str], int]] = []
    problem = None
    if mesh.holds_first_replica():
        tensors = gathered_tensors(bound, source.spec, None)
        if mesh.is_stage_root():
            manifest = [
                (name, shape, source.headers[name].dtype)
                for name, shape in stored_tensors(bound, source.spec)
            ]
            path = partial_folder(target) / file
            try:
                num_bytes = write_shard(path, manifest, tensors)
                written.append((file, [name for name, _, _ in manifest], num_bytes))
            except CheckpointError as error:
                problem = error
        for _ in tensors:  # peers of a root, and a root that failed: the gathers must complete
            pass
    agree(problem)
    everything: list[list[tuple[str, list[str], int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everything, written)
    problem = None
    if first:
        parts = [part for rank in everything for part in rank]
        shards = {name: names for name, names, _ in parts}
        total = sum(num_bytes for _, _, num_bytes in parts)
        problem = attempt(lambda: finish_folder(target, shards, total, source.side_files))
    agree(problem)


def attempt(action: Callable[[], object]) -> CheckpointError | None:
    """The CheckpointError an action raises, if any."""
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def agree(problem: CheckpointError | None) -> None:
    """Raise everywhere what went wrong anywhere."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(f"rank {rank}", text)
