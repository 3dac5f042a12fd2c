"""A Megatron checkpoint seen through the tables: by Hugging Face names, tensor by tensor.

It offers what HfFolder offers, so that whatever reads one reads the other: ranks of any layout,
the frozen reference, the exporter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.hf_folder import Header, HfFolder, side_files_of
from megatron_grpo.conversion.rules import Direct, Vocabulary
from megatron_grpo.conversion.torch_dist import (
    COMMON,
    MARKER,
    METADATA,
    PIECES_SUFFIX,
    is_torch_dist,
    read_box,
    read_index,
)
from megatron_grpo.errors import CheckpointError

log = logging.getLogger(__name__)

# In a checkpoint Megatron calls these norms as Transformer Engine does, whichever layers it ran.
_STORED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# Around latent attention a norm is fused into the one product that follows it, if there is one.
_STORED_LATENT_NAMES = {
    f"self_attention.{letters}_layernorm.weight": (
        f"self_attention.linear_{letters}_up_proj.layer_norm_weight"
    )
    for letters in ("q", "kv")
}
# Of a training checkpoint's keys, those of the optimizer's state; of a model's, those of the layers
# that predict further tokens.
_OPTIMIZER, _BESIDE = "optimizer.", "mtp."
_LAYER, _EXPERT = "decoder.layers.{layer}.", "mlp.experts.local_experts.{expert}."


@dataclass(frozen=True, slots=True)
class Location:
    """Where a Megatron tensor lies: inside tensor `key`, at `lead` in the dimensions before its
    own.

    Attributes:
        lead, lead_shape: (layer,) and (expert,) of a stack, and how many there are.
    """

    key: str
    lead: tuple[int, ...]
    lead_shape: tuple[int, ...]


def locate(rule: Direct, spec: ModelSpec, layer: int, expert: int) -> Location:
    """Megatron's own naming: layers are stacked where all are alike, experts always."""
    inside = rule.megatron.removeprefix(_LAYER)
    if inside == rule.megatron:
        return Location(rule.megatron, (), ())
    inside = _stored_names(spec, layer).get(inside, inside)
    lead: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    prefix = f"decoder.layers.{layer}."
    if spec.layers_alike:
        prefix, lead, shape = "decoder.layers.", (layer,), (spec.num_layers,)
    if rule.per_expert:
        inside = inside.replace(_EXPERT, "mlp.experts.experts.")
        lead, shape = (*lead, expert), (*shape, len(spec.experts_of(rule)))
    return Location(prefix + inside, lead, shape)


def _stored_names(spec: ModelSpec, layer: int) -> Mapping[str, str]:
    if spec.latent is None:
        return _STORED_NAMES
    name = "pre_mlp_layernorm.weight"
    dense = spec.mixture is None or layer in spec.mixture.dense_layers
    return {**_STORED_LATENT_NAMES, **({name: _STORED_NAMES[name]} if dense else {})}


def extra_states(spec: ModelSpec) -> list[str]:
    """Keys of the empty objects that Megatron's linear layers keep beside their weights."""
    keys = []
    for rule in spec.rules():
        module, _, kind = rule.megatron.rpartition(".")
        if kind != "weight" or not module.rpartition(".")[2].startswith("linear_"):
            continue
        for layer in spec.layers_of(rule):
            for expert in spec.experts_of(rule):
                place = locate(rule, spec, layer, expert)
                stem = place.key.removesuffix(".weight")
                index = ".".join(map(str, place.lead or (0,)))
                count = ".".join(map(str, place.lead_shape or (1,)))
                keys.append(f"{stem}._extra_state/shard_{index}_{count}")
    return keys


