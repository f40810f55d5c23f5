"""Rows of sums with a calculator: who calls it rightly and says the result is right, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from phasewise.bench.quality import TextCodec
from phasewise.bench.rows import calls, index
from phasewise.bench.rows.calls import has, measure, result
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.train.calculations import Problem, calculate, problem
from phasewise.train.toolbox import OTHERS, PLAIN

Say = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@cache
def text() -> TextCodec:
    return TextCodec.load(Path(model_path("pocket")))


def subject(say: Say) -> Subject:
    """Answers conversations (with tools) by a function."""
    asked: list[tuple[Any, Any]] = []

    def offer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        asked.append((messages, tools))
        return [len(asked) - 1]

    def generate(prompts: list[list[int]], room: int) -> list[list[int]]:
        return [text().encode(say(*asked[number]))[:room] for (number,) in prompts]

    return Subject(generate, lambda tokens, stretches: [], lambda jobs, room: [], text(), 2048, True, offer)


def called(name: str, parameter: str, expression: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {parameter: expression}})}\n</tool_call>"


def right(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Knows the questions of 30 examples by heart."""
    if messages[-1]["role"] == "tool":
        return f"The answer is {messages[-1]['content']}."
    others = {name for name, _, _ in OTHERS}
    tool = next(tool["function"] for tool in tools if tool["function"]["name"] not in others)
    return called(tool["name"], next(iter(tool["parameters"]["properties"])), known()[messages[-1]["content"]])


@cache
def known() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (draw, _) in calls.SUMS.items():
        rng = Random(f"0 {name}")
        for _ in range(30):
            one = problem(rng, True, draw)
            found[one.question] = one.expression
    return found


@pytest.mark.parametrize("name", list(calls.SUMS))
def test_all_right_is_all(name: str) -> None:
    made = measure(name, subject(right), 30, 0)
    assert (made.row.name, made.row.unit, made.row.n, made.row.value) == (name, "exact", 30, 1.0)
    assert made == measure(name, subject(right), 30, 0), "the same examples again"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda messages, tools: "I do not know.",
        lambda messages, tools: right(messages, tools).replace("answer is ", "answer is 9"),
        lambda messages, tools: right(messages, tools).replace("_call>", "_calls>"),
        lambda messages, tools: right(messages, tools) + right(messages, tools),
        lambda messages, tools: right(messages, tools).replace('"name": "', '"name": "un'),
        lambda messages, tools: right(messages, tools).replace('": "', '": "1 + '),
    ],
)
def test_all_wrong_is_nothing(wrong: Say) -> None:
    assert measure("calculator", subject(wrong), 30, 0).row.value == 0.0


def test_each_example_has_its_own_value() -> None:
    questions = list(known())[:30]  # of the first row
    odd = set(questions[1::2])

    def half(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return "No." if messages[0]["content"] in odd else right(messages, tools)

    assert measure("calculator", subject(half), 30, 0).values == [float(q not in odd) for q in questions]


def test_a_call_is_one_call_of_the_calculator() -> None:
    good = called("calculator", "expression", "2 * 3")
    assert result(good, PLAIN) == ("2 * 3", "6") and result(f" {good}\n", PLAIN) == ("2 * 3", "6")
    for text in (called("calculator", "expression", "2 *"), called("calculator", "expression", "abs(2)"),
                 called("calculator", "term", "2"), called("weather", "expression", "2"), "6", f"So: {good}",
                 "<tool_call>{}</tool_call>", "<tool_call>{1}</tool_call>",
                 '<tool_call>{"name": "calculator", "arguments": {"expression": 7}}</tool_call>',
                 '<tool_call>{"name": "calculator"}</tool_call>'):  # fmt: skip
        assert result(text, PLAIN) is None, text


def test_an_answer_has_the_whole_number() -> None:
    asked = Problem("", "12 - 37")
    assert calculate(asked.expression) == "-25"
    assert has("The answer is -25.", asked) and has("-25", asked) and has("It is -25, I think", asked)
    assert not any(has(said, asked) for said in ("25", "-250", "-25.5", "1-25", "-25 <tool_call>", "", "-2 5"))


def test_other_questions_are_to_be_answered() -> None:
    assert measure("calculator-idle", subject(lambda messages, tools: "?"), 8, 0).row.value == 0.0
    plain = LLM("pocket-tools")
    try:
        answers = {}

        def say(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
            question = messages[-1]["content"]
            answers[question] = str(plain.chat([dict(one) for one in messages], max_tokens=60).text)
            return answers[question]

        assert measure("calculator-idle", subject(say), 8, 0).row.value >= 0.5
    finally:
        plain.close()


def test_a_model_that_is_shown_no_tools_is_not_asked() -> None:
    bare = Subject(lambda prompts, room: [], lambda tokens, stretches: [], lambda jobs, room: [], text(), 2048)
    with pytest.raises(UserError, match="calculator is asked with a tool"):
        measure("calculator", bare, 3, 0)
    assert set(calls.ROWS) <= set(index.EVERY) and not set(calls.ROWS) & set(index.GENERAL)
