"""Weights in and out of the model under their Hugging Face names, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.conversion.families import CANONICAL_NAMES, ModelSpec
from megatron_grpo.conversion.hf_folder import (
    SINGLE,
    begin_folder,
    finish_folder,
    partial_folder,
    write_shard,
)
from megatron_grpo.conversion.megatron_folder import Checkpoint
from megatron_grpo.conversion.rules import Direct, Vocabulary
from megatron_grpo.conversion.sharding import join, shard_of
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron import mesh
from megatron_grpo.policy.megatron.model import DecoderModel

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.(.*)$")
# One module per expert, or (Transformer Engine) one module with a numbered weight per expert.
_EXPERTS = "mlp.experts.local_experts."
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc\d)\.weight(\d+)$")


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter of this rank with the rule that ties it to its Hugging Face tensors.

    Attributes:
        parameter: or a buffer, which is not trained.
        layer: global layer index; 0 outside the layers.
        expert: global expert index; 0 outside the experts.
    """

    parameter: Tensor
    rule: Direct
    layer: int
    expert: int = 0

    @property
    def hf_names(self) -> list[str]:
        return self.rule.hf_names(self.layer, self.expert)

    def of_every_share(self, spec: ModelSpec) -> list[BoundParameter]:
        """This parameter, or, for an expert, its peers in all shares of the experts, in order."""
        if not self.rule.per_expert:
            return [self]
        _, shares = mesh.expert_share()
        local = len(spec.experts_of(self.rule)) // shares
        first = self.expert % local
        return [replace(self, expert=first + share * local) for share in range(shares)]


def bind_parameters(chunks: Sequence[DecoderModel], spec: ModelSpec) -> list[BoundParameter]:
    """Every parameter of this pipeline rank with its rule, chunk by chunk in model order, then the
    routers' biases, which are buffers.
    """
    bound = []
    for model in chunks:
        biases = (b for b in model.named_buffers() if b[0].endswith(".expert_bias"))
        for name, parameter in (*model.named_parameters(), *biases):
            match = _LAYER.match(name)
            layer, expert, template = 0, 0, name
            if match:
                layer = model.global_layer(int(match[2]))
                inner, expert = _without_expert(CANONICAL_NAMES.get(match[3], match[3]))
                template = f"{match[1]}{{layer}}.{inner}"
            rule = spec.rule_for(template)
            if rule.per_expert:
                share, shares = mesh.expert_share()
                expert += share * (len(spec.experts_of(rule)) // shares)
            _mark_sharded(parameter, rule)
            bound.append(BoundParameter(parameter, rule, layer, expert))
    return bound


def _without_expert(name: str) -> tuple[str, int]:
    """A parameter's name inside its layer with the local expert index taken out."""
    if match := _EXPERT.match(name):
        return f"{_EXPERTS}{{expert}}.{match[2]}", int(match[1])
    if match := _GROUPED_EXPERT.match(name):
        return f"{_EXPERTS}{{expert}}.{match[1]}.weight", int(match[2])
    return name, 0


def _mark_sharded(parameter: Tensor, rule: Direct) -> None:
    """Say which parameters differ between tensor ranks, and which are experts.

    Megatron sets these as a side effect of random initialisation, which we skip; the global
    gradient norm counts a parameter without them on tensor rank 0 only. Experts have replicas of
    their own also where only their tensor split differs, which Megatron does not mark.
    """
    if rule.per_expert:
        vars(parameter)["allreduce"] = False
    if rule.axis is not None:
        vars(parameter).update(
            tensor_model_parallel=True, partition_dim=rule.axis, partition_stride=1
        )


def load_weights(bound: Sequence[BoundParameter], folder: Checkpoint) -> None:
    """Fill this rank's parameters from a checkpoint, reading only this rank's share of it."""
    with torch.no_grad():
        for item in bound:
            experts = item.rule.per_expert
            group = mesh.expert_tensor_group() if experts else mesh.tensor_group()
            shard = shard_of(
                item.rule,
                item.layer,
                folder.spec,
                folder.read,
                group.size(),
                group.rank(),
                item.expert,
            )
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
            for peer in item.of_every_share(spec):
                for name in peer.hf_names:
                    yield name, spec.hf_shape(name)


def gathered_tensors(
    bound: Sequence[BoundParameter], spec: ModelSpec, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their Hugging Face names, on the root of each pipeline stage.

    Every rank must run the iterator to its end; others than the root get nothing from it. Cast to
    `dtype` before travelling. Holds one parameter at a time, of experts one of each share.
    """
    for item in bound:
        experts = item.rule.per_expert
        gives = mesh.holds_first_experts() if experts else mesh.holds_first_replica()
        if not item.rule.stored or not gives:
            continue
        shard = item.parameter.detach()
        shard = shard if dtype is None or item.rule.exact else shard.to(dtype)
        group = mesh.experts_group() if experts else mesh.tensor_group()
        whole = item.rule.axis is None or group.size() == 1
        shards = [shard] if whole else _gather_to_root(shard, group)
        if not mesh.is_stage_root():
            continue
        peers = item.of_every_share(spec)
        each = len(shards) // len(peers)
        for index, peer in enumerate(peers):
            part = shards[index * each : (index + 1) * each]
            yield from join(peer.rule, peer.layer, spec, part, peer.expert)


def _gather_to_root(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The shards in rank order on the group's first rank, which is the root; [] elsewhere."""
    root = dist.get_global_rank(group, 0)
    shard = shard.contiguous()
    if dist.get_rank() != root:
        dist.gather(shard, None, dst=root, group=group)
        return []
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.gather(shard, shards, dst=root, group=group)
    return shards


class LocalParts(Mapping[str, Tensor]):
    """What this rank holds of each tensor, under Hugging Face names: its range along the tensor's
    axis, padding left out. Views where the parameter is not fused; nothing is kept.
    """

    def __init__(self, bound: Sequence[BoundParameter], spec: ModelSpec) -> None:
        self._spec = spec
        self._bound = {name: (item, i) for item in bound for i, name in enumerate(item.hf_names)}

    def __getitem__(self, name: str) -> Tensor:
        item, index = self._bound[name]
        part = item.rule.unpack(item.parameter.detach(), self._spec)[index]
        if isinstance(item.rule, Vocabulary):
            first = mesh.tensor_group().rank() * len(part)
            part = part[: max(0, self._spec.vocab - first)]
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._bound)

    def __len__(self) -> int:
        return len(self._bound)


def frozen_tensors(bound: Sequence[BoundParameter]) -> frozenset[str]:
    """Names of tensors that training never changes, by whole layers: engines fuse tensors of a
    layer, and take all of a fused one or nothing.
    """
    trained = {(item.rule.layered, item.layer) for item in bound if item.parameter.requires_grad}
    return frozenset(
        name
        for item in bound
        if (item.rule.layered, item.layer) not in trained
        for name in item.hf_names
    )


def export_folder(bound: Sequence[BoundParameter], source: Checkpoint, target: Path) -> None:
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
