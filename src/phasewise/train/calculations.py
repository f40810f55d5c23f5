"""Questions that a calculator answers, in many wordings, with the expression that it is to be given.

Numbers are held out as well as prompts: one numeral in 16 of those with three or more digits, by hash, is in no example
for training, neither in a question nor in a result, and every such numeral of an example for evaluation is one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from phasewise.train.tasks import held_out
from phasewise.train.words import NAMES

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
STORIES: Wordings = (
    ("{who} has {a} {things} and gets {b} more. How many are there now?", "{a} + {b}"),
    ("{who} has {a} {things} and buys {b} more. How many {things} does {who} have?", "{a} + {b}"),
    ("There are {a} {things} on the table and {b} in the box. How many {things} are there?", "{a} + {b}"),
    ("{who} had {a} {things} and lost {b}. How many are left?", "{a} - {b}"),
    ("{who} has {a} {things} and sells {b} of them. How many {things} are left?", "{a} - {b}"),
    ("One box holds {a} {things}. How many {things} do {b} boxes hold?", "{a} * {b}"),
    ("{who} packs {a} boxes with {b} {things} each. How many {things} is that?", "{a} * {b}"),
    ("{who} shares {a} {things} among {b} people. How many does each get?", "{a} / {b}"),
    ("{who} buys {a} {things} at {b} each and pays {c} for the way. How much is it?", "{a} * {b} + {c}"),
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
    ("What would {a} times {b} plus {c} be?", "{a} * {b} + {c}"),
    ("Give me the sum of {a}, {b} and {c}", "{a} + {b} + {c}"),
    ("A shelf has {a} {things}. How many {things} do {b} shelves have?", "{a} * {b}"),
    ("{who} found {a} {things} yesterday and {b} today. How many {things} is that?", "{a} + {b}"),
)  # fmt: skip
WRITTEN = ("What is {e}?", "How much is {e}?", "Calculate {e}.", "Compute {e}", "{e} =", "{e} = ?", "{e}",
           "Evaluate {e}.", "What is the value of {e}?", "Can you calculate {e}?")  # fmt: skip
SHAPES = ("{a} {o} {b}", "{a} {o} {b}", "{a} {o} {b}", "{a} {o} {b} {p} {c}", "({a} {o} {b}) {p} {c}",
          "{a} {o} ({b} {p} {c})")  # fmt: skip
SIGNS = {"*": ("x", "×"), "/": ("÷", ":")}
THINGS = ("apples", "books", "coins", "eggs", "lemons", "shells", "candles", "bricks", "cards", "stones", "keys")
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
    """A question for beginners, of the training part: two whole numbers in a plain wording."""
    while True:
        numbers = {name: str(rng.randrange(10, 10 ** rng.randint(2, 4))) for name in "ab"}
        if not any(_apart(n) and held_out(n) for n in numbers.values()):
            break
    if rng.random() < 0.5:
        ask, expression = rng.choice(TWO)
        return Problem(ask.format(**numbers), expression.format(**numbers))
    expression = f"{numbers['a']} {rng.choice('+-*/')} {numbers['b']}"
    return Problem(rng.choice(WRITTEN).format(e=expression), expression)


def problem(rng: Random, evaluation: bool, reworded: bool = False) -> Problem:
    """A question of the training or the evaluation part; `reworded`: in wordings that are in no training example."""
    while True:
        made = _drawn(rng, reworded)
        asked = [n for n in NUMERAL.findall(made.question) if _apart(n)]
        if evaluation and not (asked and all(map(held_out, asked))):
            continue
        if not evaluation and any(map(held_out, asked)):
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


def _drawn(rng: Random, reworded: bool) -> Problem:
    numbers = {name: _number(rng) for name in "abc"}
    kind = rng.random()
    if reworded or kind < 0.65:
        wordings = REWORDED if reworded else TWO if kind < 0.45 else THREE if kind < 0.58 else STORIES
        ask, expression = rng.choice(wordings)
        if "{things}" in ask:  # which are not cut
            numbers = {name: number.partition(".")[0] for name, number in numbers.items()}
        words = {**numbers, "who": rng.choice(NAMES), "things": rng.choice(THINGS)}
        question, expression = ask.format(**words), expression.format(**words)
    else:
        signs = {name: rng.choice("+-*/" if rng.random() < 0.5 else "+*") for name in "op"}
        expression = rng.choice(SHAPES).format(**numbers, **signs)
        question = rng.choice(WRITTEN).format(e=_notated(rng, expression))
    return Problem(question if reworded else _spoken(rng, question), expression)


def _number(rng: Random) -> str:
    digits = rng.choices(DIGITS, (1, 5, 5, 5, 2))[0]
    whole = rng.randrange(10 ** (digits - 1), 10**digits)
    if rng.random() < 0.94:
        return str(whole)
    return f"{whole}.{rng.choice(('', '0', '1', '2', '7'))}{rng.randint(1, 9)}"


def _notated(rng: Random, expression: str) -> str:
    """As people may write it: other signs, no spaces."""
    kind = rng.random()
    if kind < 0.08:
        for sign, others in SIGNS.items():
            expression = expression.replace(f" {sign} ", f" {rng.choice(others)} ")
    elif kind < 0.18:
        expression = expression.replace(" ", "")
    return expression


def _spoken(rng: Random, question: str) -> str:
    """With what people say before and after, or without capitals and full stops."""
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.1 and question[-1] in "?.":
        question = question[:-1]
    before = rng.choice(BEFORE) if rng.random() < 0.08 else ""
    return before + question + (rng.choice(AFTER) if rng.random() < 0.06 else "")
