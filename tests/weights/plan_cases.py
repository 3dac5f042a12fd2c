"""Tables of tensors to plan for, from a handful to those of a model of 671 billion parameters."""

from __future__ import annotations

from megatron_grpo.weights.layouts import PlannedTensor


def small_table(
    layers: int = 4, experts: int = 0, tied: bool = False, vocab: int = 130, scale: int = 1
) -> list[PlannedTensor]:
    """Hidden 64, 8 heads, 2 key-value heads of 8; `experts` replace the MLP of odd layers."""
    h, ffn = 64 * scale, 128 * scale
    table = [PlannedTensor("embed", (vocab, h), 0, "embedding", vocabulary=True, tied=tied)]
    for layer in range(layers):
        name = f"layers.{layer}."
        table += [
            PlannedTensor(name + "in_norm", (h,), layer=layer),
            PlannedTensor(name + "q", (8 * 8, h), 0, layer=layer),
            PlannedTensor(name + "k", (2 * 8, h), 0, layer=layer, heads=2),
            PlannedTensor(name + "v", (2 * 8, h), 0, layer=layer, heads=2),
            PlannedTensor(name + "o", (h, 8 * 8), 1, layer=layer),
            PlannedTensor(name + "post_norm", (h,), layer=layer),
        ]
        for expert in range(experts) if experts and layer % 2 else [None]:
            prefix = name if expert is None else f"{name}experts.{expert}."
            table += [
                PlannedTensor(prefix + "gate", (ffn, h), 0, layer=layer, expert=expert),
                PlannedTensor(prefix + "up", (ffn, h), 0, layer=layer, expert=expert),
                PlannedTensor(prefix + "down", (h, ffn), 1, layer=layer, expert=expert),
            ]
        if experts and layer % 2:
            table.append(PlannedTensor(name + "router", (experts, h), layer=layer))
    table.append(PlannedTensor("norm", (h,), None, "last"))
    if not tied:
        table.append(PlannedTensor("head", (vocab, h), 0, "last", vocabulary=True))
    return table


def large_table() -> list[PlannedTensor]:
    """61 layers of 256 experts and compressed attention, hidden 7168: 671 billion parameters."""
    h, width = 7168, 2048
    table = [PlannedTensor("embed", (129280, h), 0, "embedding", vocabulary=True)]
    for layer in range(61):
        name = f"layers.{layer}."
        wholes = {"in": (h,), "post": (h,), "q_a": (1536, h), "q_norm": (1536,)}
        wholes |= {"kv_a": (576, h), "kv_norm": (512,)}
        table += [PlannedTensor(name + n, shape, layer=layer) for n, shape in wholes.items()]
        table += [
            PlannedTensor(name + "q_b", (128 * 192, 1536), 0, layer=layer),
            PlannedTensor(name + "kv_b", (128 * 256, 512), 0, layer=layer),
            PlannedTensor(name + "o", (h, 128 * 128), 1, layer=layer),
        ]
        table += _mlp(name, layer, 18432, None) if layer < 3 else _mlp(name, layer, width, None)
        if layer >= 3:
            table.append(PlannedTensor(name + "router", (256, h), layer=layer))
            for expert in range(256):
                table += _mlp(f"{name}experts.{expert}.", layer, width, expert)
    table.append(PlannedTensor("norm", (h,), None, "last"))
    table.append(PlannedTensor("head", (129280, h), 0, "last", vocabulary=True))
    return table


def _mlp(prefix: str, layer: int, width: int, expert: int | None) -> list[PlannedTensor]:
    return [
        PlannedTensor(prefix + "gate", (width, 7168), 0, layer=layer, expert=expert),
        PlannedTensor(prefix + "up", (width, 7168), 0, layer=layer, expert=expert),
        PlannedTensor(prefix + "down", (7168, width), 1, layer=layer, expert=expert),
    ]
