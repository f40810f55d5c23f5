"""API keys over HTTP: who is let in, to which models, for how much, and what a file may say."""

from __future__ import annotations

import hashlib
import hmac
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.serve.completions.answer import GenerationRequest
from phasewise.serve.failures import ApiError
from phasewise.serve.guard import keys
from phasewise.serve.guard.context import RequestContext
from phasewise.serve.guard.keys import KeyRing, credentials, new_key, read
from phasewise.serve.guard.quota import Quota
from tests.serve.running import PATIENCE, Server, launch
from tests.serve.test_errors import COMPLETE, failure
from tests.serve.tiny_chat import chat_checkpoint

SECRETS = {name: f"pw-{name}" for name in ("root", "small", "busy", "thrifty", "fast", "second")}
THE: dict[str, Any] = {"prompt": "the", "max_tokens": 4, "ignore_eos": True}


def table(name: str, **fields: Any) -> str:
    """A key's table, as TOML."""
    digest = hashlib.sha256(SECRETS.get(name, name).encode()).hexdigest()
    said = "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())
    return f"[keys.{name}]\nsha256 = '{digest}'\n{said}\n"


FILE = "".join((
    table("root", metrics=True, priority=7), table("small", max_tokens=5),
    table("busy", concurrent=1, requests_per_minute=10_000), table("thrifty", tokens_per_minute=40),
    table("fast", models=["tiny@fast"]), table("second", requests_per_minute=1),
))  # fmt: skip


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def guarded(ring: Path) -> Iterator[Server]:
    recipes = {"fast": {"draft": "prompt_lookup"}}
    with Server(keys=str(ring), recipes=recipes, secret=SECRETS["root"], faults={"pause": 0.003}) as running:
        yield running


def as_(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS.get(name, name)}"}


def test_who_has_no_key_is_not_let_in(guarded: Server) -> None:
    many = httpx.Headers([("Authorization", "Bearer pw-root"), ("Authorization", "Bearer pw-small")])
    for headers in ({}, as_("wrong"), {"Authorization": "Basic cHctcm9vdA=="}, {"x-api-key": "pw-roo"}, many,
                    {"Authorization": b"Bearer \xff\xfe"}, {**as_("root"), "x-api-key": "pw-small"}):  # fmt: skip
        for path in (COMPLETE, "/v1/nothing"):
            response = guarded.post(path, "not even JSON", headers=headers)
            assert failure(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/health/x", "//health"):
        assert httpx.get(f"{guarded.url}{path}", timeout=PATIENCE).status_code == 401
    assert httpx.get(f"{guarded.url}/health", timeout=PATIENCE).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="wrong").models.list()


def test_a_key_is_sent_either_way(guarded: Server) -> None:
    for headers in (as_("root"), {"x-api-key": "pw-root"}, {"authorization": "bEaReR  pw-root"},
                    {**as_("root"), "x-api-key": "pw-root"}):  # fmt: skip
        response = guarded.post(COMPLETE, THE, headers=headers)
        assert response.status_code == 200
        assert not [name for name in response.headers if "ratelimit" in name], "it has no limits"


def test_a_large_body_without_a_key_is_answered(guarded: Server) -> None:
    assert guarded.post(COMPLETE, b'{"prompt": "' + b"a" * (9 << 20) + b'"}', headers={}).status_code == 401


def test_metrics_are_for_keys_that_may(guarded: Server) -> None:
    error = failure(httpx.get(f"{guarded.url}/metrics", headers=as_("small"), timeout=PATIENCE), 403)
    assert error["code"] == "metrics_not_allowed"
    before = guarded.settled()
    guarded.post(COMPLETE, THE)
    after = guarded.settled()
    for name, more in (('requests_total{key="root"}', 1), ('tokens_total{key="root",kind="prompt"}', 1),
                       ('tokens_total{key="root",kind="output"}', 4)):  # fmt: skip
        assert after[f"phasewise_key_{name}"] == before[f"phasewise_key_{name}"] + more


def test_models_of_a_key(guarded: Server) -> None:
    assert guarded.post(COMPLETE, {**THE, "model": "tiny@fast"}, headers=as_("fast")).status_code == 200
    for name in ({"model": "tiny"}, {}):
        error = failure(guarded.post(COMPLETE, {**THE, **name}, headers=as_("fast")), 403)
        assert error["code"] == "model_not_allowed" and "tiny@fast" in error["message"]
    assert [model.id for model in guarded.client(api_key=SECRETS["fast"]).models.list()] == ["tiny@fast"]
    assert {model.id for model in guarded.client().models.list()} == {"tiny", "tiny@fast"}
    for name, status in (("tiny", 403), ("tiny@fast", 200), ("other", 404)):
        got = httpx.get(f"{guarded.url}/v1/models/{name}", headers=as_("fast"), timeout=PATIENCE)
        assert got.status_code == status


