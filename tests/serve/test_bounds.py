"""Numbers that no field can hold: every whole-number field of every endpoint refuses them by name, with 400."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from phasewise.serve.about import DetokenizeAsk, TokenizeAsk
from phasewise.serve.completions.schema import ChatAsk, CompletionAsk
from phasewise.serve.messages.ask import CountAsk, MessagesAsk
from phasewise.serve.responses.ask import ResponsesAsk
from phasewise.serve.scores.embeddings import EmbeddingAsk
from phasewise.serve.scores.scoring import RerankAsk, ScoreAsk
from tests.serve.running import Server

MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionAsk, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (ChatAsk, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/messages": (MessagesAsk, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountAsk, {"messages": MESSAGES}),
    "/v1/responses": (ResponsesAsk, {"input": "a", "max_output_tokens": 1, "store": False}),
    "/tokenize": (TokenizeAsk, {"prompt": "a"}), "/detokenize": (DetokenizeAsk, {"tokens": [5]}),
    "/v1/embeddings": (EmbeddingAsk, {"input": "a"}), "/v1/score": (ScoreAsk, {"text_1": "a", "text_2": "b"}),
    "/v1/rerank": (RerankAsk, {"query": "a", "documents": ["b"]}),
}  # fmt: skip
BEYOND = ("9223372036854775808", "18446744073709551616", "-9223372036854775809", "1e400", "-1e400", "1.5", "9" * 400)
# what holds numbers besides fields of their own: {field: a value around a number}
WITHIN: dict[str, dict[str, str]] = {
    "/v1/completions": {"prompt": "[%s]", "logit_bias": '{"%s": 1}', "stop_token_ids": "[%s]",
                        "allowed_token_ids": "[5, %s]", },
    "/v1/chat/completions": {"logit_bias": '{"5": %s}', "reasoning": '{"max_tokens": %s}',
                             "logprobs": "%s"},
    "/v1/messages": {"thinking": '{"type": "enabled", "budget_tokens": %s}'},
    "/v1/responses": {"reasoning": '{"max_tokens": %s}'},
    "/detokenize": {"tokens": "[%s]"}, "/v1/embeddings": {"input": "[[%s]]"},
}  # fmt: skip


def whole(annotation: Any) -> bool:
    """True if a whole number alone can stand there."""
    if get_origin(annotation) is Annotated:
        return whole(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(whole(each) for each in get_args(annotation))
    return annotation is int


def fields() -> Iterator[tuple[str, str]]:
    for path, (kind, _) in ENDPOINTS.items():
        yield from ((path, name) for name, field in kind.model_fields.items() if whole(field.annotation))


def refused(server: Server, path: str, field: str, value: str) -> None:
    """The body with this JSON for the field."""
    body = {**ENDPOINTS[path][1], field: "HERE"}
    answer = server.post(path, json.dumps(body).replace('"HERE"', value))
    said = answer.json()["error"]
    assert answer.status_code == 400, (field, value[:30], answer.text)
    assert field in said["message"] and said.get("param", field) == field, (field, value[:30], said)


def test_all_endpoints_are_here(server: Server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {path for path, each in paths.items() if "post" in each} == {*ENDPOINTS}


def test_no_field_takes_what_it_cannot_hold(server: Server) -> None:
    every = list(fields())
    assert len(every) > 25
    for path, field in every:
        for value in BEYOND:
            refused(server, path, field, value)
        if field not in ("seed", "top_k", "max_tokens") or "messages" in path:
            refused(server, path, field, "-1")
    assert server.health().status_code == 200


@pytest.mark.parametrize("path", WITHIN)
def test_nor_do_those_within(server: Server, path: str) -> None:
    for field, around in WITHIN[path].items():
        for value in BEYOND:
            if not (value == "1.5" and field == "logit_bias"):
                refused(server, path, field, around % value)
    assert server.health().status_code == 200


def test_the_largest_are_taken(server: Server) -> None:
    body = {**ENDPOINTS["/v1/completions"][1], "seed": 2**63 - 1, "top_k": 1 << 30}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", {**body, "seed": -(2**63), "top_k": -1}).status_code == 200
