"""The text every Python installation has: the standard library's own source, split by file name."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

BESIDE = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
NEVER = {"site-packages", "dist-packages", "pydoc_data", "encodings", "__pycache__", "ensurepip"}
LONGEST = 400_000
HELD_OUT_PERCENT = 3


def is_held_out(name: str) -> bool:
    """True if the file of this name (relative, with forward slashes) belongs to the held-out part."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def sources(held_out: bool, root: Path | None = None) -> dict[str, str]:
    """Relative file name -> text of one part of the library, in name order.

    Tests, tables (encodings), installed packages and files beyond 400,000 characters are left out.
    """
    return _texts(root, NEVER | BESIDE, lambda path: is_held_out(path.as_posix()) == held_out)


def beside(root: Path | None = None) -> dict[str, str]:
    """The same of the tests and tools that come with the library, which are there in some installations: more of the
    language to learn from. None of it is held out."""
    return _texts(root, NEVER, lambda path: not BESIDE.isdisjoint(path.parts))


def _texts(root: Path | None, skipped: set[str], wanted: Callable[[Path], bool]) -> dict[str, str]:
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in _files(root, skipped):
        relative = path.relative_to(root)
        if not wanted(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 0 < len(text) <= LONGEST:
            texts[relative.as_posix()] = text.replace("\r\n", "\n")
    return texts


def _files(root: Path, skipped: set[str]) -> list[Path]:
    """In name order. (Skipped folders are not entered: most of the files of an installation are in them.)"""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py") and name not in skipped]
    return sorted(found)