def test_the_longest_answer_of_a_key(guarded: Server) -> None:
    error = failure(guarded.post(COMPLETE, {**THE, "max_tokens": 6}, headers=as_("small")), 400)
    assert (error["param"], error["code"]) == ("max_tokens", "limit_exceeded")
    messages = [{"role": "user", "content": "the"}]
    free = guarded.post("/v1/chat/completions", {"messages": messages, "ignore_eos": True}, headers=as_("small"))
    assert free.json()["usage"]["completion_tokens"] == 5, "who does not say how many gets what the key allows"


def test_requests_per_minute_and_when_to_try_again(guarded: Server) -> None:
    for _ in range(100):  # at most one per minute is let in
        response = guarded.post(COMPLETE, THE, headers=as_("second"))
        if response.status_code != 200:
            break
        assert response.headers["x-ratelimit-limit-requests"] == "1"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert failure(response, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert 0 < float(response.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    with pytest.raises(openai.RateLimitError):
        guarded.client(api_key=SECRETS["second"]).completions.create(model="tiny", prompt="the")
    assert guarded.client(api_key=SECRETS["second"]).models.list(), "what costs nothing is not counted"


def test_tokens_per_minute_are_settled_by_what_was_used(guarded: Server) -> None:
    error = failure(guarded.post(COMPLETE, {**THE, "max_tokens": 16, "n": 3}, headers=as_("thrifty")), 400)
    assert error["code"] == "request_too_large"
    stopped = {"prompt": "the", "max_tokens": 30, "stop_token_ids": list(range(320))}  # ends at its first token
    for _ in range(3):  # which would not fit if each took what was reserved for it
        response = guarded.post(COMPLETE, stopped, headers=as_("thrifty"))
        assert response.json()["usage"]["total_tokens"] == 2
    for _ in range(100):
        response = guarded.post(COMPLETE, {**THE, "max_tokens": 30}, headers=as_("thrifty"))
        if response.status_code != 200:
            break
        assert response.headers["x-ratelimit-limit-tokens"] == "40"
    assert "40 tokens per minute; 31 are asked for" in failure(response, 429)["message"]
    assert guarded.settled()['phasewise_key_refused_total{key="thrifty",limit="tokens"}'] >= 1


def test_requests_at_once_and_who_leaves_early(guarded: Server) -> None:
    long = {"model": "tiny", "prompt": "the", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    client = guarded.client(api_key=SECRETS["busy"])
    with client.completions.create(**long, stream=True) as stream:
        next(iter(stream))
        error = failure(guarded.post(COMPLETE, THE, headers=as_("busy")), 429)
        assert "1 requests under way" in error["message"]
        assert guarded.post(COMPLETE, THE).status_code == 200, "others have limits of their own"
    deadline = time.monotonic() + PATIENCE
    while guarded.post(COMPLETE, THE, headers=as_("busy")).status_code != 200:
        assert time.monotonic() < deadline, "who has left still counts"
        time.sleep(0.02)
    guarded.settled()
    assert guarded.metrics()['phasewise_key_requests_running{key="busy"}'] == 0
    before = guarded.metrics()
    for broken in (b"{", {"prompt": 5}, {"prompt": [[5], [99999]]}, {"prompt": [5] * 5000, "n": 128}):
        assert guarded.post(COMPLETE, broken, headers=as_("busy")).status_code == 400  # these do not stay either
    after = guarded.metrics()
    assert after['phasewise_key_requests_running{key="busy"}'] == 0
    name = 'phasewise_key_tokens_total{key="busy",kind="prompt"}'
    assert after[name] == before[name], "what was not computed costs nothing"


def test_who_leaves_before_the_answer_pays_for_what_was_computed(guarded: Server) -> None:
    name = 'phasewise_key_tokens_total{key="busy",kind="output"}'
    before, emitted = guarded.settled()[name], guarded.metrics()["phasewise_emitted_total"]
    with pytest.raises(httpx.ReadTimeout):
        guarded.post(COMPLETE, {**THE, "max_tokens": 2000}, headers=as_("busy"), timeout=0.5)
    after = guarded.settled()
    assert after[name] - before == after["phasewise_emitted_total"] - emitted > 0


def test_keys_are_read_again_while_streams_go_on(guarded: Server, ring: Path) -> None:
    def answers(name: str, status: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while guarded.post(COMPLETE, THE, headers=as_(name)).status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with guarded.client().completions.create(
        model="tiny", prompt="the", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        ring.write_text(FILE + table("new"))
        guarded.process.send_signal(signal.SIGHUP)
        answers("new", 200)
        ring.write_text(FILE.replace("[keys.root]", "[keys.root"))
        guarded.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE
        while "the keys stay as they were" not in guarded.errors():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        answers("new", 200)
        ring.write_text(FILE)
        guarded.process.send_signal(signal.SIGHUP)
        answers("new", 401)
        assert "".join(chunk.choices[0].text for chunk in stream)
    said = guarded.errors()
    assert not any(secret in said for secret in SECRETS.values())


def test_without_keys_a_hangup_ends_nothing(server: Server) -> None:
    server.process.send_signal(signal.SIGHUP)
    assert server.post(COMPLETE, THE).status_code == 200 and server.errors() == ""


def test_listening_to_all_without_keys_is_said_aloud(tmp_path: Path) -> None:
    with Server(host="0.0.0.0") as running:
        assert running.errors().startswith("warning: other machines can reach this server without a key. --keys FILE")
    path = tmp_path / "keys.toml"
    path.write_text(table("root"))
    with Server(host="0.0.0.0", keys=str(path), open_metrics=True) as running:
        assert running.errors() == ""
        assert running.metrics()["phasewise_requests_running"] == 0
        assert running.post(COMPLETE, THE).status_code == 401


# ---- the file
def test_every_hash_is_compared_in_constant_time(ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring.write_text(FILE)
    seen: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    ringed = KeyRing(ring, ["tiny", "tiny@fast"])
    for secret in ("pw-root", "pw-second", "nobody"):
        seen.clear()
        try:
            ringed.find([(b"x-api-key", secret.encode())])
        except ApiError:
            assert secret == "nobody"
        assert len(seen) == len(SECRETS) and all(len(a) == len(b) == 32 for a, b in seen)
    assert hmac.compare_digest is keys.hmac.compare_digest


def test_a_new_key_is_random_and_its_hash_its_own() -> None:
    made = [new_key() for _ in range(50)]
    assert len({secret for secret, _ in made}) == 50
    assert all(hashlib.sha256(s.encode()).hexdigest() == d and len(s) == 46 and s[:3] == "pw-" for s, d in made)


def test_credentials() -> None:
    found = credentials(
        [(b"authorization", b"Bearer a"), (b"x-api-key", b" a "), (b"cookie", b"b"), (b"x-api-key", b"")]
    )
    assert found == {b"a"}


def test_the_priority_of_a_key_and_of_its_requests(ring: Path) -> None:
    quotas = {name: Quota(key, time.monotonic) for key in read(ring) for name in [key.name]}
    order = GenerationRequest([[1, 2]], Params(max_tokens=4, priority=3))
    for name, priority in (("root", 10), ("small", 3)):
        exchange = RequestContext(lambda ended: None, quota=quotas[name])
        assert exchange.within(order, 4, "prompt").params.priority == priority


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys", "not TOML"),
        ("", "tables"),
        ("keys = 5", "tables"),
        ("[keys]\nalice = 5", "tables"),
        ("[keys]\n[others]", "tables"),
        ("[keys.alice]", "'alice': sha256"),
        ("[keys.alice]\nsha256 = 'abc'", "64 digits"),
        ("[keys.alice]\nsha256 = []", "64 digits"),
        (table("alice") + "rpm = 5", "unknown field 'rpm'"),
        (table("alice", concurrent=0), "concurrent = 0 is not a positive"),
        (table("alice", concurrent=True), "concurrent = True is not"),
        (table("alice", max_tokens=1.5), "max_tokens = 1.5"),
        (table("alice", models="tiny"), "models must be a list"),
        (table("alice", models=["tine"]), "no model 'tine' here. Did you mean tiny?"),
        (table("alice", metrics=1), "metrics must be"),
        (table("alice", priority=0.5), "priority = 0.5 is not a whole number from -1000 to 1000"),
        (table("alice", priority=-1001), "priority = -1001 is not"),
        (table("alice", timeout=0), "timeout = 0 is not a positive number of seconds"),
        (table("alice") + "timeout = inf", "timeout = inf"),
        (table("alice").replace("alice", '"a\\nb"'), "is no name"),
        (table("root") + table("root").replace("[keys.root]", "[keys.other]"), "'root' and 'other' have the same"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read(path, ["tiny"])
    assert str(error.value).startswith(str(path)) and said in str(error.value)


def test_a_server_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    broken, wrong = tmp_path / "broken.toml", tmp_path / "wrong.toml"
    broken.write_text("[keys.alice]")
    wrong.write_text(table("alice", models=["tiny"]))
    words = ("serve", "--port", "0", "--model")
    started = [
        launch(*words, "no/such", "--keys", str(broken)),
        launch(*words, str(chat_checkpoint()), "--keys", str(wrong)),
    ]
    for process, said in zip(started, ("sha256 must be", "there is no model 'tiny'")):
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and errors.startswith("error: ") and said in errors, errors
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.toml")
