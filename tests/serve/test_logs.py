"""A line per request, and nothing that a client says can make it two."""

from __future__ import annotations

import json
import logging
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from phasewise.serve.watch import logs
from tests.serve.running import PATIENCE, Server, launch
from tests.serve.test_errors import CHAT, COMPLETE
from tests.serve.test_keys import SECRETS, table

SECRET_WORDS = "a prompt that nobody shall read"


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(table("root", metrics=True))
    with Server(keys=str(path), log="json", secret=SECRETS["root"], faults={"pause": 0.003}) as running:
        yield running


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.errors().splitlines()]


def line_of(server: Server, id: str) -> dict[str, Any]:
    """The line of a request, which is written when all of it has ended."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [line for line in lines(server) if line.get("id") == id]
        if found:
            assert len(found) == 1
            return found[0]
        assert time.monotonic() < deadline, f"{id} was not logged"
        time.sleep(0.02)


def test_a_line_per_request(logged: Server) -> None:
    asked = {"model": "tiny", "prompt": SECRET_WORDS, "max_tokens": 5, "ignore_eos": True, "n": 2}
    response = logged.post(COMPLETE, asked)
    line = line_of(logged, response.headers["x-request-id"])
    usage = response.json()["usage"]
    assert (line["key"], line["model"], line["method"], line["path"]) == ("root", "tiny", "POST", COMPLETE)
    assert (line["status"], line["error"], line["ended"]) == (200, None, {"length": 2})
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < line["ttft"] < line["seconds"] < PATIENCE
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) and line["level"] == "info"


def test_what_was_refused_and_what_failed_in_a_stream(logged: Server) -> None:
    for body, status, error in (("{", 400, "invalid_json"), ({"prompt": "the", "model": "x"}, 404, "model_not_found")):
        line = line_of(logged, logged.post(COMPLETE, body).headers["x-request-id"])
        assert (line["status"], line["error"], line["output_tokens"], line["ttft"]) == (status, error, 0, None)
    line = line_of(logged, logged.post(COMPLETE, "{", headers={}).headers["x-request-id"])
    assert (line["status"], line["key"], line["error"]) == (401, None, "invalid_api_key")
    with pytest.raises(openai.APIError):
        list(logged.client().completions.create(
            model="tiny", prompt="the", stream=True, max_tokens=2000, extra_headers={"x-request-id": "late"},
            extra_body={"timeout": 0.2, "ignore_eos": True},
        ))  # fmt: skip
    line = line_of(logged, "late")
    assert (line["status"], line["error"], line["ended"]) == (200, "deadline_exceeded", {"cancelled": 1})


def test_who_leaves_early_is_logged_with_what_it_cost(logged: Server) -> None:
    with logged.client().completions.create(
        model="tiny", prompt="the", stream=True, max_tokens=2000, extra_headers={"x-request-id": "gone"},
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
    line = line_of(logged, "gone")
    assert line["ended"] == {"cancelled": 1} and 0 < line["output_tokens"] < 2000


@pytest.mark.parametrize("id", ["a b", "", "x" * 65, "é", 'a"b', "a\tb"])
def test_ids_that_are_none_are_replaced(logged: Server, id: str) -> None:
    response = httpx.get(f"{logged.url}/health", headers={"x-request-id": id.encode()}, timeout=PATIENCE)
    made = response.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made) and line_of(logged, made)["path"] == "/health"


def test_ids_that_clients_give_come_back(logged: Server) -> None:
    headers = {"x-request-id": "7f3a:web-1.req_9"}
    assert (
        httpx.get(f"{logged.url}/health", headers=headers, timeout=PATIENCE).headers["x-request-id"]
        == "7f3a:web-1.req_9"
    )
    twice = httpx.Headers([("x-request-id", "a"), ("x-request-id", "b")])
    assert httpx.get(f"{logged.url}/health", headers=twice, timeout=PATIENCE).headers["x-request-id"] not in ("a", "b")


def test_no_client_writes_the_log(logged: Server) -> None:
    forged = '\n{"time": "2026", "level": "info", "message": "forged"}'
    for path in (
        f"/v1/models/{quote(forged)}",
        "/%0a%0d%00%1b[31mforged%e2%80%a8",
        "/" + "x" * 9000,
    ):
        assert httpx.get(f"{logged.url}{path}", headers={"x-api-key": "pw-root"}, timeout=PATIENCE).status_code == 404
    logged.post(COMPLETE, {"model": f"tiny{forged}", "prompt": "the"})
    logged.post(CHAT, {"messages": [{"role": f"x{forged}", "content": SECRET_WORDS + forged}]})
    logged.post(COMPLETE, {"prompt": "the"}, headers={"x-api-key": "pw-root", "user-agent": "a\x1b[31m"})
    logged.settled()
    said = logged.errors()
    assert SECRET_WORDS not in said and SECRETS["root"] not in said and "\x1b" not in said
    assert all(line["message"] == "request" and len(line["path"]) <= logs.LONGEST for line in lines(logged))


def formatted(formatter: logging.Formatter, message: str, fields: dict[str, Any], error: bool = False) -> str:
    record = logging.LogRecord("phasewise.x", logging.INFO, "", 0, message, (), None)
    record.fields = fields
    if error:
        try:
            raise ValueError("one\n2026-01-01T00:00:00.000Z info forged")
        except ValueError:
            record.exc_info = sys.exc_info()
    return formatter.format(record)


def test_text_is_one_line_too() -> None:
    hostile = 'a\nb\r\u2028\x1b[31m"c" status=200'
    line = formatted(logs.TextLines(), f"said {hostile}", {"path": f"/x {hostile}", "key": None, "ended": {"stop": 2}})
    assert len(line.splitlines()) == 1 and "\x1b" not in line and line.isascii()
    assert "key" not in line and 'ended={"stop": 2}' in line and '\\" status=200"' in line, "it stays in its quotes"
    assert len(formatted(logs.JsonLines(), hostile, {"path": hostile}).splitlines()) == 1


def test_tracebacks_cannot_be_taken_for_lines() -> None:
    first, *rest = formatted(logs.TextLines(), "it failed", {}, error=True).splitlines()
    assert first.endswith("info it failed") and rest and all(line.startswith("    ") for line in rest)
    line = json.loads(formatted(logs.JsonLines(), "it failed", {}, error=True))
    assert "forged" in line["exception"] and line["message"] == "it failed"


def test_the_engines_trouble_is_json_too(logged: Server) -> None:
    with Server(log="json", faults={"break_at": 3}) as breaking:
        assert breaking.post(COMPLETE, {"prompt": "the", "max_tokens": 9, "ignore_eos": True}).status_code == 500
        breaking.post(COMPLETE, {"prompt": "the"})
        found = [line for line in lines(breaking) if line["level"] == "error"]
    assert len(found) == 1 and "broken on purpose" in found[0]["exception"]


# ---- TLS
Pair = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str) -> tuple[str, str]:
        certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        return certificate, key

    return make


def test_https(pair: Pair) -> None:
    certificate, key = pair("own")
    with Server(tls=[certificate, key]) as running:
        assert running.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=certificate)
        for _ in range(2):
            assert httpx.get(f"{running.url}/health", verify=trusted, timeout=PATIENCE).json()["status"] == "ok"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{running.port}/health", timeout=PATIENCE)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health", timeout=PATIENCE)


def test_files_that_are_no_certificate(pair: Pair, tmp_path: Path) -> None:
    (certificate, _), (_, other) = pair("a"), pair("b")
    words = ("serve", "--port", "0", "--model", "no/such")
    cases = [(certificate, other), (certificate, str(tmp_path / "none.key"))]
    started = [launch(*words, "--tls-cert", one, "--tls-key", two) for one, two in cases]
    for process in [*started, launch(*words, "--tls-cert", certificate), launch(*words, "--log-format", "xml")]:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and errors.count("\n") == 1, errors
        assert errors.startswith(("error: --tls-cert", "error: HTTPS needs both", "error: --log-format xml: there are"))
