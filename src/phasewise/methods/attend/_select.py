"""What selectors of single rows share: something kept for each cached row, votes, and the rows of most votes beside
those that are read in any case.

A query row at position t reads, of the rows it sees, those at positions below `first`, those of the last `local`
positions up to its own, and of the others those of most votes, as many as fit. Rows that a view moves, as streaming
does with its sinks, are read in any case. Which rows that are is decided per query row from positions, so drafts,
replays and caches with gaps choose as single steps would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from phasewise.kv.buffer import rounded
from phasewise.kv.vectors import Kept
from phasewise.ops.native import choice as native
from phasewise.step.choice import VectorChoice
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed

NEVER = float("-inf")


def share(value: float, whole: int) -> int:
    """Up to 1 a share of `whole`, rounded up, above a number; within 1 and `whole`."""
    return max(1, min(whole, -int(-value * whole // 1) if value <= 1 else int(value)))


def single(read: Read) -> bool:
    """Whether it is one row that sees all before it, none missing, in slots of their positions."""
    part = read.part
    return part.plain and part.n == read.span.positions[0] and read.q.shape[0] == 1 and read.mask() is None


def grouped(q: Tensor, heads: int) -> Tensor:
    """q [R, h * G, D] -> float32 [h, G, R, D]."""
    return q.float().view(q.shape[0], heads, -1, q.shape[2]).permute(1, 2, 0, 3)


def kept(read: Read, name: str, width: int, make: Callable[[int, int], Tensor]) -> Kept:
    """What is kept by this name for all committed rows; `make(start, stop)` [h, stop - start, width] is asked for what
    is missing, which costs reading their keys."""
    part = read.part
    key = name, part.slab
    found = part.derived.get(key)
    if not isinstance(found, Kept):
        found = Kept(part.keys(0, 0).new_empty((part.size[0], 0, width)))
    if found.upto < part.n:
        read.count_keys((part.n - found.upto) * part.size[0])
        found = found.roomy(rounded(part.size[1]))
        found.add(make(found.upto, part.n))
        part.derived.keep(key, found)
    return found


@dataclass(frozen=True)
class Sorted:
    """The rows N of a part as R query rows meet them, bool [1 | h, R, N] each."""

    seen: Tensor
    must: Tensor  # read in any case
    rivals: Tensor  # the rest of what is seen

    @classmethod
    def of(cls, read: Read, first: int, local: int) -> Sorted:
        mask, (_, n) = read.mask(), read.part.size
        at, rows = read.q_positions[:, None], read.part.positions[:, None]  # [R, 1], [1 | h, 1, N]
        always = (rows < first) | (rows > at - local)  # [1 | h, R, N]
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            always[:, :, slots] |= (delta != 0)[:, None]
        seen = always.new_ones(1, len(at), n) if mask is None else mask
        return cls(seen, seen & always, seen & ~always)


def tally(logits: Tensor, among: Tensor | None) -> Tensor:
    """Soft votes: how much of each head's softmax over the candidates every row gets, summed over a group's heads.

    logits [g, H, R, N], among bool [1 | g, R, N] -> logarithms [g, R, N], in which nothing is too small to be ranked.
    """
    if among is not None:
        logits = logits.masked_fill(~among[:, None], NEVER)
    return logits.log_softmax(-1).logsumexp(1)


def best(votes: Tensor, rivals: Tensor, left: Tensor) -> Tensor:
    """The `left` [1 | h, R, 1] rivals of most votes [1 | h, R, N], of equal ones the earlier: bool [1 | h, R, N]."""
    order = votes.masked_fill(~rivals, NEVER).sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return rivals & (torch.empty_like(order).scatter_(-1, order, place) < left)


def listing(votes: Tensor, first: int, count: int, own: int, n: int) -> Tensor:
    """For a single row, given the votes [h, own - first] of the slots between: the first slots, `count` of those
    between, and those from `own` to n, int32 [h, 1, S], increasing."""
    chosen = votes.topk(count, -1).indices.sort(-1).values + first
    every = torch.arange(n, device=votes.device, dtype=chosen.dtype).expand(len(chosen), -1)
    return torch.cat((every[:, :first], chosen, every[:, own:]), 1)[:, None].int()


class Voter(Protocol):
    """How a selector ranks rows, by something that stands for their keys."""

    name: str
    choice: VectorChoice  # the same, said as data

    def width(self, dim: int) -> int:
        """Numbers that stand for a key of so many."""
        ...

    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        """What stands for the keys of these slots, [h, stop - start, width]; no other key is read."""
        ...

    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        """How every row ranks the rows that these [h, N, width] stand for, `among` those [1 | h, R, N] (None: all): the
        more the better, [1 | h, R, N]; what it says of others does not matter."""
        ...


class Reader(Protocol):
    """How rows are read that were chosen."""

    def listed(self, reads: Sequence[Read], slots: Sequence[Tensor]) -> Sequence[Tensor]:
        """Single rows, over the slots int32 [h, 1, S] of each, increasing."""
        ...

    def masked(self, read: Read, select: Tensor) -> Tensor:
        """Any rows, over bool [1 | h, R, N] of what they see."""
        ...


class InText:
    """At their places in the text."""

    listed = staticmethod(attend_listed)

    @staticmethod
    def masked(read: Read, select: Tensor) -> Tensor:
        return read.attend(select)


IN_TEXT = InText()


def standing(read: Read, voter: Voter) -> Kept:
    """What stands for the keys of all committed rows of a read."""
    return kept(read, voter.name, voter.width(read.q.shape[2]), partial(voter.stand, read))


def elect(
    reads: Sequence[Read], voter: Voter, rows: tuple[int, int, int], dense: int, reader: Reader = IN_TEXT
) -> list[Tensor | None]:
    """Attention over at most `most` rows per query row and KV head, of `rows` (first, local, most); None where there
    are no more, or the layer is one of the first `dense`. What stands for keys is kept beside the rows; single rows are
    read in one call."""
    first, local, most = rows
    out: list[Tensor | None] = [None] * len(reads)
    alone: dict[int, tuple[Read, Kept]] = {}
    for i, read in enumerate(reads):
        if read.layer < dense or read.part.size[1] <= most:
            continue
        known = standing(read, voter)
        if single(read):
            alone[i] = read, known
        else:
            read.count_bytes(known.known.nbytes)
            out[i] = reader.masked(read, selected(read, voter, known.known, Sorted.of(read, first, local), most))
    lists = listed(voter, alone, first, local, most)
    if lists:
        some = [reads[i] for i in lists]
        for i, result in zip(lists, reader.listed(some, [*lists.values()])):
            out[i] = result
    return out


def listed(
    voter: Voter, alone: Mapping[int, tuple[Read, Kept]], first: int, local: int, most: int
) -> dict[int, Tensor]:
    """The slots that single rows read, int32 [h, 1, S] each, increasing: the first, those of most votes, the last."""
    lists = voted(voter.choice, alone)
    for i in alone.keys() - lists.keys():
        read, known = alone[i]
        read.count_bytes(known.known[:, first : read.part.size[1] - local].nbytes)
        heads, n = read.part.size
        votes = voter.votes(read, known.known[:, first : n - local], None)[:, 0]  # [1 | h, n - local - first]
        lists[i] = listing(votes, first, most - first - local, n - local, n).expand(heads, -1, -1)
    return lists


def voted(choice: VectorChoice, alone: Mapping[int, tuple[Read, Kept]]) -> dict[int, Tensor]:
    """The slots that single rows read, int32 [h, 1, S], of those for which kernels make the choice; what it
    reads is counted."""
    ballots: dict[int, native.Ballot] = {}
    for i, (read, known) in alone.items():
        ballot = choice.ballot(read, known)
        if native.takes(ballot):
            begin, end = ballot.candidates.begin, ballot.candidates.end
            read.count_bytes((min(end, known.upto) - begin) * known.rows[:, :1].nbytes)
            read.count_keys(ballot.candidates.rows(known.upto, known.upto) * known.rows.shape[0])
            ballots[i] = ballot
    return counted(ballots)


def counted(ballots: Mapping[int, native.Ballot]) -> dict[int, Tensor]:
    """`choose` of any that kernels take."""
    shapes: dict[int, list[int]] = {}  # a call takes one
    for i, ballot in ballots.items():
        shapes.setdefault(ballot.k.shape[0], []).append(i)
    lists: dict[int, Tensor] = {}
    for members in shapes.values():
        lists |= zip(members, native.choose([ballots[i] for i in members]))
    return lists


def selected(read: Read, voter: Voter, known: Tensor, rows: Sorted, most: int) -> Tensor:
    """What every row reads, bool [1 | h, R, N], for rows with structure, windows or caches with gaps."""
    part = read.part
    read.count_keys(part.fresh * part.size[0])
    stands = torch.cat((known, voter.stand(read, part.n, part.size[1])), 1)
    votes = voter.votes(read, stands, rows.rivals)
    wide = max(len(votes), len(rows.rivals))
    rivals = rows.rivals.expand(wide, -1, -1)
    left = most - rows.must.sum(-1, keepdim=True)
    return rows.must | best(votes.expand(wide, -1, -1), rivals, left)
