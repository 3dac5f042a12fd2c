"""Numbers as exact fractions: integers with grouped thousands, decimals, repeating decimals,
fractions, mixed numbers, scientific notation. Everything else is an expression, for math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction

LARGEST_EXPONENT = 400

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_SIGN = r"([-+]?)"
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL})")
_REPEATING = re.compile(rf"{_SIGN}({_INTEGER})\.(\d*)\\overline\{{(\d+)\}}")
_RATIO = re.compile(rf"{_SIGN}\(?([-+]?)({_DECIMAL})\)?/\(?([-+]?)({_DECIMAL})\)?")
_FRAC = re.compile(rf"{_SIGN}\\frac\{{([-+]?)({_DECIMAL})\}}\{{([-+]?)({_DECIMAL})\}}")
_MIXED = re.compile(rf"{_SIGN}({_INTEGER})(?:[ ]?\\frac\{{(\d+)\}}\{{(\d+)\}}|[ ](\d+)/(\d+))")
_SPACED = re.compile(r"[-+]?\s*\d{1,3}(?: \d{3})+(?:\.\d*)?")
_SCIENTIFIC = re.compile(
    rf"{_SIGN}({_DECIMAL})(?:\\times10\^|\\cdot10\^|[eE])(?:\{{([-+]?\d+)\}}|([-+]?\d+))"
)
_POWER_OF_TEN = re.compile(rf"{_SIGN}10\^\{{([-+]?\d+)\}}")


def exact(text: str) -> Fraction | None:
    """The number that `text` writes, None if it is not one of the forms above.

    >>> exact("1,234.50"), exact("-1\\\\frac{1}{2}"), exact("0.\\\\overline{3}"), exact("x")
    (Fraction(2469, 2), Fraction(-3, 2), Fraction(1, 3), None)
    """
    mixed = _MIXED.fullmatch(text.strip())
    if mixed:
        sign, whole, *parts = mixed.groups()
        top, bottom = (part for part in parts if part)
        return (
            _signed(sign, Fraction(_value(whole)) + _divided(top, bottom)) if int(bottom) else None
        )
    if re.search(r"\d\s+\d", text) and not _SPACED.fullmatch(text.strip()):
        return None
    text = text.replace(" ", "")
    if match := _PLAIN.fullmatch(text):
        return _signed(match[1], _value(match[2]))
    for pattern in (_RATIO, _FRAC):
        if match := pattern.fullmatch(text):
            outer, upper, top, lower, bottom = match.groups()
            if not _value(bottom):
                return None
            ratio = _signed(upper, _value(top)) / _signed(lower, _value(bottom))
            return _signed(outer, ratio)
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, cycle = match.groups()
        repeated = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return _signed(sign, _value(f"{whole}.{fixed}") + repeated)
    return _scientific(text)


def _scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match:
        sign, digits, exponent = match[1], match[2], int(match[3] or match[4])
    else:
        match = _POWER_OF_TEN.fullmatch(text)
        if match is None:
            return None
        sign, digits, exponent = match[1], "1", int(match[2])
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    return _signed(sign, _value(digits) * Fraction(10) ** exponent)


def _value(digits: str) -> Fraction:
    plain = digits.replace(",", "")
    return Fraction(plain if not plain.endswith(".") else plain[:-1])


def _divided(top: str, bottom: str) -> Fraction:
    return Fraction(int(top), int(bottom))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
