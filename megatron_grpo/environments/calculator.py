"""A calculator as a tool: the policy may write <calc>12*34</calc> and is told what it comes to."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

from megatron_grpo.environments.interactive import Question
from megatron_grpo.environments.rewards import last_number

_CALL = re.compile(r"<calc>([^<>]{1,100})</calc>")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = (
    MappingProxyType(
        {
            ast.Add: operator.add,
            ast.Sub: operator.sub,
            ast.Mult: operator.mul,
            ast.Div: operator.truediv,
        }
    )
)


class Calculator:
    """A turn that calls the calculator gets its result; any other turn is the answer, and right if
    its last number is.

    Args:
        bonus: added to a right answer that used the calculator.
    """

    def __init__(self, bonus: float = 0.0) -> None:
        self._bonus = bonus

    def __call__(self, question: Question, turns: Sequence[str]) -> float | str:
        call = _CALL.search(turns[-1])
        if call:
            return calculate(call[1])
        right = last_number(turns[-1], question.answer, "{}")
        return right * (1.0 + self._bonus * (len(turns) > 1))


def calculate(expression: str) -> str:
    """The value of + - * / over numbers, or what is wrong with the expression. Nothing of it is
    executed.

    >>> calculate("12*34"), calculate("7/2"), calculate("2**9")
    ('408', '3.5', 'error: only + - * / and numbers')
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: only + - * / and numbers"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic")
