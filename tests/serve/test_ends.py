"""How a server begins and ends: signals, ports, models, broken requests and a broken engine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest

from tests.forked import Forked
from tests.serve.running import PATIENCE, Server, launch
from tests.serve.test_abuse import ABUSE

LONG: dict[str, Any] = {"model": "tiny", "prompt": "the", "extra_body": {"ignore_eos": True}}


def refusal(process: Forked) -> str:
    """What a server that cannot start says; it must be one line, with exit code 2."""
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def test_a_port_in_use_and_a_model_that_is_none(tmp_path: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        both = [
            launch("serve", "--model", "no/such-model-is-looked-for", "--port", str(port)),
            launch("serve", "--model", str(tmp_path), "--port", "0"),
        ]
        assert str(port) in refusal(both[0])
    assert str(tmp_path) in refusal(both[1])


def wait_until_closed(server: Server) -> None:
    """Until a signal has been heard: nothing new is accepted."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            httpx.get(f"{server.url}/health", timeout=5, verify=False)
        except httpx.TransportError:
            return
        time.sleep(0.01)
    pytest.fail("the server goes on accepting requests")


def test_the_printed_request_and_a_second_signal_that_cancels_at_once() -> None:
    with Server(faults={"pause": 0.01, "patience": 1000}) as server:
        done = subprocess.run(["bash", "-c", server.curl], capture_output=True, text=True, timeout=PATIENCE)
        if "command not found" not in done.stderr:
            assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        stream = server.client().completions.create(**LONG, max_tokens=2000, stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGINT)
        wait_until_closed(server)  # two signals at once would be one
        code, errors = server.end(signal.SIGINT)
        assert (code, errors) == (0, "")
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)  # with that much patience, only the second signal can have cancelled it


def test_sigterm_lets_short_requests_finish_and_cancels_long_ones() -> None:
    with Server(faults={"pause": 0.005, "patience": 1.0}) as server:
        client = server.client()
        short = client.completions.create(**LONG, max_tokens=40, stream=True)
        long = client.completions.create(**LONG, max_tokens=2000, stream=True)
        next(iter(short)), next(iter(long))
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(ABUSE["half a body"])
        assert server.health().status_code == 200  # what came before this has been accepted, and is being read
        server.process.send_signal(signal.SIGTERM)
        wait_until_closed(server)
        assert half.recv(4096).startswith(b"HTTP/1.1 503")
        half.close()
        assert [chunk.choices[0].finish_reason for chunk in short][-1] == "length"
        with pytest.raises(openai.APIError, match="shutting down"):
            list(long)
        server.process.wait(timeout=PATIENCE)
        assert (server.process.returncode, server.errors()) == (0, "")


def test_a_request_that_cannot_be_computed_fails_alone() -> None:
    with Server(faults={"poison": 100, "pause": 0.002, "break_at": 200}) as server:
        client = server.client()
        good = client.completions.create(**LONG, max_tokens=60, stream=True, temperature=0)
        first = next(iter(good)).choices[0].text
        with pytest.raises(openai.InternalServerError, match="poison"):
            client.completions.create(model="tiny", prompt=[5, 100, 6], max_tokens=3)
        with pytest.raises(openai.APIError, match="poison"):
            list(client.completions.create(model="tiny", prompt=[5, 100], max_tokens=3, stream=True, n=2))
        assert server.health().status_code == 200
        text = first + "".join(chunk.choices[0].text for chunk in good)
        body: dict[str, Any] = {**LONG, "max_tokens": 60, "temperature": 0}
        assert client.completions.create(**body).choices[0].text == text
        server.settled()
        engine_breaks(server, client)


def engine_breaks(server: Server, client: openai.OpenAI) -> None:
    """At its 200th step: those under way fail, the server says so, takes nothing new, and still ends well."""
    stream = client.completions.create(**LONG, max_tokens=1500, stream=True, temperature=0)  # draws might be poison
    with pytest.raises(openai.APIError, match="broken on purpose"):
        list(stream)
    health = server.health()
    assert health.status_code == 503
    assert "broken on purpose" in health.json()["reason"]
    for body in ({"prompt": "the"}, {"prompt": "the", "stream": True}):
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 503 and "broken on purpose" in refused.json()["error"]["message"]
    assert server.metrics()['phasewise_requests_total{how="failed"}'] >= 3
    code, errors = server.end(signal.SIGTERM)
    assert code == 0 and "the engine has failed" in errors
