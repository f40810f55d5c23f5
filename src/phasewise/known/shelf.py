"""Directories of models: those of the package, and those that were fetched, in `~/.cache/phasewise/models/NAME/`.

`XDG_CACHE_HOME` names another place than `~/.cache`, as it does for other programs.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from phasewise.errors import UserError
from phasewise.known.models import Embedded, Known


def place(model: Embedded | Known) -> Path:
    """The directory of an embedded model; the file of another, whether it is there or not."""
    if isinstance(model, Embedded):
        return Path(str(files("phasewise").joinpath("pocket", model.folder)))
    return caches() / "phasewise" / "models" / model.name / model.file


def found(model: Known) -> Path | None:
    """The model's file if it is here and whole, else None.

    The hash of a file is computed once: a stamp beside it says of which size and time the checked file was.
    """
    path = place(model)
    try:
        about = path.stat()
    except OSError:
        return None
    if about.st_size != model.size:
        return None
    with suppress(OSError, UnicodeDecodeError):
        if _stamp(path).read_text(encoding="utf-8") == _mark(model, about):
            return path
    if digest(path) != model.sha256:
        return None
    _remember(model, path, about)
    return path


def keep(model: Known, made: Path) -> Path:
    """Give a file whose hash was checked its place, in one move: nobody ever sees half of it. Returns the place."""
    path, about = place(model), made.stat()
    os.replace(made, path)
    _remember(model, path, about)
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _mark(model: Known, about: os.stat_result) -> str:
    return f"{model.sha256} {about.st_size} {about.st_mtime_ns}\n"


def _remember(model: Known, path: Path, about: os.stat_result) -> None:
    with suppress(OSError):  # a place that cannot be written is checked each time
        _stamp(path).write_text(_mark(model, about), encoding="utf-8")


def caches() -> Path:
    """The directory in which programs keep what they can make or get again. Raises UserError where there is no such
    place."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # others do not count, says the specification
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise UserError(f"there is no place for models ({error}): set XDG_CACHE_HOME to a directory") from error
