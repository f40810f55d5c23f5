"""Rows of one request at one layer: committed rows, then the rows of the step under way.

Position, slot and visibility are three numbers (DESIGN law 5): every row carries its true position, its slot is only
where it lies, and who may read it is decided from positions. Heads may keep different rows (ragged eviction): heads
that share a length share a slab, so what is dropped is really freed.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from phasewise.kv.beside import Beside, Derived, Wants
from phasewise.kv.blocks import SLACK, LayerBlocks, LazyPlanes, RowSaliency, lying
from phasewise.kv.buffer import ROUND, Buffer, Ledger, rounded
from phasewise.kv.format import KVShape, RowFormat, entry_bytes
from phasewise.kv.part import KVPart
from phasewise.kv.shared_rows import SharedRows


class Slab:
    """Heads whose rows have one length. `positions` int64 [1 | h, cap], which the buffer has room for: `said` of them;
    None while they are base .. base+n-1: `base` rows before them lie in sealed or in shared blocks alone."""

    __slots__ = ("base", "buffer", "heads", "n", "said")

    def __init__(self, buffer: Buffer, n: int, heads: Tensor | None, said: int = 0, base: int = 0) -> None:
        self.buffer, self.heads, self.said = buffer, heads, said
        self.base, self.n = base, n

    @property
    def positions(self) -> Tensor | None:
        return self.buffer.positions[: self.said] if self.said else None


class LayerKV:
    """append / read / commit / keep for one request at one layer. Nothing here allocates but `reserve` and `keep`."""

    __slots__ = (
        "_ids",
        "_pending",
        "_wants",
        "beside",
        "blocks",
        "format",
        "fresh",
        "kinds",
        "ledger",
        "shape",
        "shared",
        "slabs",
        "version",
        "wide",
    )  # fmt: skip

    def __init__(
        self, shape: KVShape, format: RowFormat, ledger: Ledger, cap: int, wants: Wants | None = None, wide: int = 0
    ) -> None:
        """`wants`: what methods keep beside the rows; bytes for it are booked with them. `wide`: of how many heads
        positions may have to be said, as rows go (1: all are alike, or rows come late)."""
        self.shape, self.format, self.ledger, self.wide = shape, format, ledger, wide
        self.kinds = format.planes(shape)
        self.slabs = [Slab(Buffer(self.kinds, shape.heads, cap, ledger, self.shape.device).placed(wide), 0, None)]
        self.blocks = LayerBlocks.of(format, shape, ledger, cap)  # None: the format seals no blocks
        self.shared: SharedRows | None = None  # the first rows, where others hold them as well
        self.fresh = 0
        self._pending: Sequence[int] = ()
        self._ids: list[int] | None = None
        self.version = 0  # changes whenever committed rows are moved or dropped
        self._wants = wants
        self.beside = Beside(ledger, 0 if wants is None else wants(cap))  # emptied at the same moments

    # ---- sizes
    @property
    def n(self) -> int:
        """Committed rows of the longest head."""
        return max((s.base + s.n for s in self.slabs), default=0)

    @property
    def spare(self) -> int:
        """Rows that `append` can take now; a layer that was closed wants none."""
        rows = min((s.buffer.cap - s.n if s.buffer.refs == 1 else 0 for s in self.slabs), default=sys.maxsize)
        if self.blocks is not None:
            rows = min(rows, self.blocks.spare(self.n))
        return 0 if self.beside.growth(self._wanted(rows)) else rows

    @property
    def bytes(self) -> int:
        return sum(s.buffer.bytes for s in self.slabs) + (self.blocks.bytes if self.blocks is not None else 0)

    @property
    def live_bytes(self) -> int:
        """Bytes of committed entries (what a method that drops rows really saves), but for those held by reference."""
        if self.blocks is not None:
            return self.blocks.live_bytes(self.n)
        return sum(s.n * s.buffer.heads for s in self.slabs) * entry_bytes(self.format, self.shape)

    @property
    def derived(self) -> Mapping[Hashable, Derived]:
        """The derived data that methods keep beside the committed rows now."""
        return self.beside.kept

    # ---- room
    def growth(self, rows: int) -> int:
        """Bytes that `reserve(rows)` would add to the ledger."""
        total, spare = 0, sys.maxsize
        for s in self.slabs:
            cap, n = s.buffer.cap, s.n
            if n + rows > cap or s.buffer.refs > 1:
                n -= self._needless(s)
                if n + rows > cap or s.buffer.refs > 1:
                    cap = max(self._cap(n + rows), cap)
                    total += cap * s.buffer.row - (s.buffer.bytes if s.buffer.refs == 1 else 0)
            spare = min(spare, cap - n)
        if self.blocks is not None:
            total += self.blocks.growth(self.n + rows, rounded(self.n + rows))
        return total + self.beside.growth(self._wanted(spare))

    def _cap(self, rows: int) -> int:
        """The capacity of a slab for so many rows: with those held by reference, that of all."""
        return rounded(rows) if self.shared is None else rounded(self.shared.n + rows) - self.shared.n

    def _needless(self, s: Slab) -> int:
        """Rows of a slab that are sealed as well."""
        return self.blocks.first - s.base if self.blocks is not None else 0

    def _wanted(self, spare: int) -> int:
        """Bytes that methods may want beside the rows when `spare` more are there."""
        return 0 if self._wants is None or not self.slabs else self._wants(self._end + spare)

    @property
    def _end(self) -> int:
        """All positions of committed rows lie below it."""
        return max(s.base + s.n if s.positions is None or not s.n else int(s.positions[:, s.n - 1].max()) + 1
                   for s in self.slabs)  # fmt: skip

    def room(self, rows: int) -> tuple[int, int]:
        """After `reserve(rows)`: how many rows a head, on average, there is room for, all at positions below what."""
        caps = [max(s.buffer.cap, self._cap(s.n + rows) if s.n + rows > s.buffer.cap else 0) for s in self.slabs]
        slots = sum((s.base + cap) * s.buffer.heads for s, cap in zip(self.slabs, caps))
        return -(-slots // self.shape.heads), self._end + max(cap - s.n for s, cap in zip(self.slabs, caps))

    def reserve(self, rows: int) -> int:
        """Make room for `rows` more and stop sharing. Returns bytes copied."""
        moved = 0
        for s in self.slabs:
            if s.n + rows > s.buffer.cap or s.buffer.refs > 1:
                moved += self._replace(s, max(self._cap(s.n - self._needless(s) + rows), s.buffer.cap))
        if self.blocks is not None:
            moved += self.blocks.reserve(self.n + rows, rounded(self.n + rows))
        self.beside = self.beside.own(self._wanted(min((s.buffer.cap - s.n for s in self.slabs), default=0)))
        return moved

    def _replace(self, s: Slab, cap: int) -> int:
        """Room for `cap` rows, without those that are sealed as well."""
        old, start = s.buffer, self._needless(s)
        n, alone = s.n - start, cap == old.cap and old.refs == 1  # then rows only move up
        new = old if alone else Buffer(self.kinds, old.heads, cap, self.ledger, self.shape.device).placed(old.wide)
        for a, b in zip(new.planes, old.planes):
            a[:, :n] = b[:, start : start + n].clone() if alone else b[:, start : start + n]
        s.base, s.n = s.base + start, n
        new.positions[: s.said, :n] = old.positions[: s.said, :n]
        if not alone:
            old.drop()
        s.buffer = new
        return n * old.heads * entry_bytes(self.format, self.shape)

    # ---- one step
    def append(self, k: Tensor, v: Tensor, positions: Sequence[int], ids: list[int] | None = None) -> None:
        """Add this step's rows, uncommitted. k, v [H, R, D]; `ids` are their span rows when some skip the layer."""
        rows = len(positions)
        planes = self.format.encode(k, v)
        for s in self.slabs:
            at = slice(s.n + self.fresh, s.n + self.fresh + rows)
            for plane, new in zip(s.buffer.planes, planes):
                plane[:, at] = new if s.heads is None else new[s.heads]
        if self.fresh:  # rows of one step may arrive in pieces
            before = self._ids if self._ids is not None else list(range(self.fresh))
            self._ids = [*before, *(ids if ids is not None else range(self.fresh, self.fresh + rows))]
            self._pending = [*self._pending, *positions]
        else:
            self._ids, self._pending = ids, positions
        self.fresh += rows

    def appended(self, positions: Sequence[int]) -> None:
        """A native kernel has written this step's rows behind the committed ones."""
        assert not self.fresh
        self.fresh, self._pending, self._ids = len(positions), positions, None

    def read(self, written: Sequence[int] = ()) -> list[KVPart]:
        """Returns what this step's rows can read, head group by head group (usually one). `written`: positions of rows
        that a native kernel has put behind the committed ones, instead of any that were appended."""
        if self.blocks is not None and self.blocks.active and self.slabs:
            return [self._opened()]
        ids = None if self._ids is None else torch.tensor(self._ids, device=self.shape.device)
        pending, fresh = (written, len(written)) if written else (self._pending, self.fresh)
        parts = []
        for i, s in enumerate(self.slabs):
            planes = [p[:, : s.n + fresh] for p in s.buffer.planes]
            committed = None if s.positions is None else s.positions[:, : s.n]
            parts.append(
                KVPart(planes, self.format, self.shape.dtype, s.n, fresh, ids, s.heads, committed, pending, i,
                     self.beside)
            )  # fmt: skip
        return parts if self.shared is None else [_behind(self.shared, part) for part in parts]

    def _opened(self) -> KVPart:
        """`read`, of rows in sealed blocks and behind them."""
        (s,), sealed = self.slabs, self.blocks
        whole = self._ids is None or self._ids == list(range(self.fresh))  # in pieces, say
        assert sealed is not None and s.positions is None and whole, "rows are sealed where all are alike"
        planes, lie = lying(sealed, s.buffer.planes, s.base, (self.n, self.fresh))
        return KVPart(planes, sealed.raw, self.shape.dtype, self.n, self.fresh, None, None, None, self._pending, 0,
                    self.beside, packed=lie)  # fmt: skip

    def seal(self, saliency: RowSaliency | None = None) -> int:
        """The prompt is complete: seal the blocks that its committed rows, and those since, fill. Returns bytes moved.

        Room for them was made with the rows'. The first time, rows that are not needed as they were made are freed.
        """
        assert not self.fresh
        if self.blocks is None or not self.slabs:
            return 0
        (s,), before = self.slabs, self.blocks.active
        moved = self.blocks.take(s.buffer.planes, s.base, s.base + s.n, saliency)
        cap = rounded(self.blocks.longest + SLACK)
        if before or s.buffer.refs > 1 or cap >= s.buffer.cap:
            return moved
        self.version += 1
        start, old = self._needless(s), s.buffer
        rows = [plane[:, start : s.n].clone() for plane in old.planes]
        old.drop()  # before there is another: the budget may have no room for both
        s.buffer = Buffer(self.kinds, old.heads, cap, self.ledger, self.shape.device).placed(old.wide)
        s.base, s.n = s.base + start, s.n - start
        for plane, kept in zip(s.buffer.planes, rows):
            plane[:, : s.n] = kept
        return moved + sum(kept.nbytes for kept in rows)

    def commit(self, rows: int | Sequence[int]) -> int:
        """Keep the first `rows` fresh rows, or the span rows listed (a path); drop the others. Returns bytes moved."""
        if not self.fresh:
            return 0
        if self._ids is None:
            keep: Sequence[int] = range(min(rows, self.fresh)) if isinstance(rows, int) else rows
        else:
            wanted = range(rows) if isinstance(rows, int) else set(rows)
            keep = [slot for slot, row in enumerate(self._ids) if row in wanted]
        moved = 0
        first = isinstance(keep, range)
        in_place = first or list(keep) == list(range(len(keep)))
        positions = self._pending[: len(keep)] if first else [self._pending[slot] for slot in keep]
        for s in self.slabs:
            if not in_place:
                index = torch.tensor(list(keep), device=self.shape.device) + s.n
                for p in s.buffer.planes:
                    p[:, s.n : s.n + len(keep)] = p[:, index]
                moved += len(keep) * s.buffer.heads * entry_bytes(self.format, self.shape)
            self._note(s, positions)
            s.n += len(keep)
        self.fresh, self._pending, self._ids = 0, (), None
        return moved

    def _note(self, s: Slab, positions: Sequence[int]) -> None:
        """Write down the positions of rows about to be committed, unless they merely continue 0 .. n-1."""
        if s.positions is None:
            if not positions or (positions[0] == s.base + s.n and _consecutive(positions)):
                return
            assert not s.base, "rows are sealed, or held by reference, where all are alike"
            s.buffer.placed(1)
            s.said, s.buffer.positions[0, : s.n] = 1, torch.arange(s.n)
        at = s.buffer.positions[: s.said, s.n : s.n + len(positions)]
        at[:] = torch.tensor(list(positions), device=self.shape.device)

    # ---- between steps
    def refer(self, rows: SharedRows) -> int:
        """The first rows are read in `rows` from now on; the slab keeps those behind them. Returns bytes moved."""
        self._loose()
        (s,), before = self.slabs, 0 if self.shared is None else self.shared.n
        assert s.positions is None and s.heads is None and self.blocks is None, "only plain rows are held by reference"
        self.shared, start, old = rows, min(rows.n - before, s.n), s.buffer
        s.base, s.n = rows.n, s.n - start
        if not start:
            return 0
        self.version += 1
        behind = [plane[:, start : start + s.n].clone() for plane in old.planes]
        old.drop()  # before there is another: the budget may have no room for both
        s.buffer = Buffer(self.kinds, old.heads, self._cap(s.n + 1), self.ledger, self.shape.device).placed(old.wide)
        for plane, kept in zip(s.buffer.planes, behind):
            plane[:, : s.n] = kept
        return sum(kept.nbytes for kept in behind)

    def copies(self, s: Slab) -> list[Tensor]:
        """The planes of a slab's committed rows [h, n, ...], and before them the rows held by reference."""
        own = [plane[:, : s.n] for plane in s.buffer.planes]
        return [plane.clone() for plane in own] if self.shared is None else self.shared.joined(own)

    def positions(self, s: Slab) -> Tensor:
        """True positions of a slab's committed rows, int64 [1 | h, n]."""
        if s.positions is None:
            return torch.arange(s.base, s.base + s.n, device=self.shape.device)[None]
        return s.positions[:, : s.n]

    def drop_last(self, position: int) -> None:
        """Roll back: forget every row at or after `position`. Rows lie in the order of their positions."""
        self._loose()
        stay: dict[int, int] = {}  # rows by head
        for s in self.slabs:
            if s.positions is None:
                assert position >= s.base, "rows held by reference stay"
                counts = [min(s.n, position - s.base)] * s.buffer.heads
            else:
                counts = (s.positions[:, : s.n] < position).sum(1).expand(s.buffer.heads).tolist()
            stay |= zip(self._heads(s), counts)
        if all(len({stay[head] for head in self._heads(s)}) == 1 for s in self.slabs):
            for s in self.slabs:
                s.n = stay[self._heads(s)[0]]
            self._changed()
        else:  # heads of one slab have kept different rows
            self.keep([torch.arange(stay[head], device=self.shape.device) for head in sorted(stay)])

    def keep(self, index: Tensor | Sequence[Tensor], room: int = ROUND) -> int:
        """Give up all committed rows but those listed: one index [K] for all heads, [H, K] or one per head (ragged).

        Frees what is dropped, leaving `room` rows to grow, but never takes more memory than before. Slots must be in
        increasing order. Returns bytes moved.
        """
        self._loose()
        self._alone()
        self._changed()
        if isinstance(index, Tensor) and index.dim() == 1:
            return sum(self._gather(s, index[None], room) for s in self.slabs)
        rows = list(index)
        if len(self.slabs) == 1 and len({int(r.shape[0]) for r in rows}) == 1:
            return self._gather(self.slabs[0], torch.stack(rows), room)
        return self._split(rows, room)

    def rewrite(self, planes: Sequence[Sequence[Tensor]]) -> int:
        """New contents for the committed rows, planes [h, n, ...] slab by slab. Returns bytes moved."""
        self._loose()
        self._alone()
        self._changed()
        moved = self.reserve(0)
        for s, contents in zip(self.slabs, planes):
            for plane, new in zip(s.buffer.planes, contents):
                plane[:, : s.n] = new
                moved += new.numel() * new.element_size()
        return moved

    def _loose(self) -> None:
        """Rows may be dropped or written anew."""
        assert not self.fresh and (self.blocks is None or not self.blocks.active), "sealed rows stay as they are"

    def _alone(self) -> None:
        """Rows may be given up, moved or written, wherever they lie."""
        assert self.shared is None, "rows held by reference stay as they are"

    def _changed(self) -> None:
        self.version += 1
        self.beside = self.beside.emptied()

    def _heads(self, s: Slab) -> list[int]:
        return [*range(s.buffer.heads)] if s.heads is None else [*s.heads.tolist()]

    def _gather(self, s: Slab, index: Tensor, room: int) -> int:
        """index [1 | h, K] -> the slab holds just those rows."""
        heads, count = s.buffer.heads, int(index.shape[1])
        old = self.positions(s)
        wide = max(old.shape[0], index.shape[0])
        kept = old.expand(wide, -1).gather(1, index.expand(wide, -1))
        cap, most = min(rounded(count + room), s.buffer.cap), max(wide, min(self.wide, heads))
        new = Buffer(self.kinds, heads, cap, self.ledger, self.shape.device).placed(most)
        for a, b in zip(new.planes, s.buffer.planes):
            for to, of, slots in zip(a, b, index.expand(heads, -1)):  # a head's rows lie together, and move whole
                torch.index_select(of, 0, slots, out=to[:count])
        s.buffer.drop()
        s.buffer, s.n, s.said = new, count, wide
        new.positions[:wide, :count] = kept
        return count * heads * entry_bytes(self.format, self.shape)

    def _split(self, rows: Sequence[Tensor], room: int) -> int:
        """Every head keeps the slots listed for it; heads that keep equally many share a slab."""
        old = {head: (s, j) for s in self.slabs for j, head in enumerate(self._heads(s))}
        groups: dict[int, list[int]] = {}
        for head in sorted(old):
            groups.setdefault(len(rows[head]), []).append(head)
        slabs, moved = [], 0
        for count, heads in groups.items():
            cap = min(rounded(count + room), *(old[head][0].buffer.cap for head in heads))
            new = Buffer(self.kinds, (wide := len(heads)), cap, self.ledger, self.shape.device).placed(wide)
            for i, head in enumerate(heads):
                s, j = old[head]
                for a, b in zip((*new.planes, new.positions), (*s.buffer.planes, self.positions(s))):
                    torch.index_select(b[min(j, len(b) - 1)], 0, rows[head], out=a[i, :count])
            whole = len(heads) == self.shape.heads
            slabs.append(Slab(new, count, None if whole else torch.tensor(heads, device=self.shape.device), wide))
            moved += count * len(heads) * entry_bytes(self.format, self.shape)
        for s in self.slabs:
            s.buffer.drop()
        self.slabs = slabs
        return moved

    def fork(self) -> LayerKV:
        """The same committed rows, shared until either side writes."""
        assert not self.fresh
        twin = object.__new__(LayerKV)
        twin.shape, twin.format, twin.ledger, twin.wide = self.shape, self.format, self.ledger, self.wide
        twin.kinds = self.kinds
        twin.slabs = [Slab(s.buffer.share(), s.n, s.heads, s.said, s.base) for s in self.slabs]
        twin.blocks, twin.shared = None if self.blocks is None else self.blocks.fork(), self.shared
        twin.beside, twin._wants = self.beside.share(), self._wants
        twin.version, twin.fresh, twin._pending, twin._ids = self.version, 0, (), None
        return twin

    def lend(self) -> None:
        """Give every row up for another to adopt; see Buffer."""
        self._alone()
        for s in self.slabs:
            s.buffer.lend()
        self._leave()

    def close(self) -> None:
        """Free every row; a closed layer takes none again."""
        for s in self.slabs:
            s.buffer.drop()
        self._leave()

    def _leave(self) -> None:
        self.slabs = []
        if self.blocks is not None:
            self.blocks.close()
        self.blocks = self.shared = None
        self.version += 1
        self.beside = self.beside.left()


def _behind(shared: SharedRows, own: KVPart) -> KVPart:
    """A slab's part with the rows before it that are held by reference."""
    planes = LazyPlanes(partial(shared.joined, own.planes))
    return replace(own, planes=planes, n=shared.n + own.n, shared=shared, own=own.planes)


def _consecutive(positions: Sequence[int]) -> bool:
    if isinstance(positions, range):
        return positions.step == 1
    return all(b - a == 1 for a, b in pairwise(positions))
