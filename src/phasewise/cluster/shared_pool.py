"""One KV pool for the workers of a machine: its table (pool.py), and memory in which planes change hands by name.

Names say who owns what, `{owner}.{number}`, and taking over is renaming. So what a dead worker leaves is found by its
name, however far it had come, and a KV is handed on without a copy: the same pages, mapped by somebody else.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from phasewise.cluster.pool import CELLS, Account, AccountTable, Loan
from phasewise.cluster.transfer_buffer import ALIGN, Lost, folder, segment
from phasewise.errors import UserError
from phasewise.kv.buffer import Memory
from phasewise.kv.format import Kind


class NamedMemory(Memory, Protocol):
    """Memory that several owners share."""

    def at(self, owner: str) -> NamedMemory:
        """The same memory as another one uses it."""
        ...

    def purge(self, owner: str, keep: set[str]) -> None:
        """Free all that an owner has left, but for the names to `keep`."""
        ...


class InlineMemory:
    """Planes in this process. The twin of `Mapped`."""

    def __init__(self, owner: str = "router", planes: dict[str, list[Tensor]] | None = None) -> None:
        self.owner = owner
        self.planes = {} if planes is None else planes
        self._numbers = itertools.count()

    def at(self, owner: str) -> InlineMemory:
        return InlineMemory(owner, self.planes)

    def new(self, kinds: Sequence[Kind], device: str) -> tuple[str, list[Tensor]]:
        return self._keep([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds])

    def adopt(self, name: str, kinds: Sequence[Kind]) -> tuple[str, list[Tensor]]:
        if name not in self.planes:
            raise Lost(f"the planes {name} are gone")
        return self._keep(self.planes.pop(name))

    def _keep(self, planes: list[Tensor]) -> tuple[str, list[Tensor]]:
        name = f"{self.owner}.{next(self._numbers)}"
        self.planes[name] = planes
        return name, planes

    def free(self, name: str) -> None:
        self.planes.pop(name, None)

    def purge(self, owner: str, keep: set[str]) -> None:
        for name in [name for name in self.planes if name.startswith(f"{owner}.") and name not in keep]:
            del self.planes[name]


class MappedMemory:
    """Planes in shared memory: a file `{run}.kv.{owner}.{number}` for each buffer, gone from there as it is freed."""

    def __init__(self, run: str, owner: str) -> None:
        self.run, self.owner = run, owner
        self._numbers = itertools.count()

    def at(self, owner: str) -> MappedMemory:
        return MappedMemory(self.run, owner)

    def new(self, kinds: Sequence[Kind], device: str) -> tuple[str, list[Tensor]]:
        if not _bytes(kinds):
            return "", [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
        name = self._name()
        return name, _carve(segment(name, _bytes(kinds), create=True), kinds)

    def adopt(self, name: str, kinds: Sequence[Kind]) -> tuple[str, list[Tensor]]:
        own = self._name()
        try:
            (folder() / name).rename(folder() / own)
        except FileNotFoundError as error:
            raise Lost(f"the planes {name} are gone") from error
        try:
            return own, _carve(segment(own, _bytes(kinds), create=False), kinds)
        except Exception:
            self.free(own)
            raise

    def _name(self) -> str:
        return f"{self.run}.kv.{self.owner}.{next(self._numbers)}"

    def free(self, name: str) -> None:
        if name:
            (folder() / name).unlink(missing_ok=True)

    def purge(self, owner: str, keep: set[str]) -> None:
        for path in folder().glob(f"{self.run}.kv.{owner}.*"):
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _bytes(kinds: Sequence[Kind]) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for shape, dtype in kinds)


def _carve(memory: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """Planes one after the other, each at a multiple of ALIGN."""
    planes, at = [], 0
    for shape, dtype in kinds:
        size = math.prod(shape) * dtype.itemsize
        planes.append(memory[at : at + size].view(dtype).view(shape))
        at += -(-size // ALIGN) * ALIGN
    return planes


class Lock:
    """Held by one process at a time; a process that dies lets go of it."""

    def __init__(self, path: Path) -> None:
        import fcntl  # not everywhere, and not needed within one process

        self._file = open(path, "rb")  # noqa: SIM115 - as long as the lock lives
        self._take = partial(fcntl.flock, self._file, fcntl.LOCK_EX)
        self._let_go = partial(fcntl.flock, self._file, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        self._take()

    def __exit__(self, *error: object) -> None:
        self._let_go()


@dataclass(frozen=True)
class SharedPool:
    """The budget of some workers and the memory it is spent on."""

    table: AccountTable
    memory: NamedMemory

    @classmethod
    def here(cls, limit: int) -> SharedPool:
        """Make a pool for workers of this process."""
        return cls(AccountTable.here(limit), InlineMemory())

    @classmethod
    def create(cls, run: str, limit: int) -> SharedPool:
        """Make a pool for the processes of a run on this machine. Raises UserError if shared memory is too small."""
        disk = os.statvfs(folder())
        free = disk.f_bavail * disk.f_frsize
        if limit > free:
            raise UserError(
                f"a pool of {limit:,} bytes of KV does not fit into {folder()}, which has {free:,} free: "
                "lower --kv-bytes, or give the machine more shared memory"
            )
        segment(f"{run}.pool", CELLS * 8, create=True)
        pool = cls.join(run)
        pool.table.opened(limit)
        return pool

    @classmethod
    def join(cls, run: str, owner: str = "router") -> SharedPool:
        """The pool that the router of a run has created."""
        cells = segment(f"{run}.pool", CELLS * 8, create=False).view(torch.int64)
        return cls(AccountTable(cells.numpy(), Lock(folder() / f"{run}.pool")), MappedMemory(run, owner))

    def account(self, owner: str, yields: bool) -> Account:
        return Account(self.table, owner, self.memory.at(owner), yields)

    def drop(self, loan: Loan) -> None:
        """End a loan; nothing happens if it was adopted, or dropped before."""
        for name in loan["names"]:
            self.memory.free(name)
        self.table.drop(loan["ticket"])

    def clear(self, owner: str, keep: Sequence[Loan]) -> None:
        """Take back all that a dead owner had, but for the loans to `keep`."""
        self.memory.purge(owner, {name for loan in keep for name in loan["names"]})
        self.table.clear(owner, [loan["ticket"] for loan in keep])
