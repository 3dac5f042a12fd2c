"""What config.json says about rotary positions, experts and latent attention, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is "default", "linear", "dynamic", "yarn" or "llama3"; the rest is
    used by the kinds that need it.

    Attributes:
        base: theta.
        factor: context extension.
        low_freq_factor, high_freq_factor: of "llama3".
        original_positions: trained context, of "llama3", "yarn" and "dynamic".
        beta_fast, beta_slow: turns over the trained context between which "yarn" blends.
        truncate: "yarn" rounds the blended range to whole dimensions.
        attention_scale: cosines and sines are multiplied by it ("yarn").
        mscale_all_dim: latent attention under "yarn" multiplies its logits by the square of
            yarn_scale(factor, mscale_all_dim); 0: it does not.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def longest(self) -> int | None:
        """Longest sequence these frequencies are right for; None: any.

        "dynamic" raises the base with the length of the sequence, but only beyond the trained
        context; up to there it is the plain rope, and this is the part that is supported.
        """
        return self.original_positions if self.kind == "dynamic" else None


def yarn_scale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1: equation 22 of the paper (arXiv:2309.00071), weighted as in
    DeepSeek's code.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of the MLP: every token goes to the `top_k` best of them.

    Attributes:
        ffn_hidden: width of one expert.
        normalize: the chosen experts' weights are made to sum to 1.
        dense_layers: indices of layers that keep one MLP of the model's own width.
        scores: what makes scores of the router's logits. Under "sigmoid" a bias per expert takes
            part in the choice, and not in the weights.
        groups, top_groups: experts are chosen within the best `top_groups` of `groups` equal
            groups, by the two best of each.
        scale: the weights are multiplied by it in the end.
        shared_ffn_hidden: width of an MLP that every token goes through besides; 0: none.
    """

    num_experts: int
    top_k: int
    ffn_hidden: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared_ffn_hidden: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention.

    Attributes:
        query_rank: width that queries are made from; None: from the hidden states themselves.
        kv_rank: width that keys and values are made from.
        plain_dim, rope_dim: of a query's or key's head, the part without position, and then the
            part with; the keys' latter is shared by all heads.
        value_dim: of a value's head.
        interleaved: in the weights, the two numbers that are turned together lie side by side,
            instead of half of `rope_dim` apart.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True
