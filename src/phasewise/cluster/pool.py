"""One KV budget for several engines: a table of who may use how much, and an engine's account in it.

The table is a few kilobytes of integers, in this process or in memory that several share. An engine sets bytes aside
under a lock before it takes them, so the limit holds between processes too. What a hand-off moves is a row's owner, in
one store; all other changes touch rows of one owner only. So whenever a process dies, its rows are simply dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasewise.kv.buffer import Ledger, Memory
from phasewise.kv.cache import KV

Loan = dict[str, Any]  # plain data: {"ticket", "names"}
ROWS = 1024  # accounts and loans at any time
HEAD = 4  # cells before the rows: limit, peak, the last ticket
CELLS = HEAD + 4 * ROWS
OWNER, TICKET, BYTES, WISH = range(4)
LIMIT, PEAK, LAST = range(3)


class AccountTable:
    """Rows of (owner, ticket, bytes, wish): accounts have ticket 0, loans a number of their own; owner 0 = unused.

    `bytes` are set aside for the owner, whether it uses them now or not. `wish`: more that it would like to have.
    """

    def __init__(self, cells: NDArray[np.int64], lock: AbstractContextManager[Any] | None = None) -> None:
        self._cells, self._rows = cells, cells[HEAD:].reshape(ROWS, 4)
        self.lock = lock or nullcontext()

    @classmethod
    def here(cls, limit: int) -> AccountTable:
        """A table that only this process sees."""
        return cls(np.zeros(CELLS, dtype=np.int64)).opened(limit)

    def opened(self, limit: int) -> AccountTable:
        """The same, with nothing in it."""
        self._cells[:] = 0
        self._cells[LIMIT] = limit
        return self

    # ---- reading; without the lock a number may be old, and a loan under way may be counted twice
    @property
    def limit(self) -> int:
        return int(self._cells[LIMIT])

    @property
    def peak(self) -> int:
        return int(self._cells[PEAK])

    @property
    def used(self) -> int:
        """Bytes set aside by all together."""
        return self._sum(BYTES)

    @property
    def wishes(self) -> int:
        return self._sum(WISH)

    def _sum(self, column: int) -> int:
        return int(self._rows[self._rows[:, OWNER] != 0, column].sum())

    def owned(self, owner: str) -> int:
        """Bytes of an owner's account and of the loans nobody has adopted."""
        return int(self._rows[self._rows[:, OWNER] == key(owner), BYTES].sum())

    # ---- an account's row
    def enter(self, owner: str) -> int:
        """A new account. -> its row"""
        with self.lock:
            return self._add(owner, 0, 0)

    def claim(self, row: int, n: int, spared: bool, partly: bool = False) -> int:
        """Set `n` more bytes aside, or none, or as many as there are (`partly`); `spared`: leave what others wish for.
        -> how many"""
        with self.lock:
            used = self.used
            free = self.limit - used - (self.wishes if spared else 0)
            got = n if n <= free else max(0, free) if partly else 0
            self._rows[row, BYTES] += got
            self._cells[PEAK] = max(self.peak, used + got)
            return got

    def put(self, row: int, n_bytes: int) -> None:
        """Lower the bytes that an account has set aside."""
        self._rows[row, BYTES] = n_bytes

    def wish(self, row: int, n_bytes: int) -> None:
        self._rows[row, WISH] = n_bytes

    # ---- loans
    def lend(self, row: int, owner: str, n_bytes: int) -> int:
        """Take bytes out of an account for somebody else to adopt. -> the loan's ticket"""
        with self.lock:
            self._cells[LAST] += 1
            ticket = int(self._cells[LAST])
            self._add(owner, ticket, n_bytes)
            self._rows[row, BYTES] -= n_bytes
            return ticket

    def adopt(self, ticket: int, row: int, owner: str) -> int:
        """Add a loan to an account. -> its bytes. Raises LookupError if it was dropped."""
        with self.lock:
            found = self._find(ticket)
            if found is None:
                raise LookupError(f"loan {ticket} was called in")
            loan = self._rows[found]
            loan[OWNER] = key(owner)  # from here on it goes where its new owner goes
            self._rows[row, BYTES] += loan[BYTES]
            loan[OWNER] = 0
            return int(loan[BYTES])

    def drop(self, ticket: int) -> None:
        """End a loan; nothing happens if it was adopted, or dropped before."""
        with self.lock:
            found = self._find(ticket)
            if found is not None:
                self._rows[found, OWNER] = 0

    def clear(self, owner: str, keep: Sequence[int]) -> None:
        """Drop everything of an owner that is no more, but for the loans to `keep`."""
        with self.lock:
            rows = self._rows
            rows[(rows[:, OWNER] == key(owner)) & ~np.isin(rows[:, TICKET], keep), OWNER] = 0

    def _add(self, owner: str, ticket: int, n_bytes: int) -> int:
        unused = np.flatnonzero(self._rows[:, OWNER] == 0)
        if not len(unused):
            raise OSError(f"the pool's table is full: more than {ROWS} accounts and loans")
        row = int(unused[0])
        self._rows[row, TICKET:] = ticket, n_bytes, 0
        self._rows[row, OWNER] = key(owner)  # last: only now does it count
        return row

    def _find(self, ticket: int) -> int | None:
        found = np.flatnonzero((self._rows[:, TICKET] == ticket) & (self._rows[:, OWNER] != 0))
        return int(found[0]) if len(found) else None


