"""Identical beginnings are computed once: the rollouts of a group share their prompt.

    given   [p p p a a] [p p p b] [q q c]      three sequences, two with the same beginning
    run     [p p p] a a b | [q q c]            families: a shared prefix, then members' own

Under a causal mask the hidden states of a prefix do not depend on what follows, so those of `run`
at `expand_T` are those of `given`, and gradients add up on the way back. Nothing else knows about
it: batches, losses and heads see whole sequences. Any common beginning counts, prompt or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A family costs attention calls of its own; shorter beginnings are not worth one.
SHORTEST_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Family:
    """Consecutive sequences with a common beginning, as laid out in `run`: prefix, then members.

    Attributes:
        prefix_tokens: shared beginning; 0 for a single sequence.
        own_tokens: what follows, for each member, at least 1.
    """

    prefix_tokens: int
    own_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prefix_tokens + sum(self.own_tokens)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What of a micro-batch's T tokens is computed, U <= T of them.

    Attributes:
        families: in the order of `run`; their tokens add up to U.
        source_U: int64, position in `given` of each computed token.
        expand_T: int64, position in `run` of each given token.
    """

    families: tuple[Family, ...]
    source_U: Tensor
    expand_T: Tensor


def share_prefixes(token_ids_T: Tensor, cu_seqlens: Tensor) -> Sharing | None:
    """Find what to compute once; None when there is nothing worth it.

    >>> tokens = torch.tensor([*range(9), 50, *range(9), 60, 61])
    >>> sharing = share_prefixes(tokens, torch.tensor([0, 10, 21]))
    >>> sharing.families
    (Family(prefix_tokens=9, own_tokens=(1, 2)),)
    >>> tokens[sharing.source_U][sharing.expand_T].equal(tokens), len(sharing.source_U)
    (True, 12)
    """
    bounds = cu_seqlens.tolist()
    common = [
        _common_tokens(token_ids_T, *pair)
        for pair in itertools.pairwise(itertools.pairwise(bounds))
    ]
    runs = _best_runs(common)
    if all(shared == 0 for _, _, shared in runs):
        return None
    families, source, expand, computed = [], [], [], 0
    for first, last, shared in runs:
        prefix = torch.arange(computed, computed + shared)
        source.append(torch.arange(bounds[first], bounds[first] + shared))
        computed += shared
        own = []
        for start, stop in itertools.pairwise(bounds[first : last + 2]):
            own.append(stop - start - shared)
            source.append(torch.arange(start + shared, stop))
            expand += [prefix, torch.arange(computed, computed + own[-1])]
            computed += own[-1]
        families.append(Family(shared, tuple(own)))
    device = token_ids_T.device
    return Sharing(tuple(families), torch.cat(source).to(device), torch.cat(expand).to(device))


def _common_tokens(token_ids_T: Tensor, one: tuple[int, int], two: tuple[int, int]) -> int:
    """Length of the common beginning of two sequences that leaves each a token of its own."""
    length = min(one[1] - one[0], two[1] - two[0]) - 1
    same = token_ids_T[one[0] : one[0] + length] == token_ids_T[two[0] : two[0] + length]
    common = length if bool(same.all()) else int(same.long().argmin())
    return common if common >= SHORTEST_SHARED_TOKENS else 0


def _best_runs(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut the sequences 0..n into runs (first, last, shared tokens) that save the most tokens.

    `common[i]` are the tokens sequences i and i + 1 share. A run of m sequences saves (m - 1) times
    the least of its `common`: a long run may share only a template's header, short ones whole
    prompts. Dynamic programming over the last run.
    """
    best = [0]  # best[j]: most tokens saved among the first j sequences
    cut = [0]
    for j in range(1, len(common) + 2):
        top, at, least = best[j - 1], j - 1, 0
        for i in range(j - 2, -1, -1):  # the last run is i .. j-1
            least = common[i] if i == j - 2 else min(least, common[i])
            if least == 0:
                break
            saved = best[i] + (j - 1 - i) * least
            if saved > top:
                top, at = saved, i
        best.append(top)
        cut.append(at)
    runs, j = [], len(common) + 1
    while j > 0:
        i = cut[j]
        runs.append((i, j - 1, min(common[i : j - 1], default=0)))
        j = i
    return runs[::-1]
