"""Whether two answers are the same, by the kind of thing they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megatron_grpo.environments.grading.numbers import exact
from megatron_grpo.environments.grading.structure import Node, is_label, is_name, parse
from megatron_grpo.environments.grading.units import Unit, split_unit

_BASED = re.compile(r"([0-9A-Fa-f]+)_(?:\{?(\d{1,2})\}?|\{?\\text\{(\w+)\}\}?|\{([a-z]+)\})")
# (B) 12: a choice and what it says
_CHOICE = re.compile(r"(?:\\text\{\s*\(?([A-H])\)\s*\}|\(([A-H])\)\s)\s*(\S.*)")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7"}
_BASES |= {"eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}
_ARTICLE = re.compile(r"^(?:the|a|an) ", re.IGNORECASE)
MOST_ITEMS = 64

Mathematics = Callable[[str, str], bool]
"""(gold, response) -> whether two expressions are equal; may raise, loop and eat memory."""


def same(gold: Node, given: Node, mathematics: Mathematics) -> bool:
    """Whether `given` is the answer `gold`.

    >>> from megatron_grpo.environments.grading.structure import parse
    >>> same(parse("x = 5"), parse("5"), lambda a, b: False)
    True
    """
    if _squeezed(gold.text) == _squeezed(given.text):
        return True
    if choice := _CHOICE.fullmatch(given.text):
        said = choice[1] or choice[2]
        if re.fullmatch(r"(?:\\text\{\s*)?\(?[A-H]\)?\s*\}?", gold.text):
            return re.sub(r"\\text|[^A-H]", "", gold.text) == said
        return same(gold, parse(choice[3]), mathematics)
    gold, given = _unwrapped(gold), _unwrapped(given)
    if "relation" in (gold.kind, given.kind):
        return _same_relation(gold, given, mathematics)
    if "words" in (gold.kind, given.kind):
        return _same_words(gold, given)
    if gold.kind == "list" and given.kind == "list":
        return _same_items(gold.items, given.items, mathematics)
    if gold.kind == "group" and given.kind == "list":
        return _same_assignments(gold, given, mathematics)
    if gold.kind == "list" and given.kind == "group":
        return _same_assignments(given, gold, mathematics)
    if "matrix" in (gold.kind, given.kind):
        return _same_matrix(gold, given, mathematics)
    if gold.kind == "group" and given.kind == "group":
        return _same_group(gold, given, mathematics)
    if gold.kind == given.kind == "scalar":
        return _same_scalar(gold.text, given.text, mathematics)
    return False


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _unwrapped(node: Node) -> Node:
    """A list of one distinct thing is that thing."""
    while node.kind == "list":
        texts = {_squeezed(item.text) for item in node.items}
        if len(texts) > 1:
            break
        node = node.items[0]
    return node


def _same_words(gold: Node, given: Node) -> bool:
    """Words are compared as words: "odd" is not the product of o, d and d."""

    def spelled(node: Node) -> str:
        text = re.sub(r"[^\w\s]", " ", node.text.replace("\\text", ""))
        return _ARTICLE.sub("", " ".join(text.casefold().split()))

    return spelled(gold) == spelled(given) != ""


def _same_items(gold: Sequence[Node], given: Sequence[Node], mathematics: Mathematics) -> bool:
    """The same members, in any order, however often each was written."""
    if max(len(gold), len(given)) > MOST_ITEMS:
        return False

    def distinct(items: Sequence[Node]) -> list[Node]:
        kept: list[Node] = []
        for item in items:
            if not any(_squeezed(item.text) == _squeezed(other.text) for other in kept):
                kept.append(item)
        return kept

    missing, left = distinct(gold), distinct(given)
    if len(missing) != len(left):
        return False
    for wanted in missing:
        found = next((item for item in left if same(wanted, item, mathematics)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_assignments(group: Node, listed: Node, mathematics: Mathematics) -> bool:
    """(1, 2) and "x = 1, y = 2": the names must come in alphabetical order."""
    names = [item.items[0].text for item in listed.items if item.kind == "relation"]
    if len(names) != len(listed.items) or not all(map(is_name, names)) or group.marks != "()":
        return False
    values = [item.items[-1] for _, item in sorted(zip(names, listed.items), key=lambda p: p[0])]
    return len(set(names)) == len(names) == len(group.items) and all(
        same(a, b, mathematics) for a, b in zip(group.items, values)
    )


def _same_group(gold: Node, given: Node, mathematics: Mathematics) -> bool:
    """Tuples and intervals: the same things in the same order; of two, the same brackets."""
    if len(gold.items) != len(given.items):
        return False
    if len(gold.items) == 2 and gold.marks != given.marks:
        return False
    return all(same(a, b, mathematics) for a, b in zip(gold.items, given.items))


def _same_matrix(gold: Node, given: Node, mathematics: Mathematics) -> bool:
    """Entry by entry; a column or a row may be written as a tuple."""
    if gold.kind == given.kind:
        return len(gold.items) == len(given.items) and all(
            _same_group(a, b, mathematics) for a, b in zip(gold.items, given.items)
        )
    matrix, other = (gold, given) if gold.kind == "matrix" else (given, gold)
    if other.kind != "group" or other.marks != "()":
        return False
    if len(matrix.items) > 1 and any(len(row.items) != 1 for row in matrix.items):
        return False
    entries = [entry for row in matrix.items for entry in row.items]
    return len(entries) == len(other.items) and all(
        same(a, b, mathematics) for a, b in zip(entries, other.items)
    )


def _same_relation(gold: Node, given: Node, mathematics: Mathematics) -> bool:
    if gold.kind == given.kind:
        if set((gold.marks + " " + given.marks).split()) == {"="}:
            return _same_equation(gold, given, mathematics)
        return mathematics(gold.text, given.text)
    relation, other = (gold, given) if gold.kind == "relation" else (given, gold)
    if set(relation.marks.split()) != {"="}:
        return False
    first, last = _oriented(relation)
    if not (
        is_label(first.text) or not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", first.text))
    ):
        return False
    return same(last, other, mathematics) if relation is gold else same(other, last, mathematics)


def _same_equation(gold: Node, given: Node, mathematics: Mathematics) -> bool:
    """Two assignments to one name by their values; other equations by what they say."""
    (name, value), (given_name, given_value) = _oriented(gold), _oriented(given)
    if is_label(name.text) and is_label(given_name.text):
        if _squeezed(name.text) == _squeezed(given_name.text):
            return same(value, given_value, mathematics)
        if is_name(name.text) and is_name(given_name.text) and exact(value.text) is not None:
            return False  # x = 5 is not y = 5
    return mathematics(
        " = ".join(item.text for item in gold.items), " = ".join(i.text for i in given.items)
    )


def _oriented(relation: Node) -> tuple[Node, Node]:
    """(first, last) side; "5 = x" is read from the right."""
    first, last = relation.items[0], relation.items[-1]
    return (last, first) if is_name(last.text) and not is_name(first.text) else (first, last)


def _same_scalar(gold: str, given: str, mathematics: Mathematics) -> bool:
    based, given_based = _based(gold), _based(given)
    if based or given_based:
        digits, base = based or (_squeezed(gold), "")
        given_digits, given_base = given_based or (_squeezed(given), "")
        same_base = not base or not given_base or base == given_base
        return same_base and digits.lstrip("0") == given_digits.lstrip("0")
    (number, unit), (given_number, given_unit) = split_unit(gold), split_unit(given)
    return _same_quantity((number, unit), (given_number, given_unit), mathematics)


def _based(text: str) -> tuple[str, str] | None:
    match = _BASED.fullmatch(_squeezed(text))
    if not match:
        return None
    named = match[3] or match[4] or ""
    return match[1].upper(), match[2] or _BASES.get(named.casefold(), named)


def _same_quantity(
    gold: tuple[str, Unit], given: tuple[str, Unit], mathematics: Mathematics
) -> bool:
    (number, unit), (given_number, given_unit) = gold, given
    if unit == given_unit or not unit.name or not given_unit.name:
        if same_number(number, given_number, mathematics):
            return True
        if unit == given_unit:
            return False
        # One side has no unit: 50% is also 0.5, and 180 degrees are also pi.
        for (with_unit, mark), bare in ((gold, given_number), (given, number)):
            factor = {"percent": "\\frac{1}{100}", "degree": "\\frac{\\pi}{180}"}.get(mark.name)
            if factor and same_number(f"({with_unit})\\cdot {factor}", bare, mathematics):
                return True
        return False
    size, given_size = unit.size, given_unit.size
    if size and given_size and size[0] == given_size[0]:
        ratio = size[1] / given_size[1]
        scaled = f"({number})\\cdot \\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
        value, given_value = exact(number), exact(given_number)
        if value is not None and given_value is not None:
            return value * ratio == given_value
        return same_number(scaled, given_number, mathematics)
    if size or given_size:
        return False
    words, given_words = set(unit.name.split()), set(given_unit.name.split())
    nested = words <= given_words or given_words <= words
    return nested and same_number(number, given_number, mathematics)


def same_number(gold: str, given: str, mathematics: Mathematics) -> bool:
    """Exactly where both are plain numbers; expressions by mathematics."""
    value, given_value = exact(gold), exact(given)
    if value is not None and given_value is not None:
        return value == given_value
    if _squeezed(gold) == _squeezed(given):
        return True
    return mathematics(gold, given)
