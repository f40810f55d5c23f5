"""Questions that a calculator answers, in many wordings, with the expression that it is to be given.

Numbers are held out as well as prompts: one numeral in 16 of those with three or more digits, by hash, is in no example
for training, neither in a question nor in a result, and every such numeral of an example for evaluation is one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from phasewise.train.tasks import held_out

NUMERAL = re.compile(r"\d+(?:\.\d+)?")
LARGEST, DIGITS, SIGNIFICANT = 10**12, (1, 2, 3, 4, 5), 10  # of a result; of a number; digits of a fraction
TOLD_APART = 3  # numerals of fewer digits are too few to hold some of them out

Wordings = tuple[tuple[str, str], ...]  # a question, and its expression

TWO: Wordings = (
    ("What is {a} plus {b}?", "{a} + {b}"),
    ("How much is {a} plus {b}?", "{a} + {b}"),
    ("Add {a} and {b}.", "{a} + {b}"),
    ("Add {a} to {b}.", "{b} + {a}"),
    ("What is the sum of {a} and {b}?", "{a} + {b}"),
    ("What is {a} minus {b}?", "{a} - {b}"),
    ("How much is {a} minus {b}?", "{a} - {b}"),
    ("Subtract {b} from {a}.", "{a} - {b}"),
    ("Take {b} away from {a}.", "{a} - {b}"),
    ("What is the difference between {a} and {b}?", "{a} - {b}"),
    ("What is {a} times {b}?", "{a} * {b}"),
    ("How much is {a} times {b}?", "{a} * {b}"),
    ("What is {a} multiplied by {b}?", "{a} * {b}"),
    ("Multiply {a} by {b}.", "{a} * {b}"),
    ("Multiply {a} and {b}.", "{a} * {b}"),
    ("What is the product of {a} and {b}?", "{a} * {b}"),
    ("What is {a} divided by {b}?", "{a} / {b}"),
    ("How much is {a} divided by {b}?", "{a} / {b}"),
    ("Divide {a} by {b}.", "{a} / {b}"),
)
THREE: Wordings = (
    ("What is {a} plus {b} plus {c}?", "{a} + {b} + {c}"),
    ("Add {a}, {b} and {c}.", "{a} + {b} + {c}"),
    ("What is the sum of {a}, {b} and {c}?", "{a} + {b} + {c}"),
    ("What is {a} minus {b} minus {c}?", "{a} - {b} - {c}"),
    ("What is {a} times {b} plus {c}?", "{a} * {b} + {c}"),
    ("What is {a} times {b} minus {c}?", "{a} * {b} - {c}"),
    ("Multiply {a} by {b} and add {c}.", "{a} * {b} + {c}"),
    ("Multiply {a} by {b}, then subtract {c}.", "{a} * {b} - {c}"),
    ("Add {a} and {b}, then multiply by {c}.", "({a} + {b}) * {c}"),
    ("Add {a} and {b} and divide by {c}.", "({a} + {b}) / {c}"),
    ("Subtract {b} from {a}, then multiply by {c}.", "({a} - {b}) * {c}"),
    ("What is the product of {a}, {b} and {c}?", "{a} * {b} * {c}"),
)
REWORDED: Wordings = (  # never trained on
    ("Could you work out {a} plus {b}?", "{a} + {b}"),
    ("I want to know the sum of {a} and {b}", "{a} + {b}"),
    ("Please take {a} and add {b} to it.", "{a} + {b}"),
    ("What do I get for {a} minus {b}?", "{a} - {b}"),
    ("What is left if I subtract {b} from {a}?", "{a} - {b}"),
    ("Tell me the product of {a} and {b}", "{a} * {b}"),
    ("What do you get when you multiply {a} by {b}?", "{a} * {b}"),
    ("Find {a} divided by {b}.", "{a} / {b}"),
)
WRITTEN = ("What is {e}?", "How much is {e}?", "Calculate {e}.", "Compute {e}", "{e} =", "{e} = ?", "{e}",
           "Evaluate {e}.", "What is the value of {e}?", "Can you calculate {e}?")  # fmt: skip
SHAPES = ("{a} {o} {b} {p} {c}", "({a} {o} {b}) {p} {c}", "{a} {o} ({b} {p} {c})")
BEFORE = ("Hi! ", "Hello! ", "Please help me: ", "Quick question: ", "Tell me: ", "I need to know: ", "Please: ")
AFTER = (" Thanks.", " Please.", " Thank you!", " Use the calculator.", " I need it now.")


@dataclass(frozen=True)
class Problem:
    """A question, and the expression that answers it."""

    question: str
    expression: str

    @property
    def result(self) -> str:
        return calculate(self.expression)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses: exact, or rounded to ten digits.

    Raises ValueError for anything else, and for a division by zero.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{SIGNIFICANT}g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic: numbers, + - * / and parentheses are")


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def easy(rng: Random) -> Problem:
    """A question for beginners, of the training part: two whole numbers, neither small nor large, and nothing else."""
    while True:
        numbers = {name: str(rng.randrange(10, 10 ** rng.randint(2, 4))) for name in "ab"}
        if not any(_apart(n) and held_out(n) for n in numbers.values()):
            return _two(rng, numbers)


def two(rng: Random) -> Problem:
    """Two numbers, in a wording or as an expression."""
    return _as_said(rng, _two(rng, _numbers(rng)))


def longer(rng: Random) -> Problem:
    """Three numbers."""
    return _as_said(rng, _three(rng, _numbers(rng), rng.random() < 0.5))


def reworded(rng: Random) -> Problem:
    """Two numbers, in a wording that is in no training example."""
    return _worded(rng, REWORDED, _numbers(rng))


def mixed(rng: Random) -> Problem:
    """The mixture that training draws from: mostly two numbers."""
    numbers, kind = _numbers(rng), rng.random()
    return _as_said(rng, _two(rng, numbers) if kind < 0.75 else _three(rng, numbers, kind < 0.87))


def problem(rng: Random, evaluation: bool, draw: Callable[[Random], Problem] = mixed) -> Problem:
    """A question that is drawn so, of the training or the evaluation part."""
    while True:
        made = draw(rng)
        held = [held_out(n) for n in NUMERAL.findall(made.question) if _apart(n)]
        fits = any(held) and all(held) if evaluation else not any(held)
        if not fits:
            continue
        try:
            result = made.result
        except ValueError:
            continue
        found = NUMERAL.findall(result)
        if abs(float(result)) < LARGEST and (evaluation or not any(_apart(n) and held_out(n) for n in found)):
            return made


def _apart(numeral: str) -> bool:
    return sum(map(str.isdigit, numeral)) >= TOLD_APART


def _numbers(rng: Random) -> dict[str, str]:
    return {name: _number(rng) for name in "abc"}


def _as_said(rng: Random, made: Problem) -> Problem:
    return Problem(_spoken(rng, made.question), made.expression)


def _two(rng: Random, numbers: Mapping[str, str]) -> Problem:
    if rng.random() < 0.5:
        return _worded(rng, TWO, numbers)
    return _written(rng, f"{numbers['a']} {rng.choice('+-*/')} {numbers['b']}")


def _three(rng: Random, numbers: Mapping[str, str], worded: bool) -> Problem:
    if worded:
        return _worded(rng, THREE, numbers)
    signs = {name: rng.choice("+-*/") for name in "op"}
    return _written(rng, rng.choice(SHAPES).format(**numbers, **signs))


def _worded(rng: Random, wordings: Wordings, numbers: Mapping[str, str]) -> Problem:
    ask, expression = rng.choice(wordings)
    return Problem(ask.format(**numbers), expression.format(**numbers))


def _written(rng: Random, expression: str) -> Problem:
    return Problem(rng.choice(WRITTEN).format(e=expression), expression)


def _number(rng: Random) -> str:
    digits = rng.choices(DIGITS, (1, 5, 5, 5, 2))[0]
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _spoken(rng: Random, question: str) -> str:
    """With what people say before and after, or without capitals and full stops."""
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.1 and question[-1] in "?.":
        question = question[:-1]
    before = rng.choice(BEFORE) if rng.random() < 0.05 else ""
    return before + question + (rng.choice(AFTER) if rng.random() < 0.05 else "")
