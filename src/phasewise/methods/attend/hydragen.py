"""What the requests of a batch have in common is read once for all of them (Hydragen, arXiv 2402.05099).

Promises dense attention's results. Shared beginnings of prompts cost a step one read instead of one per request: rows
read fall from `B * P + sum S` to `P + sum S` for B requests with P rows in common and S of their own, level by level
where beginnings branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.ops.native.spans import BLOCK, Common
from phasewise.step.read import FEW, Read
from phasewise.step.reads import attend_all
from phasewise.step.span import Span

if TYPE_CHECKING:
    from phasewise.kv.prefix import Node


@dataclass(frozen=True)
class Hydragen:
    """Requests that hold the same nodes of the prefix tree have these rows in common: whole blocks of their prompts.
    Their queries meet one copy of them together; each request's own rows come on top, joined by log-sum-exp in float32.

    A level is shared by at least `sharers` requests and has at least `rows` rows. It ends at a multiple of 64 of them
    (of `rows`, if that is less), between two blocks of the native kernel, whose softmax then goes on from level to
    level as if one request had read all: bit for bit what dense attention gives. A request reads alone where its rows
    are not plain: after eviction, under a window that has begun to move, in prompt slices long enough to be matrix
    products of their own. Left out: storing common rows once, and rows that forks have in common beyond their prompt.
    """

    sharers: int = 2
    rows: int = 64

    paper: ClassVar[str] = "arXiv 2402.05099"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"sharers": 1 << 30}
    tight: ClassVar[dict[str, object]] = {"rows": 32}
    everything: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __post_init__(self) -> None:
        for name, least in (("sharers", 2), ("rows", 1)):
            if getattr(self, name) < least:
                raise UserError(f"hydragen: {name}={getattr(self, name)} must be at least {least}")

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        able = tuple((i, id(read.span)) for i, read in enumerate(reads) if _plain(read))
        notes, key = reads[0].step.notes, ("hydragen", able)
        if key not in notes:  # most layers ask the same
            found = self.commons([reads[i].span for i, _ in able])
            notes[key] = [c._replace(members=tuple(able[m][0] for m in c.members)) for c in found]
        return attend_all(reads, notes[key])

    def commons(self, spans: Sequence[Span]) -> list[Common]:
        """What plain `spans` have in common, level by level."""
        paths = [span.kv.nodes for span in spans]
        return self._above(Common(tuple(range(len(paths))), 0, 0, -1), 0, paths)

    def _above(self, below: Common, depth: int, paths: Sequence[Sequence[Node]]) -> list[Common]:
        """The levels above `below`, all of whose members have `depth` nodes in common."""
        found: list[Common] = []
        branches: dict[int, list[int]] = {}
        for m in below.members:
            if len(paths[m]) > depth:
                branches.setdefault(id(paths[m][depth]), []).append(m)
        for members in branches.values():
            if len(members) < self.sharers:
                continue
            end = _in_common([paths[m] for m in members], depth + 1)
            cut = min(self.rows, BLOCK)
            stop = end * paths[members[0]][0].rows // cut * cut
            here = Common(tuple(members), below.stop, stop, below.level + 1)
            if stop - below.stop >= self.rows:
                found.append(here)
            else:  # too little for a level: left to those above
                here = below._replace(members=here.members)
            found += self._above(here, end, paths)
        return found


def _in_common(paths: Sequence[Sequence[Node]], known: int) -> int:
    """How many nodes all paths begin with, at least `known`. In a tree, two paths that meet have come the same way."""
    low, high = known, min(len(path) for path in paths)
    at = high  # mostly all of it
    while low < high:
        if all(path[at - 1] is paths[0][at - 1] for path in paths):
            low = at
        else:
            high = at - 1
        at = (low + high + 1) // 2
    return low


def _plain(read: Read) -> bool:
    """Whether the read's rows see all that its request has computed, each row at the slot of its position."""
    part, window = read.part, read.step.model.config.attention[read.layer].window
    return (
        part.plain
        and part.heads is None
        and part.ids is None
        and read.rows is None
        and read.view is None
        and read.q.shape[0] <= FEW
        and (window is None or max(read.span.positions) < window)
    )
