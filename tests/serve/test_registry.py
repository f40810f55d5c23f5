"""`serve --models`: loaded when asked for, unloaded when memory is short or nobody asks, and never anybody's loss."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI

from phasewise.cli.options import DEFAULTS
from phasewise.cli.served_models import SharedOptions, entries
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import weight_bytes
from phasewise.model.model import Model
from phasewise.request.params import SLO
from phasewise.serve.guard.keys import new_key
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.registry.app import create_app
from phasewise.serve.registry.front import POSTS
from phasewise.serve.registry.registry import ModelRegistry
from phasewise.serve.registry.slot import ModelEntry
from phasewise.serve.responses.endpoint import Stored
from phasewise.serve.service import Service
from tests import peft
from tests.serve.many import KV, ManyServer
from tests.serve.running import PATIENCE
from tests.serve.tiny_chat import chat_checkpoint

HELLO = {"max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyServer]:
    """Two models fit at a time."""
    gate = tmp_path_factory.mktemp("gate")
    with ManyServer(gate, "one", "two", "three", "bad", limit=2.5) as running:
        yield running


def text(server: ManyServer, model: str) -> str:
    answer = server.client().chat.completions.create(model=model, **HELLO)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def test_models_come_when_named_and_the_least_recently_used_goes(server: ManyServer, llm: LLM) -> None:
    wanted = llm.chat(HELLO["messages"], max_tokens=4).text  # type: ignore[arg-type]
    assert [text(server, name) for name in ("one", "two", "one", "three")] == [wanted] * 4
    states, cards = server.states(), server.cards()
    assert (states["one"], states["two"], states["three"]) == ("ready", "unloaded", "ready")
    weights = weight_bytes(str(chat_checkpoint()), None)
    assert cards["one"]["bytes"] == weights + KV and cards["two"]["bytes"] == 0
    now = server.metrics()
    assert now['phasewise_model_loads_total{model="one"}'] == 1
    assert now['phasewise_model_evictions_total{model="two",why="memory"}'] == 1
    assert now['phasewise_model_bytes{model="one"}'] == weights + KV
    assert now['phasewise_requests_accepted_total{model="one"}'] == 2
    assert now['phasewise_model_load_seconds_total{model="three"}'] > 0


def test_a_load_that_fails_is_said_and_leaves_the_others_alone(server: ManyServer) -> None:
    for stream in (False, True):
        refused = server.post("/v1/chat/completions", {**HELLO, "model": "bad", "stream": stream})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_load_failed"
        assert refused.json()["error"]["message"].endswith("is broken")
        assert str(chat_checkpoint()) not in refused.text and refused.headers["retry-after"]
    assert server.metrics()['phasewise_model_load_failures_total{model="bad"}'] == 1, "it is not tried at once again"
    assert "broken" in server.cards()["bad"]["failure"]
    assert text(server, "one")
    with pytest.raises(openai.NotFoundError, match="there is no model 'onee'"):
        text(server, "onee")
    wrong = server.post("/v1/chat/completions", "no json")
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "invalid_json"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyServer]:
    """Requests that are no streams wait for a load for a moment only."""
    with ManyServer(
        tmp_path_factory.mktemp("gate"), "one", "slow1", "slow2", wait=0.2, one={"pinned": True}
    ) as running:
        eventually(lambda: running.states()["one"] == "ready")
        yield running


def test_a_load_under_way_answers_with_its_progress(slow: ManyServer) -> None:
    told: list[str] = []
    request = {**HELLO, "model": "slow1", "stream": True}

    def listen() -> None:
        with slow._http.stream("POST", f"{slow.url}/v1/chat/completions", content=json.dumps(request)) as answer:
            told.extend(answer.iter_lines())

    listener = threading.Thread(target=listen)
    listener.start()
    eventually(lambda: slow.cards()["slow1"].get("loaded") == 0.25)
    refused = slow.post("/v1/chat/completions", {**HELLO, "model": "slow1"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_loading"
    assert "25% of its weights" in refused.text and refused.headers["x-model-loaded"] == "0.25"
    assert int(refused.headers["retry-after"]) >= 1
    assert text(slow, "one"), "others are served meanwhile"
    time.sleep(1.5)  # a stream begins after a second
    slow.open("slow1")
    listener.join(PATIENCE)
    assert any(line.startswith(": loading slow1: 25%") for line in told)
    events = [line for line in told if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" and '"content"' in events[0]
    assert slow.states()["slow1"] == "ready"


def test_a_wrong_request_that_waited_in_a_stream_is_told_in_it(slow: ManyServer) -> None:
    body = {**HELLO, "model": "slow2", "stream": True, "temperature": -1}
    with slow._http.stream("POST", f"{slow.url}/v1/chat/completions", content=json.dumps(body)) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and next(lines).startswith(": loading slow2")
        slow.open("slow2")
        events = [line for line in lines if line.startswith("data: ")]
    assert json.loads(events[0].removeprefix("data: "))["error"]["param"] == "temperature"
    assert events[1:] == ["data: [DONE]"]


def test_a_model_with_requests_is_not_unloaded(tmp_path: Path) -> None:
    with ManyServer(tmp_path, "one", "two", limit=1.5, wait=0.3, one={"preload": True}) as server:
        eventually(lambda: server.states()["one"] == "ready")
        long = {"model": "one", "max_tokens": 600, "stream": True, "prompt": "the", "ignore_eos": True}
        with server._http.stream("POST", f"{server.url}/v1/completions", content=json.dumps(long)) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = server.post("/v1/chat/completions", {**HELLO, "model": "two"})
            assert refused.status_code == 503 and "waiting for memory" in refused.text
            assert server.states()["one"] == "ready"
            assert sum(line.startswith("data: ") for line in lines) > 300
        eventually(lambda: server.states() == {"one": "unloaded", "two": "ready"})  # the load went on


@pytest.mark.thorough  # a server of its own
def test_pinned_models_stay_and_idle_ones_go(tmp_path: Path) -> None:
    options = {"one": {"pinned": True}, "two": {"preload": True, "idle_after": 0.3}}
    with ManyServer(tmp_path, "one", "two", "three", limit=2.5, **options) as server:  # type: ignore[arg-type]
        eventually(lambda: server.states() == {"one": "ready", "two": "unloaded", "three": "unloaded"})
        assert server.metrics()['phasewise_model_evictions_total{model="two",why="idle"}'] == 1
        text(server, "three")
        text(server, "two")
        assert server.states() == {"one": "ready", "two": "ready", "three": "unloaded"}, "three was in the way, not one"


def test_pinned_models_that_do_not_fit_are_refused_at_the_start(llm: LLM) -> None:
    def entry(name: str, pinned: bool) -> ModelEntry:
        return ModelEntry(name, lambda: llm, lambda: 1, 100, pinned=pinned)

    every = [entry("one", True), entry("two", False)]
    ModelRegistry(every, 200, FastAPI, Stored(1))
    with pytest.raises(UserError, match="'two' does not fit: KV budgets of 200 bytes"):
        ModelRegistry(every, 199, FastAPI, Stored(1))


@pytest.mark.thorough  # a server of its own
def test_a_key_sees_and_loads_its_own_models_alone(tmp_path: Path) -> None:
    secret, digest = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nsha256 = "{digest}"\nmodels = ["one"]\n')
    with ManyServer(tmp_path, "one", "two", keys=keys, secret=secret) as server:
        assert list(server.states()) == ["one"] and text(server, "one")
        refused = server.post("/v1/chat/completions", {**HELLO, "model": "two"})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"


def test_its_paths_are_those_of_one_model(llm: LLM) -> None:
    service = Service(llm, "tiny", ServePolicy())
    assert {path: kind for path, _, kind in service.posts} == dict(POSTS)


def test_what_is_unloaded_is_gone() -> None:
    """Two models take turns where one fits: nobody holds the weights of the one that made way."""
    weights: list[weakref.ref[Model]] = []

    def load() -> LLM:
        llm = LLM(str(chat_checkpoint()), limits=Limits(kv_bytes=KV), draft="paced")
        weights.append(weakref.ref(llm.model))
        return llm

    async def asked() -> None:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://here", timeout=PATIENCE) as client,
        ):
            for name in ("one", "two", "one"):
                body = {"model": name, "prompt": "the", "max_tokens": 2}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                assert (await client.get("/tokenizer_info", params={"model": name})).json()["chat_template"]
            assert [model() is not None for model in weights] == [False, False, True]
            slot = app.state.service.registry.slots["one"]
            slot.service.engine.failed = "the step broke"
            assert (await client.post("/v1/completions", json=body)).status_code == 200, "it is loaded again"
            assert slot.evictions["failed"] == 1 and slot.loads == 3

    entries = [ModelEntry(name, load, lambda: 1, KV) for name in ("one", "two")]
    app = create_app(entries, KV + 1, 30.0)
    asyncio.run(asked())


# ---- files and folders of models
def common() -> SharedOptions:
    return SharedOptions(DEFAULTS, {}, ServePolicy(sleep_after=9.0), SLO(), 2, 8)


def test_a_file_names_adapters_too(tmp_path: Path) -> None:
    """They are models of their own, which load the one that they belong to."""
    model = chat_checkpoint()
    folder = peft.write(tmp_path / "adapters" / "sql", model, seed=3)
    file = tmp_path / "models.toml"
    file.write_text(
        f'plain = "{model}"\n[tuned]\nmodel = "{model}"\nkv-bytes = "4M"\nkv-host = "1M"\ndraft = "none"\n'
        '[tuned.recipes.long]\nevict = "streaming"\n[tuned.loras]\nsql = "adapters/sql"\n'
    )
    found = entries(file, common())
    assert found[1].names == ["tuned", "tuned@long", "sql", "sql@long"] and found[1].kv_bytes == 5 << 20
    alone = LLM(str(model), loras={"sql": str(folder)}, limits=Limits(kv_bytes=1 << 22))
    body = {"prompt": "the", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    wanted = {lora: alone.generate("the", max_tokens=12, ignore_eos=True, lora=lora)[0].text for lora in ("sql", "")}
    assert wanted["sql"] != wanted[""], "the adapter changes nothing"

    async def asked() -> None:
        app = create_app(found, 1 << 40, 30.0)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=PATIENCE)
        async with app.router.lifespan_context(app), http as client:
            cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
            assert {name for name, card in cards.items() if card["parent"] == "tuned"} == {"sql", "sql@long"}
            said = {}
            for name in ("sql", "tuned"):
                answer = await client.post("/v1/completions", json={**body, "model": name})
                said[name] = answer.json()["choices"][0]["text"]
            assert said == {"sql": wanted["sql"], "tuned": wanted[""]}
            slots = app.state.service.registry.slots
            assert (slots["tuned"].loads, slots["plain"].loads) == (1, 0)
            assert slots["tuned"].bytes == slots["tuned"].entry.weigh() + (5 << 20)

    asyncio.run(asked())


def test_models_share_no_name_and_no_folder_of_blocks(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    file, two = tmp_path / "models.toml", '[a]\nmodel = "pocket"\n{}\n[b]\nmodel = "pocket"\n{}\n'
    for name in ("a", "b"):
        file.write_text(two.format("", f'loras = {{{name} = "sql"}}'))
        with pytest.raises(UserError, match=f"'{name}' is said twice"):
            create_app(entries(file, common()), 1 << 40, 1.0)
    option = f'kv-disk = "{tmp_path}/blocks:1G"'
    file.write_text(two.format(option, option))
    with pytest.raises(UserError, match="'a' and 'b' have the same --kv-disk.*file of models"):
        create_app(entries(file, common()), 1 << 40, 1.0)


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_a_file_names_models_with_options_of_their_own(tmp_path: Path, kind: str) -> None:
    (tmp_path / "here").mkdir()
    said = {
        "toml": 'plain = "pocket"\n[tuned]\nmodel = "here"\nkv-bytes = "64M"\npinned = true\nsleep-after = 5\n'
        '[tuned.recipes.fast]\ndraft = "prompt_lookup:k=6"\n',
        "yaml": "plain: pocket\ntuned:\n  model: here\n  kv-bytes: 64M\n  pinned: true\n  sleep-after: 5\n"
        "  recipes:\n    fast:\n      draft: prompt_lookup:k=6\n",
        "json": '{"plain": "pocket", "tuned": {"model": "here", "kv-bytes": "64M", "pinned": true, "sleep-after": 5, '
        '"recipes": {"fast": {"draft": "prompt_lookup:k=6"}}}}',
    }
    file = tmp_path / f"models.{kind}"
    file.write_text(said[kind])
    plain, tuned = entries(file, common())
    assert (plain.name, plain.pinned, plain.idle_after) == ("plain", False, 9.0)
    assert tuned.names == ["tuned", "tuned@fast"] and tuned.pinned
    assert (tuned.kv_bytes, tuned.idle_after) == (64 << 20, 5)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('[a]\nmodel = "pocket"\nkv-byte = "1G"', "unknown option 'kv-byte'.*Did you mean kv-bytes"),
        ('[a]\nmodel = "pocket"\npinned = "yes"', "pinned = 'yes' is not a value"),
        ('[a]\nmodel = "pocket"\nsleep-after = 0', "more than 0 seconds"),
        ('[a]\nmodel = "pocket"\nevict = "snapkvv"', "snapkv"),
        ('[a]\ndtype = "bfloat16"', "must be a path or a table with model"),
        ('["a@b"]\nmodel = "pocket"', "no name for a model"),
        ('[a]\nmodel = "pocket"\nloras = {x = 3}', "adapter 'x' must be the path"),
        ('[a]\nmodel = "pocket"\nloras = {x = "nowhere"}', "no folder nowhere"),
        ('[a]\nmodel = "pocket"\nloras = {"x@y" = "."}', "adapter 'x@y' is no name"),
        ('[a]\nmodel = "pocket"\nloras = {x = ".", y = ".", z = "."}', "3 adapters are more than --max-loras 2"),
        ("", "names no models"),
        ("[a", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, said: str, reason: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(said)
    with pytest.raises(UserError, match=reason) as raised:
        entries(file, common())
    assert "models.toml" in str(raised.value)


def test_a_folder_holds_models(tmp_path: Path) -> None:
    for name in ("b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "mmproj-b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name, file in (("a", "config.json"), ("d", "x.gguf"), ("e", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert sorted(entry.name for entry in entries(tmp_path, common())) == ["a", "b", "c", "d"]
    with pytest.raises(UserError, match="holds no model"):
        entries(tmp_path / "e", common())
