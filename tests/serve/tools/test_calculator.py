"""An agent's loop with the real `openai` package over HTTP: pocket-tools calls a calculator, is told, and says it."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phasewise.llm import LLM
from phasewise.load import model_path
from tests.forked import ROOT
from tests.serve.running import Server

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
QUESTIONS = [
    ("What is 48213 times 977?", "47104101"),
    ("Add 73914 and 8266.", "82180"),
    ("Subtract 4817 from 90352.", "85535"),
    ("Calculate 12 * (345 + 678).", "12276"),
    ("What is the product of 5381 and 264?", "1420584"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """pocket-tools as `phasewise serve` has it: drafts, paced, unless told otherwise."""
    with Server(model=Path(model_path("pocket-tools")), name="pocket-tools", verbs={"draft": "paced"}) as running:
        yield running


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATIONS[type(op)](value(left), value(right))
        raise ValueError(ast.dump(node))

    return str(value(ast.parse(expression, mode="eval").body))


def whole(server: Server, messages: list[Any]) -> Any:
    """The model's message and why it ended, in one answer."""
    choice = server.client().chat.completions.create(
        model="pocket-tools", messages=messages, tools=[CALCULATOR], tool_choice="auto", temperature=0
    ).choices[0]  # fmt: skip
    return choice.message, choice.finish_reason


def streamed(server: Server, messages: list[Any]) -> Any:
    """The same, put together from a stream by the package."""
    with server.client().chat.completions.stream(
        model="pocket-tools", messages=messages, tools=[CALCULATOR], tool_choice="auto", temperature=0
    ) as stream:
        for event in stream:
            assert event.type
        choice = stream.get_final_completion().choices[0]
    return choice.message, choice.finish_reason


def loop(server: Server, ask: Callable[[Server, list[Any]], Any], messages: list[Any]) -> tuple[str, list[str]]:
    """What an agent does: calls are carried out until there are none. Its last words, and the expressions."""
    expressions: list[str] = []
    for _ in range(4):
        message, reason = ask(server, messages)
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            assert reason == "stop" and message.content
            return str(message.content), expressions
        assert reason == "tool_calls"
        for call in message.tool_calls:
            assert call.function.name == "calculator"
            arguments = json.loads(call.function.arguments)
            assert list(arguments) == ["expression"]
            expressions.append(arguments["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(arguments["expression"])})
    raise AssertionError(f"it goes on calling: {expressions}")


@pytest.mark.parametrize(("question", "result"), QUESTIONS)
def test_a_sum_is_calculated_and_said(server: Server, question: str, result: str) -> None:
    said, expressions = loop(server, whole, [{"role": "user", "content": question}])
    assert result in said and len(expressions) == 1, (said, expressions)


def test_a_conversation_has_two(server: Server) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    for question, result in QUESTIONS[:2]:
        messages.append({"role": "user", "content": question})
        said, expressions = loop(server, whole, messages)
        assert result in said and len(expressions) == 1


def test_streams_and_answers_are_the_same(server: Server) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0][0]}]
    (one, _), (other, _) = whole(server, messages), streamed(server, messages)
    assert [call.function.arguments for call in one.tool_calls] == [c.function.arguments for c in other.tool_calls]


def test_what_needs_no_tool_is_answered(server: Server) -> None:
    for question, part in (("Hello!", "phasewise pocket model"), ("Repeat: lemon tiger cup", "lemon tiger cup")):
        said, expressions = loop(server, whole, [{"role": "user", "content": question}])
        assert part in said and not expressions


def test_without_tools_it_answers_as_pocket_does(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="pocket-tools", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0
    )
    assert answer.choices[0].message.tool_calls is None
    assert str(answer.choices[0].message.content).endswith("so 42")


def test_what_the_page_shows_is_what_happens(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(import ast[^`]*)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None and "http://127.0.0.1:8000" in found[1]
    exec(found[1].replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out == found[2]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}], ids=str)
def test_a_call_that_has_to_be_made_is_as_good_as_one_that_need_not(server: Server, choice: Any) -> None:
    pytest.importorskip("llguidance")
    for question, result in QUESTIONS:
        message = server.client().chat.completions.create(
            model="pocket-tools", messages=[{"role": "user", "content": question}], tools=[CALCULATOR],
            tool_choice=choice, temperature=0,
        ).choices[0].message  # fmt: skip
        (call,) = message.tool_calls
        assert calculate(json.loads(call.function.arguments)["expression"]) == result and not message.content


def test_a_second_model_may_draft() -> None:
    """The vocabulary is pocket's, so its draft is that of pocket-tools as well."""
    texts = {}
    for draft in ("draft_model", "none"):
        llm = LLM("pocket-tools", draft=draft) if draft != "none" else LLM("pocket-tools")
        try:
            output = llm.chat([{"role": "user", "content": QUESTIONS[0][0]}], max_tokens=60,
                              variables={"tools": [CALCULATOR]})  # fmt: skip
            texts[draft] = output.text
        finally:
            llm.close()
    assert texts["draft_model"] == texts["none"] and "48213 * 977" in str(texts["none"])
