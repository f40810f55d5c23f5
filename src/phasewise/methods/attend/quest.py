"""Each query reads only the pages whose bounds promise the most (Quest, arXiv 2406.10774).

Promises exact attention over at most `budget` rows per query row and KV head, of which only those are read; the cache
stays whole, so a later query may read any row. Prompts are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import KVShape, rounded
from phasewise.kv.pages import PageKeys
from phasewise.kv.part import Part
from phasewise.kv.promises import chosen, promises, split
from phasewise.ops.native import listed
from phasewise.ops.native.listed import Pages
from phasewise.step.choice import PageChoice
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed
from phasewise.step.span import Span


@dataclass(frozen=True)
class Quest:
    """A page is `page` consecutive positions. A row always reads its own page; the others are ranked by the upper bound
    that their smallest and largest keys put on the query's scores (largest over the query heads that share a KV head),
    and taken in that order while the rows read fit the budget, which is at least three pages.

    Bounds are taken over what the row may see, so drafts, replays and evicted caches choose as single steps would. The
    first `dense_layers` layers read everything. Bounds cost 1 / `page` of the KV, within its budget. Left out: a choice
    for each query head of its own.
    """

    page: int = 16
    budget: int = 1024
    dense_layers: int = 2

    paper: ClassVar[str] = "arXiv 2406.10774"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    tight: ClassVar[dict[str, object]] = {"page": 4, "budget": 12, "dense_layers": 0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"budget": 512}, {"budget": 256}, {"budget": 128})
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __post_init__(self) -> None:
        for name, least in (("page", 1), ("budget", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"quest: {name}={getattr(self, name)} must be at least {least}")

    @property
    def most(self) -> int:
        """Rows that one query row reads per KV head, at most."""
        return max(self.budget, 3 * self.page)

    @cached_property
    def _plan(self) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend, PageChoice(self.page, self.most, self.dense_layers)))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last >= self.most else EVERYTHING

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        """Two keys per head of every page, and for each group of heads the pages' numbers and rows."""
        if layer < self.dense_layers or end <= self.most:
            return 0
        return end // self.page * shape.heads * (2 * shape.dim * shape.dtype.itemsize + 16)

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(reads)
        steps: dict[int, PageKeys | _Bounds] = {}  # of single rows that see all before them, none missing
        for i, read in enumerate(reads):
            part = read.part
            if read.layer < self.dense_layers or part.size[1] <= self.most:
                continue
            bounds = self._bounds(read)
            low, high = bounds.known
            read.count_bytes(low.nbytes + high.nbytes)
            if part.plain and part.n == read.span.positions[0] and read.mask() is None:
                steps[i] = bounds
            else:
                out[i] = read.attend(self._select(read, _Bounds.of(bounds)))
        if steps:
            some = [reads[i] for i in steps]
            for i, result in zip(steps, attend_listed(some, self._best(some, [*steps.values()]))):
                out[i] = result
        return out

    def _bounds(self, read: Read) -> PageKeys | _Bounds:
        """Bounds of the pages that are complete before this step."""
        part = read.part
        upto = min(read.span.positions)
        upto = (min(upto, part.n) if part.plain else upto) // self.page
        key = PageKeys.key("bounds", self.page, part.slab)
        bounds = part.derived.get(key)
        if not isinstance(bounds, PageKeys | _Bounds):
            bounds = PageKeys.none("bounds", self.page, part.keys(0, 0)) if part.plain else _Bounds.none(part)
        if isinstance(bounds, PageKeys) and not part.plain:  # whose rows went on elsewhere
            bounds = _Bounds.of(bounds)
        before = bounds.upto
        if before < upto:
            if isinstance(bounds, PageKeys):
                read.count_keys((part.n - before * self.page) * part.size[0])
                bounds = bounds.roomy(rounded(part.size[1]) // self.page)
                bounds.fill(part, upto)
            else:
                read.count_keys((part.n - bounds.start) * part.size[0])
                bounds = bounds.extend(part, upto, self.page)
            part.derived.keep(key, bounds)
        return bounds

    def _best(self, reads: Sequence[Read], bounds: Sequence[PageKeys | _Bounds]) -> list[Tensor]:
        """For single rows that see all rows before them, none missing: the slots they read, int32 [h, 1, S]."""
        pages = []
        for read, own in zip(reads, bounds):
            (low, high), n, first = own.known, read.part.size[1], own.upto * self.page
            pages.append(Pages(read.q, low, high, self.page, (self.most - n + first) // self.page, first, n))
        if all(listed.takes(each) for each in pages) and len({each.low.shape[0] for each in pages}) == 1:
            return listed.choose(pages)
        return [chosen(each) for each in pages]

    def _select(self, read: Read, bounds: _Bounds) -> Tensor:
        """What every row reads, bool [h, R, N], for rows with structure, windows or evicted caches."""
        layout = self._laid_out(read, bounds)
        order = self._values(read, bounds, layout).argsort(-1, descending=True)
        fits = layout.rows.gather(2, order).cumsum(-1) <= layout.left
        taken = layout.rows.new_zeros((*order.shape[:2], order.shape[2] + 1), dtype=torch.bool).scatter(2, order, fits)
        of_row = layout.column[:, None].expand_as(layout.rivals)
        return layout.must | (layout.rivals & taken.gather(2, of_row))

    def _laid_out(self, read: Read, bounds: _Bounds) -> _Layout:
        """The same for all layers in which rows lie and are seen alike."""
        part, mask = read.part, read.mask()
        if not part.plain or read.rows is not None or read.view is not None:
            return self._lay_out(read, bounds, mask)
        key = self, id(read.span), id(mask), part.size, bounds.upto  # such a mask is kept for all layers
        if key not in read.step.notes:
            read.step.notes[key] = self._lay_out(read, bounds, mask)
        layout: _Layout = read.step.notes[key]
        return layout

    def _lay_out(self, read: Read, bounds: _Bounds, mask: Tensor | None) -> _Layout:
        part = read.part
        heads, n = part.size
        page = part.positions // self.page  # [1 | h, N]
        own = read.q_positions // self.page  # [R]
        seen = page.new_ones(1, len(own), n, dtype=torch.bool) if mask is None else mask  # [1 | h, R, N]
        rivals = seen & (page[:, None] < own[:, None])  # the rest of what is seen is read in any case
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            rivals[:, :, slots] &= (delta == 0)[:, None]
        left = self.most - (seen & ~rivals).sum(-1, keepdim=True)  # [1 | h, R, 1]
        must, rivals = seen & ~rivals, rivals.expand(heads, -1, -1)
        pages = torch.cat((bounds.pages, torch.arange(bounds.upto, int(own.max()), device=page.device)))
        column = torch.searchsorted(pages, page.contiguous()).expand(heads, -1)  # [h, N]; len(pages) = none of them
        of_row = column[:, None].expand_as(rivals)
        rows = torch.zeros(heads, len(own), len(pages) + 1, dtype=torch.int32, device=page.device)
        rows = rows.scatter_add(2, of_row, rivals.int())[..., :-1]  # [h, R, pages]
        known = len(bounds.pages)
        partial = rows > 0
        partial[..., :known] &= rows[..., :known] != bounds.rows[:, None]
        own_bounds = partial.any(0).any(0).nonzero()[:, 0].tolist()
        return _Layout(must, rivals, left, column, rows, partial, own_bounds)

    def _values(self, read: Read, bounds: _Bounds, layout: _Layout) -> Tensor:
        """What each page promises each row, [h, R, pages]; `layout.rows` of it are rivals that the row sees.

        Pages of which a row sees all that is stored have their bounds; the others (filled by this step, or at the edge
        of a window) get bounds of their own.
        """
        rows, known = layout.rows, len(bounds.pages)
        value = rows.new_full(rows.shape, float("-inf"), dtype=torch.float32)
        value[..., :known] = promises(read.q, bounds.low, bounds.high)
        value.masked_fill_(rows == 0, float("-inf"))
        for c in layout.own_bounds:
            here = layout.column == c  # [h, N]
            slots = here.any(0).nonzero()[:, 0]
            k = read.part.take(slots.expand(len(here), -1))[0][:, None]  # [h, 1, m, D]
            read.count_keys(len(here) * len(slots))
            among = (layout.rivals & here[:, None])[:, :, slots, None]  # [h, R, m, 1]
            low = k.masked_fill(~among, float("inf")).amin(2)  # [h, R, D]
            high = k.masked_fill(~among, float("-inf")).amax(2)
            up, down = split(read.q, len(here))
            exact = (up * high[:, None] + down * low[:, None]).sum(-1).amax(1)  # [h, R]
            value[..., c] = torch.where(layout.partial[..., c], exact, value[..., c])
        return value


@dataclass(frozen=True)
class _Layout:
    """Who sees what of which page, for some rows of one span."""

    must: Tensor  # bool [1 | h, R, N]: read in any case
    rivals: Tensor  # bool [h, R, N]: read if their page is chosen
    left: Tensor  # [1 | h, R, 1]: how many of these
    column: Tensor  # [h, N]: the page among all that are ranked; as many as there are: none of them
    rows: Tensor  # int32 [h, R, pages]: rivals that a row sees
    partial: Tensor  # bool [h, R, pages]: it does not see all that are stored
    own_bounds: list[int]  # pages of which that is so for some row


@dataclass(frozen=True)
class _Bounds:
    """Smallest and largest keys of all pages below `upto`, of rows that may lie in other slots than their positions or
    be missing. Tensors are never written to, so forks share them."""

    pages: Tensor  # int64 [P], increasing: pages of which some head stores rows
    rows: Tensor  # int64 [1 | h, P]: how many
    low: Tensor  # [h, P, D]
    high: Tensor
    upto: int
    start: int  # first slot that is not covered in some head

    @classmethod
    def none(cls, part: Part) -> _Bounds:
        keys = part.keys(0, 0)  # [h, 0, D]
        nothing = torch.empty(0, dtype=torch.int64, device=keys.device)
        return cls(nothing, nothing[None], keys, keys, 0, 0)

    @classmethod
    def of(cls, bounds: PageKeys | _Bounds) -> _Bounds:
        if isinstance(bounds, _Bounds):
            return bounds
        low, high = bounds.known
        pages = torch.arange(bounds.upto, device=low.device)
        return cls(pages, torch.full_like(pages, bounds.size)[None], low, high, bounds.upto, bounds.upto * bounds.size)

    @property
    def known(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    @property
    def bytes(self) -> int:
        return self.pages.nbytes + self.rows.nbytes + self.low.nbytes + self.high.nbytes

    def fork(self) -> _Bounds:
        return self

    def extend(self, part: Part, upto: int, size: int) -> _Bounds:
        """With the pages below `upto`, all of whose rows are committed. Only rows from `start` on are looked at."""
        page = part.positions[:, self.start : part.n] // size  # [1 | h, m]
        fresh = (page >= self.upto) & (page < upto)
        pages = torch.unique(page[fresh])
        column = torch.searchsorted(pages, page.contiguous()).masked_fill(~fresh, len(pages))
        keys = part.keys(self.start, part.n)  # [h, m, D]
        wide = column.expand(keys.shape[0], -1)[..., None].expand_as(keys)
        edge = keys.new_full((keys.shape[0], len(pages) + 1, keys.shape[2]), float("inf"))
        low = edge.scatter_reduce(1, wide, keys, "amin")[:, :-1]
        high = (-edge).scatter_reduce(1, wide, keys, "amax")[:, :-1]
        rows = page.new_zeros(page.shape[0], len(pages) + 1).scatter_add(1, column, fresh.long())[:, :-1]
        if self.pages.numel():
            low, high = torch.cat((self.low, low), 1), torch.cat((self.high, high), 1)
            rows, pages = torch.cat((self.rows, rows), 1), torch.cat((self.pages, pages))
        return _Bounds(pages, rows, low, high, upto, self.start + int((page < upto).sum(1).min()))
