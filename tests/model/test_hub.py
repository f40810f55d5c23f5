"""Where a checkpoint comes from: a directory, or a hub id; nothing here touches a network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.model.hub import resolve


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize("name", ["/no/such/place", "./org/name", "a/b/c", "name", ""])
def test_neither_a_directory_nor_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve(name) == Path()  # the current directory
        return
    with pytest.raises(UserError, match="no directory"):
        resolve(name)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is a file; pass a .gguf file, or the directory"):
        resolve(file)


def test_only_safe_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("org/name-1.5B_x") == tmp_path
    assert asked["name"] == "org/name-1.5B_x"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(UserError) as raised:
        resolve("org/name")
    message = str(raised.value)
    assert "'org/name'" in message and "no network" in message and "local directory" in message
    assert "long explanation" not in message


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"'org/name'.*phasewise\[hub\].*local directory"):
        resolve("org/name")


def test_an_invalid_id() -> None:
    with pytest.raises(UserError, match=r"not a valid hub id.*local directory"):
        resolve("org/na..me")


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Ollama names its files by their hash."""
    blob, upper, other = (tmp_path / name for name in ("sha256-0f3a", "MODEL.GGUF", "notes.txt"))
    blob.write_bytes(b"GGUF\3\0\0\0")
    upper.write_bytes(b"broken")  # whose name says what it is to be; reading it says what is wrong
    other.write_bytes(b"GGU")
    assert resolve(blob) == resolve(str(blob)) == blob and resolve(upper) == upper
    with pytest.raises(UserError, match=r"notes\.txt is a file"):
        resolve(other)


def test_a_folder_that_holds_one_gguf_model(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / f"a-0000{i}-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path) == tmp_path / "a-00001-of-00002.gguf"
    (tmp_path / "b.GGUF").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"2 GGUF models \(a-00001-of-00002.gguf, b.GGUF\)"):
        resolve(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(tmp_path) == tmp_path
