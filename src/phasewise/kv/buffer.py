"""Byte-counted memory for KV rows: a ledger with a hard limit, and buffers that requests may share copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from phasewise.kv.format import Kind, kinds_bytes

ROUND = 64  # rows; capacities are multiples of it
PLACE = 8  # bytes of a position


def stride(rows: int) -> int:
    """Growth increment, in rows, of a buffer with room for so many. Growing copies all rows; with this step a row is
    copied 32 times at most, however long a text."""
    return max(ROUND, 1 << rows.bit_length() >> 5)


def rounded(rows: int) -> int:
    return -(-max(rows, 1) // stride(rows)) * stride(rows)


class Memory(Protocol):
    """An allocator of planes. Planes that one holder gives up without freeing them may be adopted by another, by
    name."""

    def new(self, kinds: Sequence[Kind], device: str) -> tuple[str, list[Tensor]]:
        """A name and planes, contents undefined. Raises OSError where the machine has no room."""
        ...

    def adopt(self, name: str, kinds: Sequence[Kind]) -> tuple[str, list[Tensor]]:
        """The same planes under a name of one's own. Raises if they are gone."""
        ...

    def free(self, name: str) -> None: ...


class Heap:
    """Memory of this process, which nobody else can adopt."""

    def new(self, kinds: Sequence[Kind], device: str) -> tuple[str, list[Tensor]]:
        return "", [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]

    def adopt(self, name: str, kinds: Sequence[Kind]) -> tuple[str, list[Tensor]]:
        raise LookupError(f"{name}: planes of this kind of memory cannot be adopted")

    def free(self, name: str) -> None:
        pass


class Ledger:
    """Bytes in use against a hard limit, and the memory they are taken from."""

    __slots__ = ("limit", "memory", "peak", "resident", "used")

    def __init__(self, limit: int, memory: Memory | None = None) -> None:
        self.limit = limit
        self.memory = memory or Heap()
        self.used = 0
        self.peak = 0
        self.resident = 0  # the part of `used` that makes way for nobody: adapters

    @property
    def free(self) -> int:
        return self.limit - self.used

    @property
    def held(self) -> int:
        """Bytes in use, and those lent to other workers of a pool and adopted by nobody yet."""
        return self.used

    @property
    def others(self) -> int:
        """Bytes that others hold under the same limit."""
        return 0

    @property
    def yields(self) -> bool:
        """True if it makes way for those others."""
        return False

    def room(self, n: int) -> bool:
        """True if `n` more bytes may be taken. Ask before `add`: where others share the limit, this sets them aside."""
        return n <= self.free

    def add(self, n: int) -> None:
        self.used += n
        self.peak = max(self.peak, self.used)


class Buffer:
    """Planes [H, cap, ...] of these kinds for the rows (or blocks) of some heads, and what positions they may have to
    say, int64 [wide, cap], with a count of the holders that share them. `row`: bytes of a row of all these."""

    __slots__ = ("addresses", "bytes", "cap", "heads", "ledger", "name", "planes", "positions", "refs", "row", "wide")

    def __init__(
        self, kinds: Sequence[Kind], heads: int, cap: int, ledger: Ledger, device: str, lent: str | None = None
    ) -> None:
        """`lent`: the name of planes that another holder has given up."""
        self.cap, self.heads, self.ledger, self.refs = cap, heads, ledger, 1
        whole = [((heads, cap, *tail), dtype) for tail, dtype in kinds]
        memory = ledger.memory
        self.name, self.planes = memory.new(whole, device) if lent is None else memory.adopt(lent, whole)
        self.addresses = [p.data_ptr() for p in self.planes]  # for native kernels; meaningless elsewhere
        self.wide, self.positions = 0, torch.empty((0, cap), dtype=torch.int64, device=device)
        self.row = heads * kinds_bytes(kinds)
        self.bytes = self.row * cap
        ledger.add(self.bytes)

    def placed(self, wide: int) -> Buffer:
        """With room for the positions of so many heads, where there was none; 1: they are alike for all."""
        if wide and not self.wide:
            self.wide, self.positions = wide, self.positions.new_empty((wide, self.cap))
            self.row, self.bytes = self.row + wide * PLACE, self.bytes + self.positions.nbytes
            self.ledger.add(self.positions.nbytes)
        return self

    def share(self) -> Buffer:
        self.refs += 1
        return self

    def drop(self) -> None:
        """One holder fewer; the last one gives the bytes back."""
        assert self.refs > 0, "a buffer was dropped more often than it was held"
        self.refs -= 1
        if self.refs == 0:
            self.ledger.add(-self.bytes)
            self.planes, self.positions = [], self.positions.new_empty((0, 0))
            self.ledger.memory.free(self.name)

    def lend(self) -> None:
        """Give the planes up, for another to adopt by name. They must not be shared."""
        assert self.refs == 1, "what others read cannot be lent"
        self.refs = 0
        self.ledger.add(-self.bytes)
        self.planes, self.positions = [], self.positions.new_empty((0, 0))
