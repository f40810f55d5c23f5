"""One span's rows reading one layer's KV: the object every attend, evict and view method works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.format import Raw, entry_bytes
from phasewise.ops import attention as ops
from phasewise.ops.native import listed, prefill
from phasewise.ops.native import spans as native
from phasewise.ops.native.stack import SLICE

if TYPE_CHECKING:
    from phasewise.kv.part import KVPart
    from phasewise.kv.shared_rows import SharedRows
    from phasewise.step.inside import Inside
    from phasewise.step.span import Span

FEW = SLICE  # rows of a span, unless it is a tree, that are read in one call with all others; more are worth a product


@dataclass(slots=True)
class View:
    """A view limits what rows see, for an evicting method. `mask` bool [1 | h, R, N] or None.

    `moved` = (slots [M], delta [R]): row r reads those slots as if their positions were `delta[r]` larger.
    """

    mask: Tensor | None
    moved: tuple[Tensor, Tensor] | None = None


class Read:
    """Rows q [R, hq, D] of one span against k, v [h, N, D] of its KV at one layer (all heads, or those of one slab)."""

    __slots__ = ("answer", "at", "late", "layer", "part", "q", "rows", "span", "step", "view")

    def __init__(self, step: Inside, layer: int, span: Span, q: Tensor, part: KVPart) -> None:
        self.step = step
        self.layer = layer
        self.span = span
        self.q = q
        self.part = part
        self.rows: list[int] | None = None  # local rows, when some skip this layer
        self.late: Sequence[int] = ()  # positions of rows before the span's own that were known before and run late
        self.at: slice | Tensor = slice(0, 0)  # rows of the layer's input they come from
        self.view: View | None = None
        self.answer: Tensor | None = None  # of `attend`, where it is there already

    def slices(self, entries: int) -> list[Read]:
        """Consecutive rows of it, so that heads x rows x slots are at most so many entries (or it is one row): methods
        that make a mask of a long prompt make it piece by piece. Whole where an evicting method has a view of it."""
        some = max(1, entries // (self.part.size[0] * self.part.size[1]))
        if self.q.shape[0] <= some or self.view is not None or self.rows is not None:
            return [self]
        found = [Read(self.step, self.layer, self.span, q, self.part) for q in torch.split(self.q, some)]
        for i, piece in enumerate(found):
            piece.rows = list(range(i * some, i * some + len(piece.q)))
        return found

    # ---- what is where
    @property
    def scale(self) -> float:
        return self.step.model.config.attention[self.layer].scale

    @property
    def q_positions(self) -> Tensor:
        """int64 [R]."""
        positions = self.span.positions
        if self.rows is not None:
            positions = [*self.late, *(positions[r] for r in self.rows[len(self.late) :])]
        elif isinstance(positions, range):
            return torch.arange(positions.start, positions.stop, positions.step, device=self.q.device)
        return torch.tensor(positions, device=self.q.device)

    @property
    def state(self) -> dict[str, object]:
        return self.span.request.state

    # ---- who sees what
    def mask(self) -> Tensor | None:
        """Visibility from positions, the span's own structure, the layer's window and the evicting method.

        bool [1 | h, R, N]; None = everything is visible.
        """
        own = self._own_mask()
        if self.view is None or self.view.mask is None:
            return own
        return self.view.mask if own is None else own & self.view.mask

    def _own_mask(self) -> Tensor | None:
        window = self.step.model.config.attention[self.layer].window
        part, rows = self.part, self.q.shape[0]
        if window is not None and max(self.span.positions) < window:
            window = None
        if rows == 1 and part.fresh == 1 and window is None:
            return None
        if not part.plain or self.rows is not None or (window is not None and self._moved):
            return self._build(window)
        key = (id(self.span), window, part.n, part.fresh)
        if key not in self.step.masks:
            self.step.masks[key] = self._build(window)
        return self.step.masks[key]

    def seen(self, rows: Sequence[int]) -> Tensor | None:
        """`mask` of some of the read's rows, by number, without what the others' would take: bool [1 | h, r, N]."""
        local = torch.tensor(list(rows), device=self.q.device)
        view = None if self.view is None else self.view.mask
        if self.q.shape[0] == len(rows) and view is None:
            own = self._own_mask()
            return own if own is None else own[:, local]
        own = self._build(self.step.model.config.attention[self.layer].window, local)
        return own if view is None else own & view[:, local]

    def _build(self, window: int | None, some: Tensor | None = None) -> Tensor:
        part, device = self.part, self.q.device
        every = torch.arange(self.span.rows, device=device)
        rows = every if self.rows is None else every[self.rows]
        positions = self.q_positions
        if some is not None:
            rows, positions = rows[some], positions[some]
        ids = torch.arange(part.fresh, device=device) if part.ids is None else part.ids
        if self.late:  # among rows that are there some come after these
            mask = part.positions[:, None, :] <= positions[:, None]
        else:
            fresh = self.span.seen(rows, ids)
            mask = torch.cat((fresh.new_ones(len(rows), part.n), fresh), 1)[None]
        if window is not None:
            distance = positions[None, :, None] - part.positions[:, None, :]
            if self._moved:  # far rows that are read as if they were near
                slots, delta = self._moved
                distance[:, :, slots] -= (delta if some is None else delta[some])[:, None]
            mask = mask & (distance < window)
        return mask

    @property
    def _moved(self) -> tuple[Tensor, Tensor] | None:
        return None if self.view is None else self.view.moved

    # ---- attention
    def attend(self, select: Tensor | None = None) -> Tensor:
        """Exact attention over what is visible and, if given, selected (bool [1 | h, R, N]). -> [R, hq, D].

        Of a selection, only the selected entries are read, unless reading everything once is less.
        """
        part, spec = self.part, self.step.model.config.attention[self.layer]
        if select is None and self.view is None and self._causal(spec.softcap, spec.window):
            self.count(part.size[1])
            if self.answer is not None:
                return self.answer
            if part.format.scaled and (kv := self._as_it_lies()) is not None:
                k, v, scales = kv
                return prefill.causal(self.q, k, v, spec.scale, scales, native.SeenWindow(0, block=self.span.block))
            return ops.causal(self.q, part.k, part.v, spec.scale, self.span.block)
        mask = self.mask()
        if select is not None:
            mask = select if mask is None else mask & select
            most = max(int(some.sum(-1).max()) for some in torch.split(mask, 256, 1))  # sums take 8 times that
            if most * mask.shape[1] < part.size[1]:
                index = mask.byte().topk(most, -1, sorted=False).indices  # [1 | h, R, S]
                valid = mask.gather(2, index).expand(part.size[0], -1, -1)
                self.count_entries(int(valid.sum()))
                return self.gathered(index.expand(part.size[0], -1, -1), valid)
        self.count(part.size[1])
        if self._moved is None:
            many = part.format.scaled and mask is not None and self.q.shape[0] > 1
            if many and (kv := self._as_it_lies()) is not None:
                k, v, scales = kv
                return prefill.masked(self.q, k, v, mask, (spec.scale, spec.softcap or 0.0), scales)
            return ops.attention(self.q, part.k, part.v, mask, spec.scale, spec.softcap)
        return ops.weigh(self.scores(), part.v, mask)[0]

    def lse(self) -> Tensor | None:
        """The log-sum-exp of the scores of many rows that read all they see, float32 [R, hq], if a kernel has it with
        their attention, which need not be computed again then."""
        spec = self.step.model.config.attention[self.layer]
        if self.q.shape[0] <= FEW or self.view is not None or not self.span.plan.reads_all:
            return None
        kv = self._as_it_lies() if self._causal(spec.softcap, spec.window) else None
        if kv is None:
            return None
        k, v, scales = kv
        seen = native.SeenWindow(0, block=self.span.block)
        self.answer, lse = prefill.causal_lse(self.q, k, v, spec.scale, scales, seen)
        return lse

    def _as_it_lies(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None] | None:
        """Keys, values and their scales as the prompt's kernel reads them, where nothing needs to be decoded for it."""
        scales = None
        if self.part.format.scaled:
            k, k_scale, v, v_scale = self.part.planes
            scales = k_scale, v_scale
        elif isinstance(self.part.format, Raw):
            k, v = self.part.planes
        else:
            return None
        return (k, v, scales) if prefill.fits(self.q, k, v, scales) else None

    def scores(self) -> Tensor:
        """Float32 logits [h, G, R, N] of all slots as the rows meet them; nothing is hidden, nothing is counted."""
        part, spec = self.part, self.step.model.config.attention[self.layer]
        logits = ops.scores(self.q, part.k, spec.scale, spec.softcap)
        if self._moved is not None:
            slots, _ = self._moved
            logits[..., slots] = ops.scores(self._turned_back(), part.k[:, slots], spec.scale, spec.softcap)
        return logits

    def score(self, slot: int) -> Tensor:
        """The column of `scores` at one slot, [R, hq]. A row's number does not depend on how many rows there are."""
        part, spec = self.part, self.step.model.config.attention[self.layer]
        moved = self._moved is not None and slot in self._moved[0].tolist()
        q = self._turned_back() if moved else self.q
        by_head = q.float().view(q.shape[0], part.size[0], -1, q.shape[2])
        logits = (by_head * part.keys(slot, slot + 1).float()[:, 0, None]).sum(-1).flatten(1) * spec.scale
        return logits if spec.softcap is None else spec.softcap * (logits / spec.softcap).tanh()

    def attend_rows(self, index: Tensor) -> Tensor:
        """Exact attention over the slots `index` only, reading nothing else. -> [R, hq, D].

        index [h, S] for a single query row, else [h, R, S]: every row reads slots of its own.
        """
        index = index.view(index.shape[0], -1, index.shape[-1])
        self.count_entries(index.numel())
        mask = self.mask()
        return self.gathered(index, None if mask is None else mask.expand(index.shape[0], -1, -1).gather(2, index))

    def gathered(self, index: Tensor, valid: Tensor | None) -> Tensor:
        """Row r of head h reads slots index[h, r]; where `valid` [h, R, S] is False nothing is seen."""
        slots = index.int() if valid is None else index.int().masked_fill(~valid, -1)
        row = self.listed(slots)
        if row is not None:
            return listed.attend([row], self.scale)[0]
        return self._pairwise(index, valid)

    def listed(self, slots: Tensor) -> listed.Listed | None:
        """The operands of the kernel that reads the slots int32 [h, R, S] (-1: none); None: it cannot do this."""
        part, spec = self.part, self.step.model.config.attention[self.layer]
        if self._moved is not None or spec.softcap is not None:
            return None
        if part.format.scaled:
            k, k_scale, v, v_scale = part.planes
            rows = listed.Listed(self.q, k, v, slots, (k_scale, v_scale))
        elif isinstance(part.format, Raw):
            k, v = part.planes
            rows = listed.Listed(self.q, k, v, slots)
        else:  # what need not be decoded is not
            return None
        return rows if listed.fits(rows) else None

    def _pairwise(self, index: Tensor, valid: Tensor | None) -> Tensor:
        """The plain twin: every (head, row) pair becomes a head with one query row of its own."""
        heads, rows, slots = index.shape
        spec = self.step.model.config.attention[self.layer]
        k, v = (x.reshape(heads * rows, slots, x.shape[2]) for x in self.part.take(index.flatten(1)))
        mask = None if valid is None else valid.reshape(heads * rows, 1, slots)
        q = self._by_pair(self.q, heads)
        if self._moved is None:
            out = ops.attention(q, k, v, mask, spec.scale, spec.softcap)
        else:
            seems = torch.isin(index, self._moved[0]).reshape(heads * rows, 1, 1, slots)
            near = ops.scores(self._by_pair(self._turned_back(), heads), k, spec.scale, spec.softcap)
            out = ops.weigh(torch.where(seems, near, ops.scores(q, k, spec.scale, spec.softcap)), v, mask)[0]
        return out.view(heads, rows, -1, out.shape[2]).transpose(0, 1).reshape(self.q.shape)

    @staticmethod
    def _by_pair(q: Tensor, heads: int) -> Tensor:
        """[R, h * G, D] -> [1, h * R * G, D]."""
        rows, heads_q, dim = q.shape
        return q.reshape(rows, heads, heads_q // heads, dim).transpose(0, 1).reshape(1, rows * heads_q, dim)

    def _turned_back(self) -> Tensor:
        """The query as moved rows meet it: turned by -delta, which is what moving the keys by delta comes to."""
        assert self._moved is not None
        return self.step.model.rotate(self.layer, self.q, -self._moved[1][:, None])

    def _causal(self, softcap: float | None, window: int | None) -> bool:
        """True if the rows simply see everything before them, and what comes later of their block."""
        if self.span.sees is not None or softcap is not None or self.q.shape[0] < 2:
            return False
        if self.rows is not None:  # rows that others have left alone with this layer: all of them, in order
            alone = self.part.fresh == len(self.rows) and self.span.block == 1 and not self.late
        else:
            alone = self.part.ids is None
        return alone and (window is None or max(self.span.positions) < window)

    def few(self, start: int = 0, most: int = FEW) -> native.Few | None:
        """The operands of the native kernel, if it can do this read: a tree, or at most so many rows that see all
        before them.

        Slots before `start` are read from others.
        """
        part, rows, sees = self.part, self.q.shape[0], self.span.sees
        spec = self.step.model.config.attention[self.layer]
        if (rows > most and sees is None) or self.rows is not None or self.view is not None:
            return None
        if part.fresh != self.span.first + rows or part.ids is not None:
            return None
        if spec.softcap is not None or (spec.window is not None and (sees is not None or not self.in_order())):
            return None
        seen = native.SeenWindow(0, block=self.span.block) if self.span.block > 1 else None
        if part.packed is not None:
            lie = part.packed
            few = native.Few(self.q, lie.tail[0], lie.tail[1], sees, lie.base, seen=seen, sealed=lie.sides)
            if native.fits(few):
                return few
        if part.shared is not None:
            few = self._few_behind(part.shared, seen)
        elif part.format.scaled:
            k, k_scale, v, v_scale = (plane[:, start:] for plane in part.planes)
            few = native.Few(self.q, k, v, sees, start, (k_scale, v_scale), seen)
        elif start and not isinstance(part.format, Raw):  # what need not be decoded is not
            few = native.Few(self.q, *part.between(start, part.size[1]), sees, start, seen=seen)
        else:
            few = native.Few(self.q, part.k, part.v, sees, seen=seen)
        return few if native.fits(few) else None

    def _few_behind(self, shared: SharedRows, seen: native.SeenWindow | None) -> native.Few:
        """Of rows whose first slots are held by reference: these are read where they lie."""
        sees, scales = self.span.sees, None
        if self.part.format.scaled:
            k, k_scale, v, v_scale = self.part.own
            scales = k_scale, v_scale
        else:
            k, v = self.part.own
        return native.Few(self.q, k, v, sees, shared.n, scales, seen, shared=shared.structs)

    def in_order(self) -> bool:
        """True if slots are positions: no row before these has skipped the layer or was dropped."""
        return self.part.plain and self.span.positions[0] == self.part.n

    # ---- counters
    def count(self, rows: int) -> None:
        """`rows` cached rows of every head were read."""
        if self.part.bytes is not None:  # rows of several forms
            self.count_bytes(self.part.bytes * rows // self.part.size[1])
        else:
            self.count_entries(rows * self.part.size[0])

    def count_entries(self, entries: int) -> None:
        """`entries` (row, KV head) pairs were read."""
        layer = self.span.kv.layers[self.layer]
        self.count_bytes(entries * entry_bytes(layer.format, layer.shape))

    def count_keys(self, entries: int) -> None:
        """Keys of `entries` (row, KV head) pairs were read, and their values were not."""
        if self.part.bytes is not None:  # keys and values of one form take as much
            heads, rows = self.part.size
            self.count_bytes(self.part.bytes * entries // (heads * rows) // 2)
        else:
            layer = self.span.kv.layers[self.layer]
            self.count_bytes(entries * entry_bytes(layer.format, layer.shape) // 2)

    def count_bytes(self, n: int) -> None:
        """`n` bytes of KV, or of what is kept beside it, were read."""
        self.step.counters.kv_bytes_read += n
