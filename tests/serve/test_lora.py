"""Adapters over HTTP: their names are models, and with --lora-dir they come and go while others are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from phasewise.serve.guard.keys import new_key
from phasewise.serve.guard.policy import ServePolicy
from tests import peft
from tests.serve.tiny_chat import chat_checkpoint

ASK: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
PLAIN = ServePolicy()
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters: x, y, and one that is broken."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("x", "y", "broken")):
        peft.write(folder / name, chat_checkpoint(), seed=seed)
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"rubbish")
    return folder


@pytest.fixture(scope="module")
def texts(home: Path) -> dict[str, str]:
    """What each name says in an engine that knows nothing else."""
    found = {"tiny": LLM(str(chat_checkpoint())).generate(ASK["prompt"], max_tokens=12, ignore_eos=True)[0].text}
    for name in "xy":
        llm = LLM(str(chat_checkpoint()), loras={"only": str(home / name)})
        found[name] = llm.generate(ASK["prompt"], lora="only", max_tokens=12, ignore_eos=True)[0].text
    assert len(set(found.values())) == 3
    return found


@asynccontextmanager
async def serving(policy: ServePolicy = PLAIN, **loras: str) -> AsyncIterator[httpx.AsyncClient]:
    recipes = {"fast": {"draft": "prompt_lookup:k=4"}, "shallow": {"skip": "unified:weights=random:0"}}
    llm = LLM(str(chat_checkpoint()), recipes=recipes, loras=loras)
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(0.003)  # so that there is something to do while requests run
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]
    app = create_app(llm, name="tiny", policy=policy)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
    async with app.router.lifespan_context(app), client:
        yield client


def served(work: Callable[[httpx.AsyncClient], Any], policy: ServePolicy = PLAIN, **loras: str) -> None:
    async def run() -> None:
        async with serving(policy, **loras) as client:
            await work(client)

    asyncio.run(run())


async def text(client: httpx.AsyncClient, model: str) -> str:
    answer = await client.post("/v1/completions", json={**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_each_name_has_its_adapter_whoever_shares_the_step(home: Path, texts: dict[str, str]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        cards = {card["id"]: card["parent"] for card in (await client.get("/v1/models")).json()["data"]}
        assert cards == {"tiny": None, "tiny@fast": None, "tiny@shallow": None, "x": "tiny", "x@fast": "tiny",
                         "y": "tiny", "y@fast": "tiny"}  # fmt: skip
        names = ["x", "tiny", "y", "x@fast", "tiny@fast", "y", "x"]
        answers = await asyncio.gather(*(text(client, name) for name in names))
        assert answers == [texts[name.partition("@")[0]] for name in names]
        missing = await client.post("/v1/completions", json={**ASK, "model": "x@shallow"})
        assert missing.status_code == 404 and "both bring low-rank weights" in missing.text
        assert (await client.post("/v1/completions", json={**ASK, "model": "z"})).status_code == 404
        metrics = (await client.get("/metrics")).text
        assert 'phasewise_lora_rank{lora="x"} 4.0' in metrics and "phasewise_lora_bytes 0.0" not in metrics
        assert 'phasewise_requests_total{how="length",recipe="default+x"} 2.0' in metrics
        assert 'phasewise_requests_total{how="length",recipe="fast+x"} 1.0' in metrics
        assert (await client.post(LOAD, json={"lora_name": "z", "lora_path": "y"})).status_code == 404  # not allowed

    served(work, x=str(home / "x"), y=str(home / "y"))


def test_they_come_and_go_and_cost_nobody_anything(home: Path, texts: dict[str, str]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        async def load(name: str, path: str) -> httpx.Response:
            return await client.post(LOAD, json={"lora_name": name, "lora_path": path})

        wrong = {"broken": "safetensors", "nothing": "has no adapter", "x" * 5000: "lora_path"}
        for path, why in {**wrong, **dict.fromkeys(("../x", ".", "/etc", "x\0"), "is not below")}.items():
            refused = await load("z", path)
            assert refused.status_code == 400 and why in refused.text and str(home) not in refused.text, refused.text
        assert (await load("a/b", "x")).status_code == (await load("tiny", "x")).status_code == 400
        assert (await client.post(LOAD, json={"lora_name": "z"})).status_code == 400
        plain = [asyncio.create_task(text(client, "tiny")) for _ in range(3)]
        assert (await load("z", str(home / "x"))).json() == {"status": "loaded", "lora_name": "z", "rank": 4}
        assert (await load("z", "y")).json()["error"]["code"] == "already_loaded"
        assert await text(client, "z") == texts["x"]
        assert [await each for each in plain] == [texts["tiny"]] * 3
        long = client.post("/v1/completions", json={**ASK, "model": "z", "max_tokens": 150})
        going = asyncio.create_task(long)
        while "phasewise_requests_running 1.0" not in (await client.get("/metrics")).text:
            assert not going.done()
        gone = await client.post(UNLOAD, json={"lora_name": "z"})
        assert gone.json() == {"status": "unloaded", "lora_name": "z"}
        assert (await client.post("/v1/completions", json={**ASK, "model": "z"})).status_code == 404
        assert (await client.post(UNLOAD, json={"lora_name": "z"})).status_code == 404
        assert (await load("z", "y")).status_code == 200  # another one by the same name, while the first is in use
        assert await text(client, "z") == texts["y"]
        assert (await going).json()["choices"][0]["text"].startswith(texts["x"])
        await client.post(UNLOAD, json={"lora_name": "z"})
        assert "phasewise_lora_bytes 0.0" in (await client.get("/metrics")).text

    served(work, ServePolicy(lora_folder=home))


def test_a_key_needs_the_right(tmp_path: Path, home: Path) -> None:
    secrets = {name: new_key() for name in ("admin", "user")}
    lines = [f'[keys.{name}]\nsha256 = "{digest}"\n' for name, (_, digest) in secrets.items()]
    (tmp_path / "keys.toml").write_text(lines[0] + "loras = true\n" + lines[1])

    async def work(client: httpx.AsyncClient) -> None:
        statuses = []
        for name in ("user", "admin"):
            bearer = {"Authorization": f"Bearer {secrets[name][0]}"}
            for path, body in ((LOAD, {"lora_name": "z", "lora_path": "x"}), (UNLOAD, {"lora_name": "z"})):
                statuses.append((await client.post(path, json=body, headers=bearer)).status_code)
        assert statuses == [403, 403, 200, 200]

    served(work, ServePolicy(lora_folder=home, keys=tmp_path / "keys.toml"))


def test_sleep_brings_them_back_and_one_that_has_gone_costs_nobody_else(tmp_path: Path, texts: dict[str, str]) -> None:
    for seed, name in enumerate("xy"):
        peft.write(tmp_path / name, chat_checkpoint(), seed=seed)
    llm = LLM(str(chat_checkpoint()), loras={name: str(tmp_path / name) for name in "xy"})
    llm.sleep()
    (tmp_path / "x" / "adapter_config.json").unlink()
    llm.wake()
    said = {name: llm.generate(ASK["prompt"], lora=name, max_tokens=12, ignore_eos=True)[0].text for name in ("y", "")}
    assert said == {"y": texts["y"], "": texts["tiny"]}
    with pytest.raises(UserError, match="unknown recipe 'default\\+x'"):
        llm.generate(ASK["prompt"], lora="x")
    llm.unload_lora("x")
    llm.sleep()
    llm.wake()
    assert llm.generate(ASK["prompt"], lora="y", max_tokens=12, ignore_eos=True)[0].text == texts["y"]


def test_an_adapter_is_not_called_like_the_model(home: Path) -> None:
    llm = LLM(str(chat_checkpoint()), loras={"tiny": str(home / "x")})
    with pytest.raises(UserError, match="called like the model"):
        create_app(llm, name="tiny")


def test_a_file_of_options_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, why in (('lora = ["a=nowhere", "a=there"]', "two adapters 'a'"), ("lora = [1]", "a list of texts"),
                      ('lora = "a"', "write NAME=DIR")):  # fmt: skip
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(SystemExit):
            main(["serve", "--config", str(tmp_path / "c.toml")])
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(("words", "why"), [
    (["--models", "models.toml", "--lora", "a=b"], "named in the file, under [MODEL.loras]: leave --lora"),
    (["--lora", "sql"], "write NAME=DIR"), (["--lora", "a b=x"], "write NAME=DIR"),
    (["--lora", '["a=b", 1]'], "JSON list"), (["--lora", "a=b", "--lora", '["a=c"]'], "two adapters 'a'"),
    (["--lora", "a=b", "--max-loras", "0"], "--max-loras 0"), (["--lora-dir", "nowhere"], "no such folder"),
    (["--lora", "a=nowhere", "--model", "pocket", "--port", "0"], "has no adapter_config"),
])  # fmt: skip
def test_mistakes_on_the_command_line_are_one_line(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", *words])
    said = capsys.readouterr().err
    assert left.value.code == 2 and why in said and said.count("\n") == 1
