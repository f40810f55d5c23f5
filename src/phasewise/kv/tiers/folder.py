"""The tier on disk: a folder with a file per prefix block, within a bound, the least recently used out first.

    DIR/phasewise-kv    marks the folder as ours, and is locked by the process that has it open
    DIR/part/           files that are being written; whatever lies there when the folder is opened is removed
    DIR/SPACE/KK/KEY    blocks: what the rows mean, and their key, in hexadecimal digits

A block is written beside the others and renamed into place. A process or machine that dies at any byte therefore
leaves whole blocks, and perhaps files whose digest is wrong, which count as misses and are removed when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from phasewise.errors import UserError
from phasewise.kv.tiers.block_file import HEADER, BlockName, packed, unpacked
from phasewise.kv.tiers.codec import BlockCodec, BlockPacer, BlockPlanes
from phasewise.kv.wire import Misfit

log = logging.getLogger(__name__)
MARK, PARTS = "phasewise-kv", "part"
WORDS = b"KV blocks of phasewise, form 1\n"
HEX = re.compile(r"[0-9a-f]{32}")
SECTOR = 4096  # bytes; what a file takes is a multiple


class Medium(Protocol):
    """What blocks are read over. A slow one is simulated by one that waits."""

    def carried(self, n_bytes: int) -> None:
        """So many bytes have just been read."""
        ...


@dataclass(slots=True)
class FolderCounts:
    """What has happened in a folder since it was opened."""

    written_bytes: int = 0
    read_bytes: int = 0
    evicted: int = 0
    write_errors: int = 0
    refused: int = 0  # files that were not what they should be, and are gone


@dataclass(slots=True)
class BlockFolder:
    """Blocks by name in one folder, of all models that have used it. Safe to use from several threads; readers do not
    wait for writers.

    Raises UserError for a folder that another process has open, that others may write to, or that holds anything else.
    """

    path: Path
    limit: int  # bytes
    medium: Medium | None = None
    counts: FolderCounts = field(default_factory=FolderCounts)
    held: int = 0  # bytes
    _blocks: OrderedDict[BlockName, int] = field(default_factory=OrderedDict)  # sizes; the least recently used first
    _used: dict[BlockName, None] = field(default_factory=dict)  # since their files last said so
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _lock: int = -1
    _parts: int = 0

    def __post_init__(self) -> None:
        self.path = self.path.expanduser().absolute()
        try:
            self._open()
        except OSError as error:
            self._unlock()
            raise UserError(f"--kv-disk {self.path}: {error.strerror}: give a folder that can be written to") from error
        except UserError:
            self._unlock()
            raise

    # ---- opening
    def _open(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.path.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise UserError(f"--kv-disk {self.path}: others may write there, and blocks are believed: give a folder "
                            "that belongs to this user alone (chmod go-w)")  # fmt: skip
        mark = self.path / MARK
        if not mark.exists() and any(self.path.iterdir()):
            raise UserError(f"--kv-disk {self.path} holds other files: give an empty folder, or a new one")
        self._lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--kv-disk {self.path} is in use by another server: give each a folder of its own, or "
                            "stop the other one") from error  # fmt: skip
        words = os.pread(self._lock, 80, 0)
        if words and words != WORDS:
            raise UserError(f"--kv-disk {self.path} was written by another version of phasewise: give another folder, "
                            "or remove it")  # fmt: skip
        os.pwrite(self._lock, WORDS, 0)
        (self.path / PARTS).mkdir(mode=0o700, exist_ok=True)
        for left in (self.path / PARTS).iterdir():
            left.unlink()
        found = sorted(self._found())
        self._blocks = OrderedDict((name, size) for _, _, name, size in found)
        self.held = sum(self._blocks.values())
        self._make_room(0)

    def _found(self) -> Iterator[tuple[int, bytes, BlockName, int]]:
        """(when it was last used, key, name, bytes) of each block. Whatever is no plain file of ours is left alone."""
        for space in self._folders(self.path):
            if not HEX.fullmatch(space.name):
                continue
            for few in self._folders(space):
                for each in os.scandir(few):
                    about = each.stat(follow_symlinks=False)
                    plain = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
                    if plain and HEX.fullmatch(each.name) and each.name[:2] == few.name and about.st_size > HEADER:
                        name = BlockName(bytes.fromhex(space.name), bytes.fromhex(each.name))
                        yield about.st_mtime_ns, name.key, name, _taken(about.st_size)

    @staticmethod
    def _folders(path: str | Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
        return (each for each in os.scandir(path) if each.is_dir(follow_symlinks=False))

    def close(self) -> None:
        """Note when blocks were last used, and let another process have the folder."""
        self.note()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- blocks
    def __contains__(self, name: BlockName) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, names: Sequence[BlockName]) -> None:
        """These blocks, in the order of their rows, have been of use: later rows leave before earlier ones."""
        with self._guard:
            for name in reversed(names):
                if name in self._blocks:
                    self._blocks.move_to_end(name)
                    self._used.pop(name, None)
                    self._used[name] = None

    def note(self) -> None:
        """Have files say when they were last used, for the next process."""
        with self._guard:
            used, self._used = list(self._used), {}
        now = time.time_ns()
        for at, name in enumerate(used):
            with contextlib.suppress(OSError):
                os.utime(self._file(name), ns=(now, now - len(used) + at))

    def write(self, name: BlockName, bodies: list[bytes]) -> bool:
        """Put a block into the folder, at the price of those that have not been used for longest. Never raises: a
        block that cannot be written is not there."""
        parts = packed(name, bodies)
        size = _taken(sum(map(len, parts)))
        if size > self.limit or name in self._blocks:
            return False
        self._make_room(size)
        self._parts += 1
        part, file = self.path / PARTS / str(self._parts), self._file(name)
        try:
            with open(part, "xb", buffering=0) as out:
                for each in parts:
                    _write(out.fileno(), each)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.rename(file)
        except OSError as error:
            self.counts.write_errors += 1
            if self.counts.write_errors == 1:
                log.warning("KV blocks cannot be written to %s (%s): what does not fit is computed again", self.path,
                            error)  # fmt: skip
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        with self._guard:
            self._blocks[name] = size
            self.held += size
            self.counts.written_bytes += size
        return True

    def read(self, name: BlockName, codec: BlockCodec, pacer: BlockPacer, left: int) -> BlockPlanes | None:
        """The planes of a block, `left` blocks of its chain being still to come. None: it is not there, was damaged,
        or had better be computed. A damaged file is removed."""
        began = time.monotonic()
        try:
            file = os.open(self._file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                self._drop(name)
            return None
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise Misfit("it is no plain file of this user")
            header = unpacked(name, os.pread(file, HEADER, 0), about.st_size)
            version = pacer.choose(header.sizes, left)
            if version is None:
                return None
            at, size = header.span(version)
            body = bytearray(size)
            if os.preadv(file, [body], at) != size:
                raise Misfit("it ends too early")
            if self.medium is not None:
                self.medium.carried(size)
            there = time.monotonic()
            planes = codec.decode(version, header.body(name, version, body))
        except (Misfit, OSError) as error:
            log.warning("the KV block %s is not used: %s", self._file(name), error)
            self.counts.refused += 1
            self._drop(name)
            return None
        finally:
            os.close(file)
        self.counts.read_bytes += size
        pacer.took(size, there - began, time.monotonic() - there)
        return planes

    # ---- inside
    def _file(self, name: BlockName) -> Path:
        key = name.key.hex()
        return self.path / name.space.hex() / key[:2] / key

    def _make_room(self, size: int) -> None:
        """Remove blocks until `size` more bytes fit."""
        while self.held + size > self.limit and self._blocks:
            with self._guard:
                name = next(iter(self._blocks))
            self._drop(name)
            self.counts.evicted += 1

    def _drop(self, name: BlockName) -> None:
        with contextlib.suppress(OSError):
            self._file(name).unlink()
        with self._guard:
            self.held -= self._blocks.pop(name, 0)
            self._used.pop(name, None)


def _taken(size: int) -> int:
    """Bytes that a file of this size takes on a disk."""
    return -(-size // SECTOR) * SECTOR


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
