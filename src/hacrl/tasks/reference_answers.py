"""Checks reasoning-gym's reference answers by computing them again, and keys problems by their operands.

reasoning-gym 0.1.25 has wrong answers: `basic_arithmetic` without parentheses and with three or
more mixed terms ignores precedence.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

EXPRESSIONS = ("basic_arithmetic", "chain_sum", "products")
"""Datasets whose metadata contain an arithmetic `expression`."""
OF_NUMBERS: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm}
"""Datasets whose answer is a function of the metadata's `numbers`."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = {ast.Sub: "-", ast.Div: "/"}


def answer_is_right(dataset: str, metadata: Mapping[str, Any], answer: str) -> bool | None:
    """Whether the reference answer is right; None if this module cannot compute it.

    Example: answer_is_right("basic_arithmetic", {"expression": "2 + 3 * 4"}, "20") is False
    """
    try:
        if dataset in OF_NUMBERS:
            return Fraction(answer) == OF_NUMBERS[dataset](*metadata["numbers"])
        if dataset in EXPRESSIONS:
            return Fraction(answer) == evaluate(metadata["expression"])
    except (ValueError, ZeroDivisionError, SyntaxError):
        return False
    return None


def evaluate(expression: str) -> Fraction:
    """The exact value of + - * / and parentheses over whole numbers, by the usual precedence."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def operand_key(dataset: str, metadata: Mapping[str, Any]) -> str | None:
    """A key that is equal for problems that differ only in the order of commuting operands.

    Example: operand_key("products", {"expression": "4 * 3"}) == "3 * 4"
    """
    if dataset in OF_NUMBERS:
        return f"{dataset} of {sorted(metadata['numbers'])}"
    if dataset not in EXPRESSIONS:
        return None
    try:
        tree = ast.parse(metadata["expression"].strip(), mode="eval").body
    except SyntaxError:
        return None
    return _ordered(tree)


def _ordered(node: ast.expr) -> str:
    """The expression with the terms of every sum and the factors of every product in order."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Mult() as op):
            sign = " + " if isinstance(op, ast.Add) else " * "
            return sign.join(sorted(map(_ordered, _operands(node, type(op)))))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            return f"{_ordered(left)} {_SIGNS[type(op)]} {_ordered(right)}"
    return ast.unparse(node)


def _operands(node: ast.expr, op: type[ast.operator]) -> list[ast.expr]:
    """The operands of a chain of one operation: 1 + 2 + 3 has three."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, op):
        return _operands(node.left, op) + _operands(node.right, op)
    return [node]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
    raise ValueError(f"not plain arithmetic: {ast.unparse(node)}")
