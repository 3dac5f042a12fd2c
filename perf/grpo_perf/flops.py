"""FLOPs of packed sequences, counted from their actual lengths and never from a padded shape.

A multiply-add is two operations. Attention is counted per sequence; by default only the causal
half that the model needs ("causal"), on demand the full square that a kernel without skipping does
("full"), which is also what torch's FlopCounterMode reports. Norms, rotary embeddings, softmax and
the router's top-k are left out: they are linear in the tokens and below one percent of a model
wider than a few hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_perf.model_shape import Architecture

Recompute = Literal["none", "selective", "full"]
AttentionCount = Literal["causal", "full"]


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one forward pass, by where they happen.

    Attributes:
        projections: query, key, value and output matrices of the attention.
        attention: query-key products and their weighted sum of values.
        feed_forward: dense and shared-expert matrices, and routers.
        experts: the routed experts a token passes through.
        head: the output layer.
    """

    projections: float
    attention: float
    feed_forward: float
    experts: float
    head: float

    @property
    def total(self) -> float:
        return self.projections + self.attention + self.feed_forward + self.experts + self.head

    @property
    def layers(self) -> float:
        """All but the head."""
        return self.total - self.head


def attention_pairs(lengths: Sequence[int], count: AttentionCount) -> int:
    """Query-key pairs: n (n + 1) / 2 per sequence of n under a causal mask, else n^2.

    >>> attention_pairs([3, 1], "causal"), attention_pairs([3, 1], "full")
    (7, 10)
    """
    if count == "full":
        return sum(n * n for n in lengths)
    return sum(n * (n + 1) // 2 for n in lengths)


def forward_flops(
    model: Architecture,
    lengths: Sequence[int],
    attention: AttentionCount = "causal",
    head_tokens: int | None = None,
) -> Flops:
    """One forward pass over sequences of these lengths, packed or not.

    Args:
        head_tokens: positions the head is applied to; all by default.
    """
    tokens = sum(lengths)
    pairs = attention_pairs(lengths, attention)
    return forward_flops_of(model, tokens, pairs, tokens if head_tokens is None else head_tokens)


def forward_flops_of(model: Architecture, tokens: float, pairs: float, head_tokens: float) -> Flops:
    """The same from sums, for predictions where single lengths are not known."""
    projections = feed_forward = experts = 0
    for layer in range(model.num_layers):
        for weight in model.layer_weights(layer):
            if weight.routed:
                experts += weight.flops_per_token
            elif weight.name.startswith("self_attention"):
                projections += weight.flops_per_token
            else:
                feed_forward += weight.flops_per_token
    per_pair = 2 * model.num_heads * (model.head_dim + model.value_width) * model.num_layers
    return Flops(
        projections=float(projections) * tokens,
        attention=float(per_pair) * pairs,
        feed_forward=float(feed_forward) * tokens,
        experts=float(experts) * tokens,
        head=float(model.head.flops_per_token) * head_tokens,
    )


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Operations of one training pass.

    Attributes:
        model: forward and backward, what MFU counts.
        recomputed: forward work done a second time in the backward pass; HFU counts it as well.
    """

    model: float
    recomputed: float

    @property
    def hardware(self) -> float:
        return self.model + self.recomputed


def training_flops(
    forward: Flops, recompute: Recompute = "none", *, fused_head: bool = False
) -> TrainingFlops:
    """Backward costs twice the forward: one product for the input's gradient, one for the weight's.

    selective repeats the attention products, full repeats every layer; a fused head, which keeps no
    logits, makes them again whatever the choice.
    """
    again = {"none": 0.0, "selective": forward.attention, "full": forward.layers}[recompute]
    return TrainingFlops(3 * forward.total, again + fused_head * forward.head)


def utilisation(flops: float, seconds: float, gpus: int, peak_flops_per_s: float) -> float:
    """Share of the peak: MFU from `TrainingFlops.model`, HFU from `.hardware`.

    >>> utilisation(2e15, 4.0, 1, 1e15)
    0.5
    """
    return flops / (seconds * gpus * peak_flops_per_s)
