"""The tensors of a model as planning sees them, from its family's conversion rules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.rules import Direct, FusedQKV, Vocabulary
from megatron_grpo.weights.layouts import Place, PlannedTensor


def planned_tensors(spec: ModelSpec) -> tuple[PlannedTensor, ...]:
    """Every tensor of a checkpoint once, in model order: outer tensors, then layer by layer."""
    layered: list[list[PlannedTensor]] = [[] for _ in range(spec.num_layers)]
    first: list[PlannedTensor] = []
    last: list[PlannedTensor] = []
    for rule in spec.rules():
        if not rule.stored:
            continue
        for tensor in _of_rule(rule, spec):
            if tensor.place == "layer":
                layered[tensor.layer].append(tensor)
            else:
                (first if tensor.place == "embedding" else last).append(tensor)
    return (*first, *(tensor for layer in layered for tensor in layer), *last)


def _of_rule(rule: Direct, spec: ModelSpec) -> Iterator[PlannedTensor]:
    place: Place = "layer"
    if "{layer}" not in rule.megatron:
        place = "embedding" if rule.megatron.startswith("embedding.") else "last"
    for layer in spec.layers_of(rule):
        for expert in spec.experts_of(rule):
            for number, name in enumerate(rule.hf_names(layer, expert)):
                yield PlannedTensor(
                    name,
                    spec.hf_shape(name),
                    rule.axis,
                    place,
                    layer,
                    expert if rule.per_expert else None,
                    vocabulary=isinstance(rule, Vocabulary),
                    # An engine may give one key-value head to several workers, never a query head.
                    heads=spec.num_kv_heads if isinstance(rule, FusedQKV) and number else 0,
                    tied=spec.tied and place == "embedding",
                    exact=rule.exact,
                )