class MegatronFolder:
    """Lazy view of a Megatron checkpoint with config.json beside it; see HfFolder.

    Args:
        like: folder of config.json and the other side files, where the checkpoint has none.
        state: of the optimizer, to see instead of the weights ("exp_avg", say); parameters that
            have no such state are left out.

    Attributes:
        side: folder of config.json.

    Raises:
        CheckpointError: unreadable, or tensors missing, unexpected or of another shape, by name.
    """

    def __init__(self, path: Path, like: Path | None = None, state: str = "") -> None:
        self.path = path
        self._prefix = f"optimizer.state.{state}." if state else ""
        self.side = like or path
        if not (self.side / "config.json").is_file():
            raise CheckpointError(
                str(path),
                "holds no config.json to say which model it is",
                remedy="name the Hugging Face folder it came from with --like",
            )
        self.spec: ModelSpec = read_model_spec(self.side / "config.json")
        self._stored = read_index(path)
        self._places: dict[str, tuple[Direct, int, int, int]] = {}
        headers = {}
        if not state:
            self._refuse_others()
        for rule, layer, expert in self.spec.parameters():
            dtype = self._check(rule, layer, expert)
            if dtype is None:
                continue
            for part, name in enumerate(rule.hf_names(layer, expert)):
                self._places[name] = rule, part, layer, expert
                headers[name] = Header(path, self.spec.hf_shape(name), dtype)
        self.headers: Mapping[str, Header] = headers

    def _check(self, rule: Direct, layer: int, expert: int) -> torch.dtype | None:
        place = locate(rule, self.spec, layer, expert)
        tensor = self._stored.get(self._prefix + place.key)
        if tensor is None and self._prefix:
            return None
        if tensor is None:
            raise CheckpointError(
                f"{self.path}: {place.key}",
                "is missing",
                remedy="config.json must match the weights",
            )
        rows = [self.spec.hf_shape(name)[0] for name in rule.hf_names(layer, expert)]
        rest = self.spec.hf_shape(rule.hf_names(layer, expert)[0])[1:]
        wanted = (*place.lead_shape, sum(rows), *rest)
        found = tensor.shape
        padded = isinstance(rule, Vocabulary) and found[1:] == wanted[1:] and found > wanted
        if found != wanted and not padded:
            raise CheckpointError(
                f"{self.path}: {place.key}",
                f"has another shape than config.json says, {wanted}",
                found=found,
                remedy="config.json must match the weights",
            )
        return tensor.dtype

    def _refuse_others(self) -> None:
        """A tensor that config.json says nothing of would be lost, and the model another one."""
        wanted = {
            locate(rule, self.spec, layer, expert).key
            for rule, layer, expert in self.spec.parameters()
        }
        others = [key for key in self._stored if key not in wanted and _OPTIMIZER not in key]
        beside = [key for key in others if key.startswith(_BESIDE) and self.spec.family.latent]
        if beside:
            log.warning(
                "%s: %d tensors of multi-token prediction are left out", self.path, len(beside)
            )
        extra = sorted(set(others) - set(beside))
        if extra:
            raise CheckpointError(
                str(self.path),
                f"{len(extra)} tensors do not belong to this {self.spec.family.name} model",
                found=extra[:4],
                remedy="config.json (tie_word_embeddings, num_hidden_layers) must match the "
                "weights",
            )

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """A tensor, or its range [start, stop) along dimension `axis`."""
        shape = self.headers[name].shape
        if axis is None:
            return self._box(name, 0, shape[0], slice(0, math.prod(shape[1:])))
        if axis == 0:
            return self._box(name, start, stop, slice(0, math.prod(shape[1:])))
        return self._box(name, 0, shape[0], slice(start, stop))

    def _box(self, name: str, start: int, stop: int, columns: slice) -> Tensor:
        """Rows [start, stop) of a Hugging Face tensor: one read of the Megatron rows around them,
        of which those of other parts are dropped.
        """
        rule, part, layer, expert = self._places[name]
        rows = [self.spec.hf_shape(n)[0] for n in rule.hf_names(layer, expert)]
        mine = [run for run in rule.runs(rows, self.spec) if run.part == part]
        mine = [run for run in mine if run.hf_start < stop and run.hf_start + run.rows > start]
        matrix = len(self.headers[name].shape) == 2
        if not mine:  # an empty range, as of a rank that holds padding only
            width = [columns.stop - columns.start] if matrix else []
            return torch.empty(0, *width, dtype=self.headers[name].dtype)
        first = mine[0].megatron_start + max(0, start - mine[0].hf_start)
        last = mine[-1].megatron_start + min(mine[-1].rows, stop - mine[-1].hf_start)
        place = locate(rule, self.spec, layer, expert)
        offsets = [*place.lead, first, *([columns.start] if matrix else [])]
        sizes = [1] * len(place.lead) + [last - first]
        sizes += [columns.stop - columns.start] if matrix else []
        box = read_box(self.path, self._stored[self._prefix + place.key], offsets, sizes)
        box = box.reshape(sizes[len(place.lead) :])
        if len(mine) == 1:
            return box
        pieces = []
        for run in mine:
            low = max(run.hf_start, start) - run.hf_start + run.megatron_start - first
            high = min(run.hf_start + run.rows, stop) - run.hf_start + run.megatron_start - first
            pieces.append(box[low:high])
        return torch.cat(pieces)

    @property
    def side_files(self) -> list[Path]:
        ours = (MARKER, METADATA, COMMON)
        return [
            file
            for file in side_files_of(self.side)
            if file.name not in ours and file.suffix != PIECES_SUFFIX
        ]


Checkpoint = HfFolder | MegatronFolder


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face folder or a Megatron checkpoint, whichever it is."""
    return MegatronFolder(path) if is_torch_dist(path) else HfFolder(path)
