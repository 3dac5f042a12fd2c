"""What kind of thing an answer is: a number or expression, words, several answers, a tuple or
interval, a matrix, a relation. Each is compared by its own rule (`compare`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_grpo.environments.grading.clean import plain_words, strip_outer

Kind = Literal["scalar", "words", "list", "group", "matrix", "relation"]

_WORDS = re.compile(r"[A-Za-z][A-Za-z'\-]*(?: [A-Za-z'\-]+)*")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_SEPARATOR = re.compile(
    r",|;|\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_OPERATOR = re.compile(r"\\(?:le|ge|ne|in|approx|sim)(?![A-Za-z])|(?<![\\])[=<>]")
_PM = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z])(?:_(?:\{\w+\}|\w))?'?")
_LABEL = re.compile(
    r"(?:(?:\\[A-Za-z]+|[A-Za-z]+'?)(?:_(?:\{\w+\}|\w))?(?:\([^()=]{1,12}\))?|"
    r"\([A-Za-z](?:,\s*[A-Za-z])+\)|[A-Za-z ]+|\|[A-Z]{2}\||"
    r"\\(?:angle|triangle|overline|text|m)\s*\{?[A-Za-z ]+\}?)"
)
_MATRIX = re.compile(
    r"\\begin\{([pbB]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_BUILDER = re.compile(
    r"[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\\colon|:|\|)(.*)", re.DOTALL
)
_REALS = ("\\mathbb{R}", "all real numbers", "all reals", "the real numbers")
_OPENERS = ("\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin{", "(", "[", "{")
_CLOSERS = ("\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end{", ")", "]", "}")
DEEPEST = 40


class TooDeep(Exception):
    """Brackets nested beyond reason."""


@dataclass(frozen=True, slots=True)
class Node:
    """One answer, taken apart.

    Attributes:
        text: cleaned, as written.
        items: of a list, tuple, interval (two ends), matrix (rows) or the sides of a relation.
        marks: brackets of a group, e.g. "[)"; operators of a relation, e.g. "=".
    """

    kind: Kind
    text: str
    items: tuple[Node, ...] = ()
    marks: str = ""


def parse(text: str, depth: int = 0) -> Node:
    """Take a cleaned answer apart.

    >>> parse("(1, 2]").marks, parse("x > 3").marks, parse("1,234").kind, parse("1, 234").kind
    ('(]', '()', 'scalar', 'list')

    Raises:
        TooDeep: more than DEEPEST nested parts.
    """
    if depth > DEEPEST:
        raise TooDeep
    text = strip_outer(text)
    if plain_words(text).casefold() in _REALS or text in _REALS:
        return Node("group", text, (Node("scalar", "-\\infty"), Node("scalar", "\\infty")), "()")
    parts = _split(text, _SEPARATOR)
    if len(parts) > 1 and all(parts):
        return Node("list", text, tuple(parse(part, depth + 1) for part in parts))
    opened = plain_words(text)
    if _WORDS.fullmatch(opened) and ("\\text" in text or len(opened) > 2):
        return Node("words", opened)
    for build in (_signs, _union, _bracketed, _matrix, _relation):
        node = build(text, depth)
        if node is not None:
            return node
    return Node("scalar", text)


def is_name(text: str) -> bool:
    """Whether this is one variable.

    >>> is_name("x_1"), is_name("xy")
    (True, False)
    """
    return _NAME.fullmatch(text.strip()) is not None


def is_label(text: str) -> bool:
    """Whether this can stand before "=" as a mere name of it: x, f(x), angle ABC, Area."""
    return _LABEL.fullmatch(text.strip()) is not None


def _signs(text: str, depth: int) -> Node | None:
    """a \\pm b is two answers."""
    if not _PM.search(text) or _split(text, _OPERATOR)[1:]:
        return None
    plus = _PM.sub(lambda m: "+" if m[1] == "pm" else "-", text)
    minus = _PM.sub(lambda m: "-" if m[1] == "pm" else "+", text)
    sides = [side.strip().removeprefix("+") for side in (plus, minus)]
    return Node("list", text, tuple(parse(side, depth + 1) for side in sides))


def _union(text: str, depth: int) -> Node | None:
    parts = _split(text, _CUP)
    if len(parts) < 2:
        return None
    return Node("list", text, tuple(parse(part, depth + 1) for part in parts))


def _bracketed(text: str, depth: int) -> Node | None:
    for opener, closer in (("\\{", "\\}"), ("\\langle", "\\rangle"), ("(", ")"), ("[", "]")):
        del closer
        if text.startswith(opener):
            break
    else:
        if text.startswith("]") and text.endswith("["):
            return _group(text, text[1:-1], "()", depth)
        return None
    end = _partner(text)
    if end != len(text):
        return None
    closer = next(mark for mark in _CLOSERS if text.endswith(mark))
    inner = text[len(opener) : len(text) - len(closer)]
    if opener == "\\{":
        builder = _BUILDER.fullmatch(inner.strip())
        if builder:
            return parse(builder[1], depth + 1)
        parts = _split(inner, re.compile(r"[,;]"))
        if not inner.strip():
            return Node("scalar", "\\emptyset")
        return Node("list", text, tuple(parse(part, depth + 1) for part in parts))
    marks = ("(" if opener == "\\langle" else opener) + (")" if closer == "\\rangle" else closer)
    return _group(text, inner, marks, depth)


def _group(text: str, inner: str, marks: str, depth: int) -> Node | None:
    parts = _split(inner, re.compile(r"[,;]"), thousands=False)
    if len(parts) == 1:
        simple = re.fullmatch(r"[A-Za-z]|[-+]?[\d.,]+", inner.strip())
        return parse(inner, depth + 1) if simple or marks == "()" else None
    if not all(parts) or len(marks) != 2:
        return None
    return Node("group", text, tuple(parse(part, depth + 1) for part in parts), marks)


def _matrix(text: str, depth: int) -> Node | None:
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    parsed = [
        Node("group", row, tuple(parse(cell, depth + 1) for cell in row.split("&")), "()")
        for row in rows
    ]
    return Node("matrix", text, tuple(parsed))


def _relation(text: str, depth: int) -> Node | None:
    sides = _split(text, _OPERATOR)
    if len(sides) < 2 or not all(sides):
        return None
    operators = [found for found, _, _ in _top_level(text, _OPERATOR)]
    operators = [op.lstrip("\\") for op in operators]
    if "approx" in operators:
        cut = operators.index("approx") + 1
        kept = text[: _nth_start(text, cut)]
        return parse(kept, depth + 1)
    if operators[0] == "in" and len(sides) == 2:
        return parse(sides[1], depth + 1)
    interval = _interval(text, sides, operators, depth)
    if interval is not None:
        return interval
    nodes = tuple(parse(side, depth + 1) for side in sides)
    return Node("relation", text, nodes, " ".join(operators))


def _nth_start(text: str, count: int) -> int:
    return list(_top_level(text, _OPERATOR))[count - 1][1]


_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}


def _interval(text: str, sides: list[str], operators: list[str], depth: int) -> Node | None:
    """x > 2, 2 < x, 1 <= x < 2 as intervals."""
    if not set(operators) <= set(_FLIPPED):
        return None
    low, high = ("(", "-\\infty"), (")", "\\infty")
    if len(sides) == 2:
        if is_name(sides[0]) == is_name(sides[1]):
            return None
        left_is_name = is_name(sides[0])
        operator = operators[0] if left_is_name else _FLIPPED[operators[0]]
        bound = sides[1] if left_is_name else sides[0]
        if operator in (">", "ge"):
            low = ("[" if operator == "ge" else "(", bound)
        else:
            high = ("]" if operator == "le" else ")", bound)
    elif len(sides) == 3 and is_name(sides[1]):
        if {operators[0][0], operators[1][0]} == {"<", ">"} or (operators[0] in ("<", "le")) != (
            operators[1] in ("<", "le")
        ):
            return None
        if operators[0] in ("<", "le"):
            (first, second), (a, b) = operators, (sides[0], sides[2])
        else:
            (second, first), (b, a) = operators, (sides[0], sides[2])
        low = ("[" if first in ("le", "ge") else "(", a)
        high = ("]" if second in ("le", "ge") else ")", b)
    else:
        return None
    ends = (parse(low[1], depth + 1), parse(high[1], depth + 1))
    return Node("group", text, ends, low[0] + high[0])


def _split(text: str, pattern: re.Pattern[str], *, thousands: bool = True) -> list[str]:
    """Parts between matches outside all brackets. Commas that group thousands do not separate."""
    protected = {
        position
        for match in (_THOUSANDS.finditer(text) if thousands else ())
        for position in range(*match.span())
    }
    parts, start = [], 0
    for _, begin, end in _top_level(text, pattern):
        if begin in protected:
            continue
        parts.append(text[start:begin].strip())
        start = end
    parts.append(text[start:].strip())
    # "a, and b": two separators in a row are one.
    return [part for part in parts if part] if len(parts) > 1 else parts


def _top_level(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, int, int]]:
    """(match, start, end) of every match outside brackets."""
    depth, position = 0, 0
    while position < len(text):
        if depth == 0 and (match := pattern.match(text, position)):
            yield match.group(), match.start(), match.end()
            position = match.end()
            continue
        step, change = _bracket(text, position)
        depth = max(0, depth + change)
        position += step


def _bracket(text: str, position: int) -> tuple[int, int]:
    """(characters, change of depth) of what stands at a position."""
    for marks, change in ((_OPENERS, 1), (_CLOSERS, -1)):
        for mark in marks:
            if text.startswith(mark, position):
                # The name of an environment is a brace of its own: \begin{pmatrix}
                end = text.find("}", position) + 1 if mark in ("\\begin{", "\\end{") else 0
                return (end - position if end > position else len(mark)), change
    return (2 if text[position] == "\\" and position + 1 < len(text) else 1), 0


def _partner(text: str) -> int:
    """End of the bracket that opens the text; any closer ends it, as in [1, 2)."""
    depth, position = 0, 0
    while position < len(text):
        step, change = _bracket(text, position)
        depth += change
        position += step
        if depth == 0:
            return position
    return -1
