"""Expressions by math-verify, and the fence around what it calls equal by its own design.

Never call this outside a killable worker: one expression can hold the interpreter for ever.
"""

from __future__ import annotations

import logging
import re

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Expr, N, Rational
from sympy.matrices import MatrixBase

# math-verify rounds to 6 decimals and then 0.333333 is 1/3. Plain numbers never come here
# (`numbers`); of other decimals this many must agree.
_DECIMALS = 12
_RELATIVE = 1e-12
_SPELLING = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)
_MIXED = re.compile(r"(?<![\w.^}])(\d+) ?(\\frac\{\d+\}\{\d+\})")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ ?")


class Unreadable(Exception):
    """Not an expression that math-verify can read."""


def equal(gold: str, given: str) -> bool:
    """Whether two LaTeX expressions are equal; not if one cannot be read.

    math-verify compares with an absolute tolerance, so 1/2004! and 1/2006! would both be 0; here
    two numbers must agree relative to their size, and so must the values of two expressions at one
    point. That also spares most wrong answers a slow attempt to simplify the difference to 0.
    """
    try:
        is_real = not (should_treat_as_complex(gold) or should_treat_as_complex(given))
        wanted, answer = read(gold, is_real=is_real), read(given, is_real=is_real)
        if _refuted(wanted, answer):
            return False
        agreed = verify(
            wanted, answer, float_rounding=_DECIMALS, timeout_seconds=None, raise_on_error=True
        )
    except (Unreadable, TypeError, ValueError, AttributeError, NotImplementedError):
        return False
    except (ArithmeticError, RecursionError):
        return False
    return agreed


def read(text: str, *, is_real: bool = True) -> Basic | MatrixBase:
    """math-verify's reading of LaTeX. A mixed number is a sum: 3\\frac{1}{2} is 7/2."""
    text = _MIXED.sub(r"(\1+\2)", text)
    text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    try:
        expression = latex2sympy(
            text,
            is_real=is_real,
            convert_degrees=False,
            normalization_config=_SPELLING,
        )
        if not isinstance(expression, Basic | MatrixBase):
            raise Unreadable(text)
        return expression
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error
    except MemoryError:
        raise
    except Exception as error:  # antlr and sympy raise anything for bad input
        raise Unreadable(text) from error


def _refuted(gold: Basic | MatrixBase, given: Basic | MatrixBase) -> bool:
    """Whether two expressions have different values at one point. False also where that cannot be
    told: no numbers, not finite, or relations and sets.
    """
    if not (isinstance(gold, Expr) and isinstance(given, Expr)):
        return False
    symbols = sorted(gold.free_symbols | given.free_symbols, key=str)
    point = [(symbol, Rational(1000 + 137 * i, 719)) for i, symbol in enumerate(symbols)]
    try:
        left, right = (N(one.subs(point), 30) for one in (gold, given))
        size, difference = max(abs(left), abs(right)), abs(left - right)
        if not (size.is_finite and difference.is_finite):
            return False
        return bool(difference > _RELATIVE * size)
    except (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError):
        return False


def quiet() -> None:
    """math-verify warns that its own time limit is off; a limit on the process stands for it."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
