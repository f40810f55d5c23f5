"""Each query reads only the pages whose bounds promise the most (Quest, arXiv 2406.10774).

Promises exact attention over at most `budget` rows per query row and KV head, of which only those are read; the cache
stays whole, so a later query may read any row. Prompts are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import rounded
from phasewise.kv.format import KVShape
from phasewise.kv.pages import PageKeys
from phasewise.kv.part import KVPart
from phasewise.methods.attend._select import grouped
from phasewise.step.plan import EVERYTHING, AttentionPlan, KernelScores, Rivals, Scores, TopK
from phasewise.step.read import Read
from phasewise.step.reference import NEVER, by_unit
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Quest(Method, Attend):
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
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))
    tight: ClassVar[dict[str, object]] = {"page": 4, "budget": 12, "dense_layers": 0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"budget": 512}, {"budget": 256}, {"budget": 128})

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
        keys = TopK(
            PageBounds(self.page), self.most, self.most + 1, unit=self.page, dense_layers=self.dense_layers
        )  # fmt: skip
        return AttentionPlan(keys)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last >= self.most else EVERYTHING

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        """Two keys per head of every page, and for each group of heads the pages' numbers and rows."""
        if layer < self.dense_layers or end <= self.most:
            return 0
        return end // self.page * shape.heads * (2 * shape.dim * shape.dtype.itemsize + 16)


class PageBounds:
    """Scores a page by the upper bound that its smallest and largest keys put on the query's scores."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.kernel = KernelScores(
            PageKeys.key("bounds", page), softmax=False, step=page, vectors=lambda rows: rows // page,
            empty=lambda keys: PageKeys.none("bounds", page, keys),
        )  # fmt: skip

    def index(self, read: Read) -> PageKeys | _Bounds:
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

    def scores(self, read: Read, index: PageKeys | _Bounds, rows: Rivals) -> Scores:
        """Pages of which a row sees all that is stored have their bounds; the others (filled by this step, or at the
        edge of a window) get bounds of their own."""
        pages = rows if rows.unit is not None else by_unit(rows, read.part.positions, read.span.last)
        assert pages.unit is not None and pages.number is not None
        bounds, heads = _Bounds.of(index), read.part.size[0]
        read.count_bytes(bounds.low.nbytes + bounds.high.nbytes)
        count = pages.number.expand(heads, -1, -1)  # [h, R, pages]
        known = upper_bounds(read.q, bounds.low, bounds.high)
        value = known.new_full(count.shape, NEVER)
        value[..., bounds.pages] = known
        partial = count > 0
        partial[..., bounds.pages] &= count[..., bounds.pages] != bounds.rows[:, None]
        column = pages.unit.expand(heads, -1)
        for c in partial.any(0).any(0).nonzero()[:, 0].tolist():
            here = column == c  # [h, N]
            slots = here.any(0).nonzero()[:, 0]
            k = read.part.take(slots.expand(heads, -1))[0][:, None]  # [h, 1, m, D]
            read.count_keys(heads * len(slots))
            among = (rows.rivals & here[:, None])[:, :, slots, None]  # [h, R, m, 1]
            low = k.masked_fill(~among, float("inf")).amin(2)  # [h, R, D]
            high = k.masked_fill(~among, NEVER).amax(2)
            up, down = _signs(read.q, heads)
            exact = (up * high[:, None] + down * low[:, None]).sum(-1).amax(1)  # [h, R]
            value[..., c] = torch.where(partial[..., c], exact, value[..., c])
        if rows.unit is None:  # pages of one row: units are slots
            value = value.gather(2, column[:, None].expand(-1, len(read.q), -1))
        return Scores(value)


def upper_bounds(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that q [R, h * G, D] times a key within the bounds [h, P, D] can be: the largest over the query heads of
    a KV head, float32 [h, R, P]."""
    heads, pages = low.shape[:2]
    up, down = _signs(q, heads)
    each = up.flatten(1, 2) @ high.float().mT + down.flatten(1, 2) @ low.float().mT
    most: Tensor = each.view(heads, q.shape[1] // heads, q.shape[0], pages).amax(1)
    return most


def _signs(q: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """q [R, h * G, D] -> its positive and its negative part, float32 [h, G, R, D]."""
    by_head = grouped(q, heads)
    return by_head.clamp_min(0), by_head.clamp_max(0)


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
    def none(cls, part: KVPart) -> _Bounds:
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

    def extend(self, part: KVPart, upto: int, size: int) -> _Bounds:
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
