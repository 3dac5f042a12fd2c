"""Sets of time as sorted, disjoint intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(parts: Iterable[tuple[float, float]]) -> Intervals:
    """
    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    merged: Intervals = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(one: Intervals, two: Intervals) -> Intervals:
    """Of two sorted, disjoint lists.

    >>> intersection([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(two):
        start, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Intervals, two: Intervals) -> Intervals:
    """What of `one` is not in `two`; both sorted and disjoint.

    >>> difference([(0, 5)], [(1, 2), (4, 6)])
    [(0, 1), (2, 4)]
    """
    edges = [(float("-inf"), float("-inf")), *two, (float("inf"), float("inf"))]
    return intersection(one, [(a[1], b[0]) for a, b in itertools.pairwise(edges)])


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def clip(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> Intervals:
    """The union of intervals, inside the window."""
    return intersection(union(intervals), [window])
