"""GET /events: what the engine does and what becomes of requests, told only while somebody listens."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx

from phasewise.serve.watch.events import MOST
from tests.serve.running import PATIENCE, Server

BODY = {"prompt": "the quick brown fox jumps", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
Event = tuple[str, dict[str, Any]]


class Stream:
    """An open stream; `until` reads on, and gives what it has read."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.kind, self.seen = "", []

    def until(self, found: Any) -> list[Event]:
        """The events up to one for which `found(kind, data)` holds."""
        events: list[Event] = []
        for line in self._lines:
            if line.startswith("event: "):
                self.kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((self.kind, json.loads(line.removeprefix("data: "))))
                if found(*events[-1]):
                    return events
        return events


@contextmanager
def listening(server: Server, secret: str | None = None) -> Iterator[Stream]:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with httpx.stream("GET", f"{server.url}/events", headers=headers, timeout=PATIENCE) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = Stream(reply.iter_lines())
        stream.until(lambda kind, data: kind == "step" or data.get("scope") == "own")
        yield stream


def left(kind: str, data: dict[str, Any]) -> bool:
    return kind == "request" and data["what"] == "left"


def lanes(events: list[Event]) -> list[dict[str, Any]]:
    return [lane for kind, data in events if kind == "step" for lane in data["lanes"]]


def test_a_life_and_the_rows_of_its_steps(server: Server) -> None:
    with listening(server) as stream:
        reply = server.post("/v1/completions", BODY)
        events = stream.until(left)
        events += stream.until(lambda kind, data: kind == "step" and not data["running"])
    lives = [data for kind, data in events if kind == "request"]
    assert [life["what"] for life in lives] == ["queued", "admitted", "first_token", "left"]
    assert {str(life["number"]) for life in lives} == {reply.headers["x-request-numbers"]}
    assert [life["at"] for life in lives] == sorted(life["at"] for life in lives)
    prompt = reply.json()["usage"]["prompt_tokens"]
    assert lives[0]["prompt_tokens"] == prompt and lives[0]["recipe"] == ""
    assert lives[-1] | {"at": 0, "number": 0} == {
        "number": 0, "what": "left", "at": 0, "worker": "engine", "how": "finished", "reason": "length",
        "output_tokens": 12,
    }  # fmt: skip
    assert [life.get("worker") for life in lives] == [None, "engine", "engine", "engine"]
    rows = lanes(events)
    assert {lane["worker"] for lane in rows} == {"engine"}
    assert sum(lane["prefill"] for lane in rows) == prompt - lives[1]["cached_tokens"]
    assert sum(lane["decode"] for lane in rows) == 11
    assert max(data["kv_bytes"] for kind, data in events if kind == "step") > 0


def test_nothing_is_text(server: Server) -> None:
    with listening(server) as stream:
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4}
        server.post("/v1/chat/completions", body, headers={"X-Request-Id": "my-own-words"})
        told = json.dumps(stream.until(left))
    assert "secret" not in told and "my-own-words" not in told


def test_who_comes_late_is_told_of_what_is_under_way(narrow: Server) -> None:
    with listening(narrow) as first:
        asking = threading.Thread(target=narrow.post, args=("/v1/completions", {**BODY, "max_tokens": 200}))
        asking.start()
        first.until(lambda kind, data: data.get("what") == "first_token")
        with httpx.stream("GET", f"{narrow.url}/events", timeout=PATIENCE) as reply:
            events = Stream(reply.iter_lines()).until(lambda kind, data: data.get("what") == "first_token")
        kinds = [kind if kind != "request" else data["what"] for kind, data in events]
        assert kinds == ["hello", "step", "queued", "admitted", "first_token"]
        assert events[0][1] == {"version": 1, "scope": "all", "kv_limit_bytes": 400_000}
        assert events[1][1]["running"] == 1 and events[1][1]["lanes"] == []
        first.until(left)
        asking.join()


def test_preemption_is_told() -> None:
    """Two requests that grow together beyond the memory: one makes way, and goes on later."""
    with Server(limits={"kv_bytes": 110_000}) as server, listening(server) as stream:
        bodies: Queue[int] = Queue()

        def ask(prompt: str) -> None:
            bodies.put(server.post("/v1/completions", {**BODY, "prompt": prompt, "max_tokens": 150}).status_code)

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("the quick", "lazy dogs")]
        for thread in threads:
            thread.start()
        events = stream.until(left) + stream.until(left)
        for thread in threads:
            thread.join()
        assert bodies.get() == bodies.get() == 200
    told = [data["what"] for kind, data in events if kind == "request"]
    assert told.count("preempted") == told.count("resumed") > 0


def test_hand_offs_are_told_and_every_worker_has_a_lane() -> None:
    verbs = {"place": "disaggregated"}
    with Server(verbs=verbs, limits={"cluster": "inline"}) as server, listening(server) as stream:
        server.post("/v1/completions", BODY)
        events = stream.until(left)
    lives = {data["what"]: data.get("worker") for kind, data in events if kind == "request"}
    rows = lanes(events)
    prefills = {lane["worker"] for lane in rows if lane["prefill"]}
    decodes = {lane["worker"] for lane in rows if lane["decode"]}
    assert len(prefills) == len(decodes) == 1 and prefills != decodes
    (first,), (then,) = prefills, decodes
    assert lives == {
        "queued": None, "admitted": first, "first_token": first, "sent": first, "owned": then, "left": then,
    }  # fmt: skip


def test_each_key_sees_its_own_and_who_may_read_metrics_all(tmp_path: Path) -> None:
    secrets = {"alice": "pw-alice", "bob": "pw-bob", "watcher": "pw-watcher"}
    digests = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in secrets.items()}
    tables = [f'[keys.{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items()]
    tables[-1] += "metrics = true\n"
    path = tmp_path / "keys.toml"
    path.write_text("".join(tables))
    with Server(keys=str(path)) as server:
        assert httpx.get(f"{server.url}/events", timeout=PATIENCE).status_code == 401
        with listening(server, "pw-alice") as alice, listening(server, "pw-watcher") as watcher:
            numbers = [
                server.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {secrets[name]}"}).headers[
                    "x-request-numbers"
                ]
                for name in ("bob", "alice")
            ]
            seen = alice.until(left)
            assert {kind for kind, _ in seen} == {"request"} and {str(data["number"]) for _, data in seen} == {
                numbers[1]
            }
            every = watcher.until(left) + watcher.until(left)
            assert {str(data["number"]) for kind, data in every if kind == "request"} == set(numbers)
            assert lanes(every)


def test_who_has_left_holds_no_place(server: Server) -> None:
    for _ in range(MOST + 6):
        with listening(server):
            pass


def test_who_only_listens_does_not_wake_the_model() -> None:
    with Server(sleep_after=0.05) as server:
        deadline = time.monotonic() + PATIENCE
        while not server.health().json().get("asleep"):
            assert time.monotonic() < deadline
        with listening(server) as stream:
            assert server.health().json()["asleep"]
            server.post("/v1/completions", BODY)
            assert lanes(stream.until(left))


def test_streams_end_with_the_server() -> None:
    with Server() as server, listening(server) as stream:
        server.process.send_signal(signal.SIGTERM)
        assert not any(kind == "request" for kind, _ in stream.until(lambda kind, data: False))
        assert server.process.wait(PATIENCE) == 0
        assert server.errors() == ""
