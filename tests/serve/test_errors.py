"""Every mistake of a client gets the right status, names the field at fault, and changes nothing for others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from phasewise.serve.completions.fields import HARMLESS
from tests.serve.running import Server
from tests.serve.tiny_chat import CONTEXT, VOCAB

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "the"}]


def failure(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an OpenAI-style body, after checking its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"] and "Traceback" not in error["message"] and "\n" not in error["message"]
    assert error["type"] == ("rate_limit_error" if status == 429 else
                             "invalid_request_error" if status < 500 else "server_error")  # fmt: skip
    return error


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (COMPLETE, "prompt", {"prompt": None}),
        (COMPLETE, "prompt", {"prompt": 5}),
        (COMPLETE, "prompt", {"prompt": []}),
        (COMPLETE, "prompt", {"prompt": [[]]}),
        (COMPLETE, "prompt", {"prompt": ["the", 5]}),
        (COMPLETE, "prompt", {"prompt": [5, True]}),
        (COMPLETE, "prompt", {"prompt": [1, -1]}),
        (COMPLETE, "prompt", {"prompt": {"text": "the"}}),
        (COMPLETE, "max_tokens", {"max_tokens": 0}),
        (COMPLETE, "max_tokens", {"max_tokens": "5"}),
        (COMPLETE, "max_tokens", {"max_tokens": True}),
        (COMPLETE, "max_tokens", {"max_tokens": 10**30}),
        (COMPLETE, "temperature", {"temperature": -0.1}),
        (COMPLETE, "temperature", {"temperature": 2.1}),
        (COMPLETE, "temperature", {"temperature": "hot"}),
        (COMPLETE, "top_p", {"top_p": 1.5}),
        (COMPLETE, "n", {"n": 0}),
        (COMPLETE, "n", {"n": 129}),
        (COMPLETE, "n", {"n": 1.5}),
        (COMPLETE, "stop", {"stop": ""}),
        (COMPLETE, "stop", {"stop": ["a", 1]}),
        (COMPLETE, "stop", {"stop": ["a"] * 17}),
        (COMPLETE, "seed", {"seed": 2**64}),
        (COMPLETE, "presence_penalty", {"presence_penalty": 3}),
        (COMPLETE, "frequency_penalty", {"frequency_penalty": []}),
        (COMPLETE, "repetition_penalty", {"repetition_penalty": 0}),
        (COMPLETE, "top_k", {"top_k": -2}),
        (COMPLETE, "min_p", {"min_p": 2}),
        (COMPLETE, "logit_bias", {"logit_bias": {"x": 1}}),
        (COMPLETE, "logit_bias", {"logit_bias": {"5": 101}}),
        (COMPLETE, "logit_bias", {"logit_bias": {str(VOCAB): 1}}),
        (COMPLETE, "stop_token_ids", {"stop_token_ids": [-1]}),
        (COMPLETE, "slo", {"slo": 5}),
        (COMPLETE, "slo", {"slo": {"ttft": 5}}),
        (COMPLETE, "slo", {"slo": {"ttft_ms": 0}}),
        (COMPLETE, "slo", {"slo": {"tpot_ms": "50"}}),
        (CHAT, "slo", {"slo": {"ttft_ms": 100, "tpot_ms": -1}}),
        (COMPLETE, "stream", {"stream": "yes"}),
        (COMPLETE, "stream_options", {"stream_options": {"include_usage": True}}),
        (COMPLETE, "stream_options", {"stream": True, "stream_options": {"include_usage": "yes"}}),
        (COMPLETE, "stream_options", {"stream": True, "stream_options": {"continuous_usage_stats": 1}}),
        (COMPLETE, "echo", {"echo": 1}),
        (COMPLETE, "logprobs", {"logprobs": 21}),
        (COMPLETE, "best_of", {"best_of": 2, "n": 3}),
        (COMPLETE, "priority", {"priority": -1}),
        (COMPLETE, "priority", {"priority": 1001}),
        (COMPLETE, "timeout", {"timeout": 0}),
        (CHAT, "timeout", {"timeout": "5"}),
        (COMPLETE, "max_completion_tokens", {"max_completion_tokens": 5}),
        (COMPLETE, "frequency_penalties", {"frequency_penalties": 1}),
        (COMPLETE, "tools", {"tools": []}),
        (CHAT, "prompt", {"prompt": "the"}),
        (CHAT, "temprature", {"temprature": 0.5}),
        (CHAT, "best_of", {"best_of": 2}),
        (CHAT, "messages", {"messages": None}),
        (CHAT, "messages", {"messages": []}),
        (CHAT, "messages", {"messages": "the"}),
        (CHAT, "messages", {"messages": ["the"]}),
        (CHAT, "messages", {"messages": [{"content": "the"}]}),
        (CHAT, "messages", {"messages": [{"role": "user"}]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (CHAT, "messages", {"messages": [{"role": "stranger", "content": "the"}]}),  # the template refuses
        (CHAT, "max_completion_tokens", {"max_completion_tokens": -1}),
        (CHAT, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, "response_format", {"response_format": {"type": "xml"}}),
        (CHAT, "logprobs", {"logprobs": 1}),
        (CHAT, "chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_wrong_fields_are_named(server: Server, path: str, param: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", **({"prompt": "the"} if path == COMPLETE else {"messages": USER}), **fields}
    error = failure(server.post(path, body), 400)
    assert error["param"] == param
    assert param.split("_")[0] in error["message"] or param == "messages"


@pytest.mark.parametrize("path", [COMPLETE, CHAT, "/v1/responses", "/v1/messages"])
def test_unknown_fields_are_refused_with_what_is_near(server: Server, path: str) -> None:
    body: dict[str, Any] = {
        COMPLETE: {"prompt": "the"}, CHAT: {"messages": USER}, "/v1/responses": {"input": "the"},
        "/v1/messages": {"messages": USER, "max_tokens": 4},
    }[path]  # fmt: skip
    answer = server.post(path, {**body, "temperatur": 0.5})
    error = answer.json()["error"]
    assert answer.status_code == 400 and "temperatur is not known here. Did you mean temperature" in error["message"]
    assert path == "/v1/messages" or (error["param"], error["code"]) == ("temperatur", "unknown_parameter")
    assert server.post(path, {**body, "temperatur": None}).status_code == 200


def test_fields_that_no_answer_depends_on_are_taken(server: Server) -> None:
    extra = dict.fromkeys(HARMLESS, "x")
    for path, body in ((COMPLETE, {"prompt": "the"}), (CHAT, {"messages": USER})):
        fields = {"model": "tiny", "max_tokens": 4, "temperature": 0, **body}
        plain, more = (server.post(path, fields | also).json()["choices"] for also in ({}, extra))
        assert plain == more


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        "", "{", "null", "5", '"text"', "[]", "[1, 2]", "{'a': 1}", '{"prompt": "\\ud800"}', b"\xff\xfe{}", "[" * 9999,
        '{"prompt": NaN}', '{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "temperature": Infinity}', "\0",
    ],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
def test_bodies_that_are_no_json_objects(server: Server, path: str, body: str | bytes) -> None:
    failure(server.post(path, body), 400)


def test_missing_fields_are_named(server: Server) -> None:
    assert failure(server.post(COMPLETE, {}), 400)["param"] == "prompt"
    assert failure(server.post(CHAT, {"model": "tiny"}), 400)["code"] == "missing_required_parameter"


def test_a_body_needs_no_content_type(server: Server) -> None:
    assert server.post(COMPLETE, {"prompt": "the"}, headers={"Content-Type": "text/plain"}).status_code == 200


def test_unknown_models_routes_and_methods(server: Server) -> None:
    error = failure(server.post(COMPLETE, {"model": "gpt", "prompt": "the"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "tiny" in error["message"]
    failure(server.post("/v1/nothing", {}), 404)
    failure(httpx.get(f"{server.url}/v1/models/gpt", verify=False), 404)
    failure(httpx.get(f"{server.url}{CHAT}", verify=False), 405)
    failure(httpx.delete(f"{server.url}/v1/models", verify=False), 405)


def test_what_exceeds_the_context(server: Server) -> None:
    for fields in ({"prompt": [5] * CONTEXT}, {"prompt": [5] * 10, "max_tokens": CONTEXT, "min_tokens": CONTEXT - 9}):
        error = failure(server.post(COMPLETE, fields), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(CONTEXT) in error["message"]
    for more in ({}, {"max_tokens": 9000}, {"max_tokens": -1}, {"min_tokens": 3}):  # such answers end with the context
        body = {"prompt": [5] * (CONTEXT - 3), "ignore_eos": True, **more}
        answer = server.post(COMPLETE, body).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


def test_token_ids_outside_the_vocabulary(server: Server) -> None:
    assert str(VOCAB) in failure(server.post(COMPLETE, {"prompt": [VOCAB]}), 400)["message"]
    # all or none: the good prompt beside it is not left running
    failure(server.post(COMPLETE, {"prompt": [[5], [VOCAB]], "n": 2}), 400)
    assert server.settled()["phasewise_requests_running"] == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(server: Server, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * (9 << 20) + b'"}'
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    failure(httpx.post(f"{server.url}{COMPLETE}", content=content, timeout=60, verify=False), 413)


def test_the_openai_package_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="the", top_p=7)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "the"}])
    with pytest.raises(openai.BadRequestError):  # before the stream begins: a status, not an event
        client.completions.create(model="tiny", prompt=[VOCAB], stream=True)


def test_more_kv_than_the_budget(narrow: Server) -> None:
    error = failure(narrow.post(COMPLETE, {"prompt": "the", "max_tokens": 1500}), 400)
    assert "KV" in error["message"] and "max_tokens" in error["message"]


def test_a_full_queue(narrow: Server) -> None:
    narrow.settled()
    body = {"model": "tiny", "prompt": "the", "max_tokens": 50, "stream": True, "extra_body": {"ignore_eos": True}}
    client = narrow.client()
    streams = [client.completions.create(**body) for _ in range(3)]
    refused = narrow.post(COMPLETE, {"prompt": "the"})
    error = failure(refused, 429)
    assert error["code"] == "queue_full" and refused.headers["retry-after"]
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="the")
    assert [sum(bool(chunk.choices) for chunk in stream) > 0 for stream in streams] == [True] * 3  # they go on
    assert narrow.post(COMPLETE, {"prompt": "the"}).status_code == 200  # and there is room again
    too_many = failure(narrow.post(COMPLETE, {"prompt": "the", "n": 4}), 400)
    assert "4 sequences" in too_many["message"]
    narrow.settled()


def test_errors_are_counted(server: Server) -> None:
    before = server.metrics().get('phasewise_http_errors_total{status="404"}', 0)
    server.post("/v1/nothing", {})
    assert server.metrics()['phasewise_http_errors_total{status="404"}'] == before + 1
