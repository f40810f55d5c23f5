"""Structured output over HTTP: every field that asks for it, every way to answer, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from phasewise.serve.completions.schema import CompletionAsk, read
from phasewise.serve.completions.structured import FIELDS, of_schema, wanted
from phasewise.serve.failures import ApiError
from tests.sample.structured import FLAT, tokenizer
from tests.serve.running import PATIENCE, Server

pytest.importorskip("llguidance")
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": FLAT}}


class Animal(BaseModel):
    name: Literal["fox", "dog"]
    tame: bool
    kin: list[Literal["a", "b"]]


def test_openais_client_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Animal, max_tokens=400, temperature=0.8, seed=2
    )
    choice = done.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Animal)


def test_streams_and_several_choices(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": FORMAT,
        "max_tokens": 300,
        "n": 3,
        "seed": 4,
    }
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) > 1
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), FLAT)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [("guided_regex", "[ab]{3}", "[ab]{3}"), ("guided_choice", ["one", "two"], "one|two"),
     ("guided_grammar", 'start: "x" /[0-9]/', "x[0-9]"), ("grammar", 'root ::= "x" [0-9]', "x[0-9]"),
     ("guided_json", {"enum": [1, 2]}, "1|2"), ("guided_json", '{"enum": [1, 2]}', "1|2"),
     ("json_schema", {"type": "boolean"}, "true|false"),
     ("structured_outputs", {"regex": "[ab]{3}"}, "[ab]{3}"), ("structured_outputs", {"choice": ["one"]}, "one"),
     ("structured_outputs", {"json": {"type": "null"}, "regex": None}, "null"),
     ("response_format", {"type": "json_object", "schema": {"type": "null"}}, "null")],
)  # fmt: skip
def test_every_field_that_asks(client: openai.OpenAI, field: str, value: Any, pattern: str) -> None:
    done = client.completions.create(
        model="tiny", prompt="the fox", max_tokens=40, temperature=1, seed=1, extra_body={field: value}
    )
    assert done.choices[0].finish_reason == "stop" and re.fullmatch(pattern, done.choices[0].text)


def refused(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 4, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE, verify=False)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json", "uniqueItems"),
     ({"guided_json": {"enum": list(range(10**5))}}, "guided_json", "enum has 100,000 values"),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
      "response_format", "not"),
     ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
     ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
     ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
     ({"structured_outputs": {}}, "structured_outputs", "nothing"),
     ({"response_format": {"type": "xml"}}, "response_format", "xml"),
     ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}}},
      "response_format", "strict"),
     ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
     ({"guided_json": "{"}, "guided_json", "no JSON"), ({"guided_json": "[]"}, "guided_json", "no object"),
     ({"guided_choice": [1]}, "guided_choice", "string"), ({"guided_whitespace_pattern": " "},
      "guided_whitespace_pattern", "not supported"),
     ({"grammar": "root ::= other"}, "grammar", "other"),
     ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos")],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400(server: Server, fields: dict[str, Any], param: str, why: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param and why in error["message"], error


def test_bombs_leave_the_server_as_it_was(server: Server, client: openai.OpenAI) -> None:
    for bomb in (
        {"enum": list(range(10**5))},
        {"type": "array", "minItems": 10**9},
        {"$ref": "#"},
        {"const": "x" * 10**5},
    ):
        assert refused(server, guided_json=bomb)["param"] == "guided_json"
    assert client.completions.create(model="tiny", prompt="the fox", max_tokens=3).choices[0].finish_reason == "length"


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def test_a_grammar_and_allowed_tokens_that_have_none_in_common(server: Server) -> None:
    """Known before anything is computed."""
    error = refused(server, guided_regex="[0-9]+", allowed_token_ids=ids("x"))
    assert error["type"] == "invalid_request_error" and "regex and allowed_token_ids leave no token" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fields",
    [{"guided_regex": "xy|xz"}, {"guided_regex": "xyz"}, {"guided_regex": "x[yz]", "temperature": 1, "seed": 3}],
    ids=["chosen", "forced", "sampled"],
)
def test_rules_that_leave_nothing_on_the_way_are_the_requests_fault(
    server: Server, client: openai.OpenAI, fields: dict[str, Any], stream: bool
) -> None:
    """It alone ends, with an error of its own; an answer that is under way beside it is what it would have been."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 60, "temperature": 0}
    want = client.completions.create(**asked).choices[0].text
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 9, "stream": stream, "temperature": 0,
            "allowed_token_ids": ids("x"), **fields}  # fmt: skip
    got = ""
    for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
        got += chunk.choices[0].text
        if number == 0:
            answer = server.post("/v1/completions", body)
            assert answer.status_code == (200 if stream else 400)
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if "error" in line]
            error = json.loads(events[-1])["error"]
            assert error["type"] == "invalid_request_error" and error["code"] == "unanswerable_request", answer.text
            assert error["message"].startswith(
                "regex and allowed_token_ids leave no token to go on with after 1 tokens"
            )
    assert got == want


def test_what_asks_for_nothing() -> None:
    assert wanted({}) is None and wanted(dict.fromkeys(FIELDS)) is None
    assert wanted({"response_format": {"type": "text"}, "grammar": ""}) is None
    assert of_schema({"type": "null"}) == {"json_schema": {"type": "null"}}
    ask = read(CompletionAsk, json.dumps({"prompt": "a", "response_format": {"type": "text"}}).encode())
    assert ask.params().ask is None
    with pytest.raises(ApiError, match="json_object or json_schema"):
        read(CompletionAsk, b'{"prompt": "a", "response_format": {"type": 3}}').params()
