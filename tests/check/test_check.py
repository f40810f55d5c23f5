"""`phasewise check`: our own server keeps every law, and a server with a flaw breaks the law that is about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from phasewise.check.laws import LAWS
from phasewise.check.run import Checked, CheckSettings, check
from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from tests.check.fake import Fake
from tests.ops.targets import OWN, alike
from tests.serve.tiny_chat import chat_checkpoint

SETTINGS = CheckSettings(tokens=24, mates=4, seed=1)
OURS = CheckSettings(tokens=12, mates=3, seed=1)
BREAKS = {  # by flaw, the law that must notice it, and what it says
    "alone": ("alone", "differ at token 2"), "batch": ("batch", "at once .* differ at token 2"),
    "prefix": ("prefix", "same one again: differ at token 2"), "shorter": ("shorter", "24 and 8 tokens"),
    "stream": ("stream", "differ at character"), "chat": ("chat", "differ at character"),
    "drafts": ("drafts", "m and m@fast: differ at token 2"), "unseeded": ("seeds", "alone and among others"),
    "one draw": ("seeds", "nothing is drawn"), "mates draw": ("seeds", "differ at token 2"),
    "choices": ("choices", "choice 1 of n = 3: differ at token 2"), "one choice": ("choices", "gave 1 choices"),
    "unlikely": ("logprobs", "' other' .* is likelier"), "positive": ("logprobs", "0.5 is no log-probability"),
    "stop shown": ("stop", "streamed: differs"), "stop unnamed": ("stop", "ends by 'length'"),
    "echo": ("echo", "differs from prompt and answer"), "offsets": ("echo", "text_offset of token 0"),
    "miscounted": ("usage", "25 completion tokens, and 24 came"), "sum": ("usage", "not the sum"),
    "stream usage": ("usage", "whole and streamed"), "no usage": ("usage", "has no prompt_tokens"),
    "garbage": ("echo", "cannot be read"), "crash": ("choices", "HTTP 500"),
}  # fmt: skip


def asked(app: Any, settings: CheckSettings = SETTINGS) -> Checked:
    async def run() -> Checked:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            return await check(http, settings)

    return asyncio.run(run())


def by_verdict(found: Checked) -> dict[str, set[str]]:
    return {verdict: {r.law for r in found.results if r.verdict == verdict} for verdict in ("pass", "fail", "skip")}


def test_a_server_without_a_flaw_keeps_every_law() -> None:
    found = asked(Fake().app)
    assert by_verdict(found) == {"pass": {law.name for law in LAWS}, "fail": set(), "skip": set()}
    assert found.holds and found.compared == "tokens"


@pytest.mark.parametrize("flaw", BREAKS)
def test_each_flaw_breaks_its_law(flaw: str) -> None:
    law, why = BREAKS[flaw]
    found = asked(Fake(flaw).app)
    (result,) = (each for each in found.results if each.law == law)
    assert result.verdict == "fail" and not found.holds
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(result.why)


def test_what_a_server_does_not_offer_is_skipped_and_said() -> None:
    fields = {"logprobs": {"logprobs", "echo"}, "seed": {"seeds", "choices"}, "n": {"choices"}, "stop": {"stop"},
              "messages": {"chat"}, "exact": {"drafts"}, "echo": {"echo"}}  # fmt: skip
    for field, laws in fields.items():
        found = asked(Fake(without=[field]).app)
        assert by_verdict(found)["skip"] == laws and found.holds, field
        assert all(each.why for each in found.results if each.verdict == "skip")
    found = asked(Fake("batch", without=fields, recipes=()).app)  # compared by text alone
    assert found.compared == "text" and by_verdict(found)["fail"] == {"batch"}
    assert "differ at character" in next(each.why for each in found.results if each.law == "batch")


def test_a_refusal_of_what_every_server_has_is_a_fault() -> None:
    found = asked(Fake(without=["stream"]).app)
    assert by_verdict(found)["fail"] >= {"stream"}


@pytest.mark.parametrize("dtype", [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.skipif(not alike(OWN), reason="kernels that sum few rows otherwise")),
])  # fmt: skip
def test_our_own_server_keeps_every_law(dtype: str) -> None:
    recipes = {"fast": {"draft": "prompt_lookup:k=4"}, "short": {"evict": "streaming"}}
    llm = LLM(str(chat_checkpoint()), dtype=dtype, recipes=recipes)
    app = create_app(llm, name="tiny")

    async def run() -> Checked:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        async with app.router.lifespan_context(app), http:
            return await check(http, OURS)

    found = asyncio.run(run())
    assert by_verdict(found)["pass"] == {law.name for law in LAWS}, found.results


def test_who_cannot_be_asked_is_named() -> None:
    for app, settings, why in (
        (Fake(without=["prompt"]).app, SETTINGS, "does not complete a prompt with 'm'"),
        (Fake().app, CheckSettings(model="n"), "has no model 'n'"),
    ):
        with pytest.raises(UserError, match=why):
            asked(app, settings)


@pytest.mark.parametrize(("words", "why"), [
    (["localhost:8000"], "is no address"), (["http://127.0.0.1:9"], "does not list its models"),
    (["http://127.0.0.1:9", "--mates", "1"], "--mates"),
])  # fmt: skip
def test_mistakes_exit_with_2(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", *words])
    assert left.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize(("flaw", "code"), [("", 0), ("batch", 1)])
def test_the_command_tells_and_writes_what_it_found(
    flaw: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, http = httpx.ASGITransport(Fake(flaw).app), httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **given: http(**given, transport=transport))
    file = tmp_path / "found.json"
    with pytest.raises(SystemExit) as left:
        main(["check", "http://here/v1", "--tokens", "24", "--mates", "4", "--seed", "1", "--json", str(file)])
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert (left.value.code, found["holds"], found["model"]) == (code, not code, "m")
    assert f"{len(LAWS) - len([r for r in found['results'] if r['verdict'] == 'fail'])} pass" in said
    assert ("FAIL" in said and "differ at token 2" in said) == bool(code)
