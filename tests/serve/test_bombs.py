"""What is small to send and large to obey: nested bodies, expressions and schemas; and pages of other origins."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from phasewise.llm import LLM
from tests.serve.running import PATIENCE, Server
from tests.serve.test_errors import COMPLETE, failure
from tests.serve.test_hostile import others_are_served

DEEP = 20_000
RECURSIVE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
BOMBS: dict[str, dict[str, Any]] = {
    "an expression that doubles": {"guided_regex": "(a|a)*" * 30 + "b"},
    "an expression of nested counts": {"guided_regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "a list of 10^9": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a list of 10^9 lists of as many": {"guided_json": {
        "type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}},
    "a reference to itself": {"guided_json": RECURSIVE},
    "lists of lists": {"guided_json": {"enum": [[0] * 500] * 500}},
    "10^6 texts": {"guided_choice": ["a"] * 10**6},
    "10^6 values": {"guided_json": {"enum": list(range(10**6))}},
    "a schema within schemas": {"guided_json": json.loads('{"type":"array","items":' * 100 + "{}" + "}" * 100)},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_or_an_answer_and_others_are_served(server: Server, llm: LLM, name: str) -> None:
    with others_are_served(server, llm):
        answer = server.post(COMPLETE, {"prompt": "the", "max_tokens": 5, **BOMBS[name]})
        assert answer.status_code in (200, 400, 413), answer.text
        assert (answer.status_code == 413) == name.startswith("10^6")
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] in BOMBS[name]


@pytest.mark.parametrize("opens", ["[", '{"a":'])
def test_deep_bodies(server: Server, llm: LLM, opens: str) -> None:
    with others_are_served(server, llm):
        body = '{"prompt": "the", "unknown": ' + opens * DEEP
        assert failure(server.post(COMPLETE, body), 400)["code"] == "invalid_json"
        whole = body + "1" + {"[": "]", '{"a":': "}"}[opens] * DEEP + "}"
        failure(server.post(COMPLETE, whole), 400)


def test_pages_of_other_origins_are_told_nothing(server: Server) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    asked = httpx.options(f"{server.url}{COMPLETE}", headers=headers, timeout=PATIENCE)
    answered = server.post(COMPLETE, {"prompt": "the", "max_tokens": 2}, headers=headers)
    assert asked.status_code == 405 and answered.status_code == 200
    for answer in (asked, answered):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
