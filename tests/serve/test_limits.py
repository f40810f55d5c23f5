"""What one request may ask for, how long it may take, and what clients are told of the machine: nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.serve.app import public_name
from phasewise.serve.failures import ApiError, error_body, without_paths
from tests.serve.running import PATIENCE, Server
from tests.serve.test_errors import CHAT, COMPLETE, USER, failure

CAPS = {"max_prompt": 50, "max_n": 3, "max_tokens": 20, "timeout": 500}
LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def capped() -> Iterator[Server]:
    with Server(name=None, caps=CAPS) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (COMPLETE, "prompt", {"prompt": [5] * 51}),
        (COMPLETE, "prompt", {"prompt": [[5], [5] * 51]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "x" * 51}]}),
        (COMPLETE, "n", {"n": 4}),
        (COMPLETE, "n", {"prompt": ["a", "b"], "n": 2}),
        (COMPLETE, "max_tokens", {"max_tokens": 21}),
        (CHAT, "max_tokens", {"max_completion_tokens": 21}),
        (COMPLETE, "timeout", {"timeout": 501}),
    ],
)
def test_more_than_the_server_allows(capped: Server, path: str, param: str, fields: dict[str, Any]) -> None:
    body = {**({"prompt": "the"} if path == COMPLETE else {"messages": USER}), **fields}
    error = failure(capped.post(path, body), 400)
    assert (error["param"], error["code"]) == (param, "limit_exceeded")
    assert "this server allows" in error["message"]


def test_as_much_as_the_server_allows(capped: Server) -> None:
    body = {"prompt": [5] * 50, "n": 3, "max_tokens": 20, "timeout": 500, "ignore_eos": True}
    assert capped.post(COMPLETE, body).json()["usage"]["completion_tokens"] == 60
    with Server(caps={"max_tokens": 7}) as short:
        text = short.post(COMPLETE, {"prompt": "the", "ignore_eos": True})
        assert text.json()["usage"]["completion_tokens"] == 7, "OpenAI's 16 is not what the client has asked for"
    chat = capped.post(CHAT, {"messages": USER, "ignore_eos": True}).json()
    assert chat["usage"]["completion_tokens"] == 20, "who does not say how many gets what the server allows"


def test_time_that_is_over_cancels(narrow: Server) -> None:
    narrow.settled()
    cancelled = 'phasewise_requests_total{how="cancelled"}'
    before = narrow.metrics().get(cancelled, 0)
    body = {**LONG, "max_tokens": 200, "timeout": 0.2}
    error = failure(narrow.post(COMPLETE, body), 408)
    assert (error["param"], error["code"]) == ("timeout", "deadline_exceeded") and "0.2 s" in error["message"]
    client = narrow.client()
    events: list[str] = []
    with pytest.raises(openai.APIError, match=r"its timeout of 0\.3 s"):
        for chunk in client.completions.create(
            model="tiny", prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True, "timeout": 0.3}
        ):
            events.append(chunk.choices[0].text)
    after = narrow.settled()
    assert after[cancelled] == before + 2
    assert narrow.post(COMPLETE, {**LONG, "max_tokens": 4, "timeout": 100}).status_code == 200


def test_the_time_of_one_is_not_that_of_others(server: Server, llm: LLM) -> None:
    stream = server.client().completions.create(
        model="tiny", prompt="the fox", temperature=0, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream)).choices[0].text
    for _ in range(5):
        failure(server.post(COMPLETE, {**LONG, "timeout": 0.02, "n": 2}), 408)
    text = first + "".join(chunk.choices[0].text for chunk in stream)
    assert text == llm.generate("the fox", Params(max_tokens=400, ignore_eos=True))[0].text
    server.settled()


def test_time_that_ends_while_waiting(narrow: Server) -> None:
    client = narrow.client()
    busy = [client.completions.create(model="tiny", prompt="the", max_tokens=100, stream=True,
                                      extra_body={"ignore_eos": True}) for _ in range(2)]  # fmt: skip
    error = failure(narrow.post(COMPLETE, {**LONG, "max_tokens": 5, "timeout": 0.05}), 408)
    assert error["code"] == "deadline_exceeded"
    for stream in busy:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    narrow.settled()


# ---- paths of the machine
def test_a_model_from_a_path_goes_by_its_last_part(capped: Server) -> None:
    (card,) = capped.client().models.list().data
    place = capped.model
    assert card.id == Path(place).name
    assert f"serves {card.id} at" in capped.banner and place not in capped.banner + capped.curl
    assert capped.post(COMPLETE, {"model": card.id, "prompt": "the"}).status_code == 200
    paths = "/health", "/metrics", "/v1/models", f"/v1/models/{card.id}", "/v1/models/x", "/openapi.json", "/x"
    answers = [httpx.get(f"{capped.url}{path}", timeout=PATIENCE) for path in paths]
    answers += [capped.post(COMPLETE, body) for body in
                ({"model": place, "prompt": "the"}, {"prompt": [10**6]}, {"prompt": 5}, {"prompt": "the"})]  # fmt: skip
    answers.append(capped.post(CHAT, {"messages": [{"role": "stranger", "content": "the"}]}))
    for answer in answers:
        text = answer.text.replace(json.dumps(f"there is no model {place!r}")[1:-1], "")  # what the client has said
        assert str(Path(place).parent) + "/" not in text and "site-packages" not in text, text


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert public_name(str(tmp_path / "mine.gguf")) == public_name("./mine.gguf") == "mine.gguf"
    assert public_name(".") == public_name(f"{tmp_path}/") == tmp_path.name
    assert public_name("smollm2") == "smollm2" and public_name("org/name") == "org/name"
    assert public_name("/") == "model"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("cannot open /home/x/models/a.safetensors: no such file", "cannot open ...: no such file"),
        ("File '/usr/lib/python3.11/json/a.py', line 5", "File '...', line 5"),
        ("~/models/x is gone", "... is gone"),
        ("5/7 of the rows and/or a ratio of 1/2/3; see https://example.org/a/b", None),
    ],
)
def test_reasons_of_failures_name_no_place(reason: str, said: str | None) -> None:
    assert without_paths(reason) == (said or reason)
    assert error_body(ApiError(500, reason))["error"]["message"] == (said or reason)
    assert error_body(ApiError(400, reason))["error"]["message"] == reason, "these are written for clients"
