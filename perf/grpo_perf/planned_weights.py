"""The tensors of a model of which only the shape is known, as the weight exchange plans them."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_perf.model_shape import Architecture, Weight
from megatron_grpo.weights.layouts import PlannedTensor


def planned_weights(model: Architecture) -> tuple[PlannedTensor, ...]:
    """Every tensor of a Hugging Face checkpoint of this model once: what Megatron fuses is taken
    apart. Names are Megatron's with a number, which is as good as any for counting bytes.
    """
    shape = model.embedding.shape
    table = [
        PlannedTensor(model.embedding.name, shape, 0, "embedding", vocabulary=True, tied=model.tied)
    ]
    for layer in range(model.num_layers):
        for weight in model.layer_weights(layer):
            table += _of_layer(model, weight, layer)
    table.append(PlannedTensor(model.final_norm.name, model.final_norm.shape, None, "last"))
    if not model.tied:
        table.append(PlannedTensor(model.head.name, model.head.shape, 0, "last", vocabulary=True))
    return tuple(table)


def _of_layer(model: Architecture, weight: Weight, layer: int) -> Iterator[PlannedTensor]:
    for expert in range(weight.copies) if weight.routed else [None]:
        for number, (rows, heads) in enumerate(_rows(model, weight)):
            suffix = "" if expert is None else f".{expert}"
            yield PlannedTensor(
                f"layers.{layer}.{weight.name}{suffix}.{number}",
                (rows, *weight.shape[1:]),
                weight.axis,
                layer=layer,
                expert=expert,
                heads=heads,
            )


def _rows(model: Architecture, weight: Weight) -> list[tuple[int, int]]:
    """(rows, key-value heads along them) of each tensor that a weight is made of."""
    rows = weight.shape[0]
    if "linear_qkv" in weight.name:
        groups = model.num_kv_heads
        values = groups * model.value_width
        return [
            (model.num_heads * model.head_dim, 0),
            (groups * model.head_dim, groups),
            (values, groups),
        ]
    if weight.name.endswith("linear_fc1"):
        return [(rows // 2, 0), (rows // 2, 0)]
    return [(rows, 0)]