def key(owner: str) -> int:
    """An owner's number: 63 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(owner.encode(), digest_size=8).digest()) >> 1 | 1


class Account(Ledger):
    """One engine's account in a pool. It sets bytes aside as it is asked for room, and keeps them until `settle`.

    While rows move to a larger buffer both exist, beyond what was set aside: one layer's rows of one request. An
    account that `yields` leaves the others what they wish for.
    """

    __slots__ = ("_yields", "claimed", "owner", "row", "table", "wish")

    def __init__(self, table: AccountTable, owner: str, memory: Memory, yields: bool) -> None:
        super().__init__(table.limit, memory)
        self.table, self.owner, self._yields = table, owner, yields
        self.row = table.enter(owner)
        self.claimed = self.wish = 0

    @property
    def free(self) -> int:
        spared = self.table.wishes if self._yields else 0
        return max(0, self.limit - self.others - spared - self.used)

    @property
    def others(self) -> int:
        return self.table.used - self.claimed

    @property
    def yields(self) -> bool:
        return self._yields

    @property
    def held(self) -> int:
        """Bytes in use, and those that were lent and adopted by nobody yet."""
        return self.table.owned(self.owner) - self.claimed + self.used

    def room(self, n: int) -> bool:
        more = self.used + n - self.claimed
        if more <= 0:
            return True
        self.claimed += self.table.claim(self.row, more, self._yields)
        return self.used + n <= self.claimed

    def settle(self, headroom: int = 0) -> None:
        """Keep what is used and `headroom` bytes more, let go of the rest; wish for what there is not."""
        wanted = self.used + headroom
        if wanted < self.claimed:
            self.claimed = wanted
            self.table.put(self.row, wanted)
        elif wanted > self.claimed:
            self.claimed += self.table.claim(self.row, wanted - self.claimed, self._yields, partly=True)
        if self.wish != wanted - self.claimed:
            self.wish = wanted - self.claimed
            self.table.wish(self.row, self.wish)

    # ---- hand-offs
    def lend(self, kv: KV) -> Loan:
        """Give a KV up, for another account to adopt: its rows stay where they are. It must share no buffer."""
        n_bytes, names = kv.bytes, kv.names
        ticket = self.table.lend(self.row, self.owner, n_bytes)
        kv.lend()
        self.claimed -= n_bytes
        return {"ticket": ticket, "names": names}

    def adopt(self, loan: Loan) -> None:
        """Answer for the bytes of a loan, before its planes are adopted. Raises LookupError if it was called in."""
        self.claimed += self.table.adopt(loan["ticket"], self.row, self.owner)
