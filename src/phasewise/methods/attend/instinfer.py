"""Attention where the KV lies, with what was left out in the mean (SparF of InstInfer, arXiv 2409.04992).

Promises, per query row and KV head, exact attention over the `k` rows that an approximation by the `r` largest numbers
of the query finds the most important, of which only those are read whole, and the mean of the values for all others.
The drive that computes this is modelled: the rows lie in memory like any other KV, and what would cross the link to a
drive is counted (`link_bytes`). The cache stays whole; prompts are dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import KVShape, rounded
from phasewise.kv.part import Part
from phasewise.methods._amounts import check_amount
from phasewise.methods.attend._select import NEVER, Sorted, best, counted, grouped, listing, share, single
from phasewise.ops.native.choice import SHARE, Ballot, Candidates, Rest, takes
from phasewise.step.choice import VectorChoice
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed
from phasewise.step.span import Span
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class InstInfer:
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
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"r": 0.25, "k": 0.25}, {})
    tight: ClassVar[dict[str, object]] = {"r": 3.0, "k": 12.0, "group": 4}
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __post_init__(self) -> None:
        for name in ("r", "k"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"instinfer: {name}={getattr(self, name)} must be above 0: a share up to 1, or a number"
                )
            check_amount("instinfer", name, getattr(self, name), "rows" if name == "k" else "a query's numbers")
        if self.group < 1:
            raise UserError(f"instinfer: group={self.group} must be at least 1: 1 fetches rows one by one")

    def bind(self, host: Host) -> _InstInfer:
        there = host.model.config.head_dim
        if self.r > there:
            raise UserError(
                f"instinfer: r={self.r:.0f}, but a query has {there} numbers: say at most {there}, or a share up to 1"
            )
        return _InstInfer(self, host)


def fewest(k: float) -> int:
    """The fewest rows of which `k` are not all."""
    if k == 1:
        return 1 << 62
    found = int(k) if k > 1 else max(1, int(1 / (1 - k)) - 1)
    while share(k, found) >= found:
        found += 1
    return found


class _InstInfer:
    def __init__(self, knobs: InstInfer, host: Host) -> None:
        self.knobs, self.counters, config = knobs, host.counters, host.model.config
        self.crossing = 2 * (config.heads + config.kv_heads) * config.head_dim  # numbers, for each row of a layer
        self.most = share(knobs.r, config.head_dim)
        self.choice = VectorChoice(
            ("instinfer", 0), self._candidates, fewest(knobs.k), lambda rows: rows, none=self._none, told=self._told
        )
        self._plan = AttentionPlan(Custom(self.attend, self.choice))

    def _candidates(self, n: int) -> Candidates:
        chosen = share(self.knobs.k, n) - 1  # its own has a share, too
        return Candidates(0, n - 1, 1, chosen, SHARE, False, 0, n, largest=self.most, group=self.knobs.group)

    def _none(self, keys: Tensor) -> _Index:
        return _Index(keys.mT, keys.float().sum(1) if self.knobs.mean else None, 0)

    def _told(self, layers: int) -> None:
        self.counters.link_bytes += layers * self.crossing * torch.bfloat16.itemsize

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if share(self.knobs.k, end) >= end:
            return 0
        return end * shape.heads * shape.dim * shape.dtype.itemsize + shape.heads * shape.dim * 8

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.choice.acts(span) else EVERYTHING

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(reads)
        alone: dict[int, tuple[Read, _Index]] = {}
        for i, read in enumerate(reads):
            n = read.part.size[1]
            if share(self.knobs.k, n) >= n:
                continue
            self._cross(read)
            index = self._index(read)
            if single(read):
                alone[i] = read, index
                continue
            index.add(read.part)
            select, weight, mean = self._select(read, index)
            exact = out[i] = read.attend(select)
            if mean is not None:
                out[i] = (weight * exact.float() + (1 - weight) * mean).to(exact.dtype)
        lists = self._lists(alone)
        if lists:
            rests = [rest for _, rest in lists.values() if rest is not None]
            some = [reads[i] for i in lists]
            for i, result in zip(lists, attend_listed(some, [slots for slots, _ in lists.values()], rests)):
                out[i] = result
        return out

    # ---- what crosses, and what the drive reads
    def _cross(self, read: Read) -> None:
        """A query, a key and a value go down, an output comes back."""
        rows, heads_q, dim = read.q.shape
        self.counters.link_bytes += rows * (2 * heads_q + 2 * read.part.size[0]) * dim * read.q.element_size()

    def _whole_groups(self, read: Read, slots: Tensor) -> None:
        """Rows that are fetched only because they lie in the groups of others."""
        n, size = read.part.size[1], self.knobs.group
        groups = slots[:, 0] // size  # [h, S], increasing
        fresh = torch.ones_like(groups, dtype=torch.bool)
        fresh[:, 1:] = groups[:, 1:] != groups[:, :-1]
        rows = ((groups + 1) * size).clamp_max(n) - groups * size
        read.count_entries(int((rows * fresh).sum()) - slots.numel())

    def _count_rows(self, read: Read, rows: int) -> None:
        """Rows that are read to be put into the index."""
        if self.knobs.mean:
            read.count(rows)
        else:
            read.count_keys(rows * read.part.size[0])

    def _index(self, read: Read) -> _Index:
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
    def _lists(self, alone: Mapping[int, tuple[Read, _Index]]) -> dict[int, tuple[Tensor, Rest | None]]:
        """For single rows: slots int32 [h, 1, S], and what stands for all others."""
        ballots: dict[int, Ballot] = {}
        for i, (read, index) in alone.items():
            read.count_bytes(index.bytes_of(self.most, read.part.n))
            ballot = self.choice.ballot(read, index)
            if takes(ballot):
                ballots[i] = ballot
        lists = counted(ballots)
        found: dict[int, tuple[Tensor, Rest | None]] = {}
        for i, (read, index) in alone.items():
            if i in lists:
                index.upto = max(index.upto, read.part.n)  # the kernel has added them
                found[i] = lists[i], ballots[i].rest
            else:
                index.add(read.part)
                found[i] = self._list(read, index)
            self._whole_groups(read, found[i][0])
        return found

    def _list(self, read: Read, index: _Index) -> tuple[Tensor, Rest | None]:
        """The plain twin of what kernels do with a ballot."""
        part = read.part
        heads, n = part.size
        q, numbers, heat = self._query(read, heads)
        k, v = part.between(n - 1, n)  # its own
        numbers = numbers[:, 0]  # [h, r]
        some = q.gather(3, numbers[:, None, None].expand(*q.shape[:3], -1))  # [h, G, 1, r]
        lines = index.lines[torch.arange(heads, device=q.device)[:, None], numbers][..., : index.upto]  # [h, r, n - 1]
        own = k.float().gather(2, numbers[:, None])  # [h, 1, r]
        keys = torch.cat((lines.float(), own.mT), 2)  # [h, r, n]
        weights = (some @ keys[:, None] / heat).softmax(-1)  # [h, G, 1, n]
        votes = self._ranked(read, weights.sum(1)[:, 0])  # [h, n]
        slots = listing(votes[:, : n - 1], 0, share(self.knobs.k, n) - 1, n - 1, n)
        if index.sums is None:
            return slots, None
        held = weights.gather(3, slots[:, None].long().expand(-1, q.shape[1], -1, -1)).sum(-1)  # [h, G, 1]
        return slots, Rest(held.flatten(), (index.sums + v.float()[:, 0]) / n)

    def _ranked(self, read: Read, votes: Tensor) -> Tensor:
        """What the rows that a single row reads are ranked by, [h, n]: here what they are thought to weigh."""
        return votes

    def _select(self, read: Read, index: _Index) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same for rows with structure, windows or caches with gaps: what each reads, bool [h, R, N], and its
        weight [R, hq, 1] and mean [R, hq, D] of what it sees."""
        part, rows = read.part, Sorted.of(read, 0, 1)
        heads, n = part.size
        q, numbers, heat = self._query(read, heads)
        chosen = torch.zeros_like(q[:, 0], dtype=torch.bool).scatter_(2, numbers, True)[:, None]  # [h, 1, R, D]
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
        count = rows.seen.sum(-1, keepdim=True)  # [1 | h, R, 1]
        most = torch.tensor([[share(self.knobs.k, int(c)) for c in line] for line in count[..., 0]])[..., None]
        left = most.to(count.device) - rows.must.sum(-1, keepdim=True)
        select = rows.must | best(weights.sum(1), rows.rivals.expand(heads, -1, -1), left)
        held = (weights * select[:, None]).sum(-1)  # [h, G, R]
        mean = self._mean(read, index, rows, fresh_v, count)
        by_head = None if mean is None else mean.transpose(0, 1).repeat_interleave(held.shape[1], 1)
        return select, held.flatten(0, 1).T[..., None], by_head

    def _mean(self, read: Read, index: _Index, rows: Sorted, fresh: Tensor, count: Tensor) -> Tensor | None:
        """Of the values that each row sees, [h, R, D]."""
        part = read.part
        if index.sums is None:
            return None
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

    def add(self, part: Part) -> None:
        """The committed rows that are missing."""
        if self.upto < part.n:
            k, v = part.between(self.upto, part.n)
            self.lines[..., self.upto : part.n] = k.mT
            if self.sums is not None:
                self.sums += v.float().sum(1)
            self.upto = part.n
