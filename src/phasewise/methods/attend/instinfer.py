"""Attention where the KV lies, with what was left out in the mean (SparF of InstInfer, arXiv 2409.04992).

Promises, per query row and KV head, exact attention over the `k` rows that an approximation by the `r` largest numbers
of the query finds the most important, of which only those are read whole, and the mean of the values for all others.
The drive that computes this is modelled: the rows lie in memory like any other KV, and what would cross the link to a
drive is counted (`link_bytes`). The cache stays whole; prompts are dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import rounded
from phasewise.kv.format import KVShape
from phasewise.kv.part import KVPart
from phasewise.methods._amounts import check_amount
from phasewise.methods.attend._select import grouped
from phasewise.step.plan import EVERYTHING, AttentionPlan, KernelScores, Rivals, Scores, TopK, share
from phasewise.step.read import Read
from phasewise.step.reference import NEVER
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class InstInfer(Method):
    """`r` of a query's numbers, those of the largest magnitude (summed over the query heads that share a KV head), give
    approximate weights: a softmax whose temperature makes up for the numbers left out. The row itself and the `k` - 1
    others of most weight are read exactly; they count for the share of weight that they have, `mean` lets the mean of
    all values that the row sees stand for the rest. `r` and `k` up to 1 are shares of the head's size and of the rows
    that are seen, above 1 numbers.

    A second copy of the keys, one line for each number of a head, and for `mean` the sum of the values lie beside the
    rows, within the KV budget. The drive reads rows in groups of `group`, so single rows are counted with the others of
    their groups (rows of drafts and replays without). Texts that are not longer than `k` are read whole, nothing of
    them is counted on the link. Left out: the dense mode on the drive, several drives, and lists for each query head of
    its own.
    """

    r: float = 0.125
    k: float = 0.125
    group: int = 16
    mean: bool = True

    paper: ClassVar[str] = "arXiv 2409.04992"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"r": 1.0, "k": 1.0}
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"r": 0.25, "k": 0.25}, {})
    tight: ClassVar[dict[str, object]] = {"r": 3.0, "k": 12.0, "group": 4}

    def __post_init__(self) -> None:
        for name in ("r", "k"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"instinfer: {name}={getattr(self, name)} must be above 0: a share up to 1, or a number"
                )
            check_amount("instinfer", name, getattr(self, name), "rows" if name == "k" else "a query's numbers")
        if self.group < 1:
            raise UserError(f"instinfer: group={self.group} must be at least 1: 1 fetches rows one by one")

    def bind(self, host: Host) -> SparFRuntime:
        there = host.model.config.head_dim
        if self.r > there:
            raise UserError(
                f"instinfer: r={self.r:.0f}, but a query has {there} numbers: say at most {there}, or a share up to 1"
            )
        return SparFRuntime(self, host)


def fewest(k: float) -> int:
    """The fewest rows of which `k` are not all."""
    if k == 1:
        return 1 << 62
    found = int(k) if k > 1 else max(1, int(1 / (1 - k)) - 1)
    while share(k, found) >= found:
        found += 1
    return found


class SparFRuntime(Attend):
    """InstInfer at work, and its scorer."""

    def __init__(self, knobs: InstInfer, host: Host, ranked: Callable[[Read, Tensor], Tensor] | None = None) -> None:
        """`ranked`: makes of the votes [h, R, N] of a read's rows what they are ranked by; kernels make nothing of
        them."""
        self.ranked = ranked
        self.knobs, self.counters, config = knobs, host.counters, host.model.config
        self.crossing = 2 * (config.heads // config.kv_heads + 1) * config.head_dim * host.model.dtype.itemsize
        self.most = share(knobs.r, config.head_dim)
        kernel = KernelScores(("instinfer", 0), every=True, largest=self.most, empty=self._none)
        self.kernel = kernel if ranked is None else None
        self.keys = TopK(self, knobs.k, fewest(knobs.k), fetch=knobs.group, chose=self._cross)
        self._plan = AttentionPlan(self.keys)

    def _none(self, keys: Tensor) -> _Index:
        return _Index(keys.mT, keys.float().sum(1) if self.knobs.mean else None, 0)

    def _cross(self, rows: int, layers: int, heads: int) -> None:
        """For each row and KV head its queries, a key and a value go down, outputs come back."""
        self.counters.link_bytes += rows * heads * self.crossing

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if share(self.knobs.k, end) >= end:
            return 0
        return end * shape.heads * shape.dim * shape.dtype.itemsize + shape.heads * shape.dim * 8

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last + 1 >= self.keys.least else EVERYTHING

    # ---- what the drive reads
    def _count_rows(self, read: Read, rows: int) -> None:
        """Rows that are read to be put into the index."""
        if self.knobs.mean:
            read.count(rows)
        else:
            read.count_keys(rows * read.part.size[0])

    def index(self, read: Read) -> _Index:
        """With room for all rows of the part; those that are missing are yet to be added."""
        part = read.part
        known = part.derived.get(("instinfer", part.slab))
        found = known if isinstance(known, _Index) else self._none(part.keys(0, 0))
        self._count_rows(read, part.n - found.upto)
        found = found.roomy(rounded(part.size[1]))
        if found is not known:
            part.derived.keep(("instinfer", part.slab), found)
        return found

    # ---- which rows, and how much they weigh
    def scores(self, read: Read, index: _Index, rows: Rivals) -> Scores:
        part = read.part
        heads, n = part.size
        index.add(part)
        q, numbers, heat = self._query(read, heads)
        chosen = torch.zeros_like(q[:, 0], dtype=torch.bool).scatter_(2, numbers, True)[:, None]  # [h, 1, R, D]
        if rows.single:
            read.count_bytes(index.bytes_of(self.most, part.n))
        else:
            read.count_bytes(index.bytes_of(index.lines.shape[1], index.upto))
            self._count_rows(read, part.fresh)
        fresh_k, fresh_v = part.between(part.n, n)
        keys = torch.cat((index.known.float(), fresh_k.float().mT), 2)[:, None]  # [h, 1, D, N]
        logits = q.masked_fill(~chosen, 0.0) @ keys / heat  # [h, G, R, N]
        if read.view is not None and read.view.moved is not None:  # the query as moved rows meet it
            slots, delta = read.view.moved
            turned = grouped(read.step.model.rotate(read.layer, read.q, -delta[:, None]), heads) * read.scale
            logits[..., slots] = turned.masked_fill(~chosen, 0.0) @ keys[..., slots] / heat
        weights = logits.masked_fill(~rows.seen[:, None], NEVER).softmax(-1)
        votes = weights.sum(1)  # what rows are thought to weigh
        votes = votes if self.ranked is None else self.ranked(read, votes)
        return Scores(votes, weights, self._mean(read, index, rows, fresh_v))

    def _mean(self, read: Read, index: _Index, rows: Rivals, fresh: Tensor) -> Tensor | None:
        """Of the values that each row sees, [h, R, D]."""
        part = read.part
        if index.sums is None:
            return None
        count = rows.seen.sum(-1, keepdim=True)  # [1 | h, R, 1]
        seen = rows.seen.to(index.sums.dtype).expand(part.size[0], -1, -1)  # [h, R, N]
        if bool(rows.seen[..., : part.n].all()):
            return (index.sums[:, None] + seen[..., part.n :] @ fresh.to(seen.dtype)) / count
        read.count_keys(part.n * part.size[0])  # as many bytes of values
        return seen @ part.v.to(seen.dtype) / count

    def _query(self, read: Read, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """q float32 [h, G, R, D], scaled; the numbers that are looked at, int64 [h, R, r]; what logits over these are
        divided by, [h, G, R, 1]."""
        q = grouped(read.q, heads)
        size = q.abs()
        numbers = size.sum(1).topk(share(self.knobs.r, q.shape[3]), -1).indices.sort(-1).values
        looked = size.gather(3, numbers[:, None].expand(-1, q.shape[1], -1, -1)).sum(-1, keepdim=True)
        heat = (looked / size.sum(-1, keepdim=True).clamp_min(1e-30)).sqrt().clamp_min(1e-15)
        return q * read.scale, numbers, heat


class _Index:
    """Keys of the first `upto` slots once more, a line for each number of a head: `lines` [h, D, room]; and the sum of
    their values, float32 [h, D], or None. Who holds it alone writes there."""

    def __init__(self, lines: Tensor, sums: Tensor | None, upto: int) -> None:
        self.lines, self.sums, self.upto = lines, sums, upto

    @property
    def vectors(self) -> Tensor:
        """The keys as `Standing` has them."""
        return self.lines.mT[None]

    @property
    def bytes(self) -> int:
        return self.bytes_of(*self.lines.shape[1:])

    def bytes_of(self, lines: int, slots: int) -> int:
        """Of so many lines of a head, so far, and the sum."""
        sums = 0 if self.sums is None else self.sums.nbytes
        return self.lines.shape[0] * lines * slots * self.lines.itemsize + sums

    @property
    def known(self) -> Tensor:
        """[h, D, upto]."""
        return self.lines[..., : self.upto]

    def fork(self) -> _Index:
        return _Index(self.lines.clone(), None if self.sums is None else self.sums.clone(), self.upto)

    def roomy(self, room: int) -> _Index:
        if room <= self.lines.shape[2]:
            return self
        lines = self.lines.new_empty((*self.lines.shape[:2], room))
        lines[..., : self.upto] = self.known
        return _Index(lines, None if self.sums is None else self.sums.clone(), self.upto)

    def add(self, part: KVPart) -> None:
        """The committed rows that are missing."""
        if self.upto < part.n:
            k, v = part.between(self.upto, part.n)
            self.lines[..., self.upto : part.n] = k.mT
            if self.sums is not None:
                self.sums += v.float().sum(1)
            self.upto = part.n
