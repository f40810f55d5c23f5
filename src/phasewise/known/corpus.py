"""The text every Python installation has: the standard library's own source, split by file name."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo",
           "pydoc_data", "encodings", "__pycache__", "ensurepip"}  # fmt: skip
LONGEST = 400_000
HELD_OUT_PERCENT = 3


def is_held_out(name: str) -> bool:
    """Whether the file of this name (relative, with forward slashes) belongs to the held-out part."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def sources(held_out: bool, root: Path | None = None) -> dict[str, str]:
    """Relative file name -> text of one part of the library, in name order.

    Tests, tables (encodings), installed packages and files beyond 400,000 characters are left out.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in _files(root):
        relative = path.relative_to(root)
        if is_held_out(relative.as_posix()) != held_out:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 0 < len(text) <= LONGEST:
            texts[relative.as_posix()] = text.replace("\r\n", "\n")
    return texts


def _files(root: Path) -> list[Path]:
    """In name order. (Skipped folders are not entered: most of the files of an installation are in them.)"""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py") and name not in SKIPPED]
    return sorted(found)
