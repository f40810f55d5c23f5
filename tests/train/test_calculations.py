"""Sums with their expressions: the right ones, in numbers that are either for training or for evaluation."""

from __future__ import annotations

import re
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.train import calculations
from phasewise.train.calculations import NUMERAL, REWORDED, THREE, TWO, calculate, easy, longer, problem, reworded, two
from phasewise.train.tasks import held_out


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48213 * 977", "47104101"), ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("7 - 10", "-3"), ("-3 - -4", "1"),
        ("0.1 + 0.2", "0.3"), ("10 / 4", "2.5"), ("10 / 3", "3.333333333"), ("6 / 3", "2"), (" 1.50 ", "1.5"),
        ("999999 * 999999", "999998000001"),
    ],
)  # fmt: skip
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["1 / 0", "2 ** 9", "abs(1)", "x + 1", "", "1 +", "__import__('os')", "True + 1", "'a' * 3", "1, 2", "[1]", "1 < 2",
     "(" * 500 + "1" + ")" * 500],
)  # fmt: skip
def test_what_is_no_arithmetic_has_no_value(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=5), st.data())
def test_values_are_exact(numbers: list[int], data: st.DataObject) -> None:
    expression, value = str(numbers[0]), Fraction(numbers[0])
    for number in numbers[1:]:  # from left to right, in parentheses
        sign = data.draw(st.sampled_from("+-*"))
        expression = f"({expression} {sign} {number})"
        value = {"+": value + number, "-": value - number, "*": value * number}[sign]
    assert calculate(expression) == str(value)


WORDS = {"plus": "+", "add": "+", "sum": "+", "minus": "-", "subtract": "-", "away": "-", "difference": "-",
         "left": "-", "times": "*", "multipl": "*", "product": "*", "divide": "/"}  # fmt: skip
ORDERED = (("{b} from {a}", "{a} - {b}"), ("{b} away from {a}", "{a} - {b}"), ("{a} minus {b}", "{a} - {b}"),
           ("{a} divided by {b}", "{a} / {b}"), ("ivide {a} by {b}", "{a} / {b}"),
           ("between {a} and {b}", "{a} - {b}"))  # fmt: skip


@pytest.mark.parametrize("wordings", [TWO, THREE, REWORDED], ids=["two", "three", "reworded"])
def test_expressions_say_what_their_wordings_do(wordings: calculations.Wordings) -> None:
    for ask, expression in wordings:
        assert set(re.findall(r"{[abc]}", ask)) == set(re.findall(r"{[abc]}", expression)), ask
        signs = [sign for word, sign in WORDS.items() if word in ask.lower()]
        assert signs and all(set(sign) & set(expression) for sign in signs), (ask, expression)
        assert all(right in expression for words, right in ORDERED if words in ask), (ask, expression)


def test_wordings_of_evaluation_are_not_those_of_training() -> None:
    trained = {ask for ask, _ in (*TWO, *THREE)}
    assert not trained & {ask for ask, _ in REWORDED}


def large(text: str) -> set[str]:
    return {numeral for numeral in NUMERAL.findall(text) if sum(map(str.isdigit, numeral)) >= 3}


def test_numbers_of_evaluation_are_in_no_training_example() -> None:
    trained: set[str] = set()
    for seed in range(1500):
        made = problem(Random(f"train {seed}"), evaluation=False)
        trained |= large(made.question) | large(made.expression) | large(made.result)
    assert len(trained) > 2000 and not any(map(held_out, trained))
    for seed in range(500):
        made = easy(Random(seed))
        assert not any(map(held_out, large(made.question)))
    for seed in range(200):
        made = problem(Random(f"test {seed}"), True, (two, longer, reworded)[seed % 3])
        assert large(made.question) and all(map(held_out, large(made.question)))
        assert not large(made.question) & trained


def test_examples_can_be_had_again_and_are_many() -> None:
    made = [problem(Random(seed), evaluation=False) for seed in range(300)]
    assert made == [problem(Random(seed), evaluation=False) for seed in range(300)]
    assert len({one.question for one in made}) > 290
    for one in made:
        value = Fraction(calculate(one.expression)) if "e" not in one.result else Fraction(float(one.result))
        assert abs(value) < calculations.LARGEST
        asked = sorted(map(Fraction, NUMERAL.findall(one.question)))
        assert asked == sorted(map(Fraction, NUMERAL.findall(one.expression)))
