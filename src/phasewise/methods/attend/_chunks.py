"""Prompts that choose what they read chunk by chunk, and lists whose rows are read as if nothing lay between them.

A chunk of a prompt is `chunk` positions, counted from the text's beginning. All of its rows read the first rows, those
right before the chunk and, of the others before it, those of most votes, which the mean of the chunk's queries gives;
and each reads the chunk's own rows up to itself. With `Close`, a row and what it reads stand one behind the other, as
they do in the list: keys are turned to where they seem to be, so no distance is longer than a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.ops.native.choice import UnlistedRest
from phasewise.step.read import Read
from phasewise.step.reference import IN_TEXT, best

ENTRIES = 1 << 20  # rows of keys that are gathered at a time
Ranked = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Queries as they vote [R, hq, D], what stands for keys [h, N, D], among which -> votes, as of a `Voter`."""


@dataclass(frozen=True)
class Close:
    """A `Reader` of rows that stand one behind the other."""

    model: Model

    def listed(
        self, reads: Sequence[Read], slots: Sequence[Tensor], rests: Sequence[UnlistedRest] = ()
    ) -> list[Tensor]:
        """Single rows, over int32 [h, 1, S] each, increasing, with themselves at the end. -> [1, hq, D] each"""
        return [self._near(read, of_rows.long(), None) for read, of_rows in zip(reads, slots)]

    def masked(self, read: Read, select: Tensor) -> Tensor:
        """Any rows, over bool [1 | h, R, N] of what they see. -> [R, hq, D]"""
        heads, mask = read.part.size[0], read.mask()
        mask = (select if mask is None else mask & select).expand(heads, -1, -1)
        at = read.part.positions[:, None].expand_as(mask)
        most = int(mask.sum(-1).max())
        index = at.masked_fill(~mask, int(at.max()) + 1).sort(dim=-1, stable=True).indices[..., :most]
        return self._near(read, index, mask.gather(2, index))

    def moved(self, layer: int, keys: Tensor, slots: Tensor, end: int) -> Tensor:
        """Keys [h, m, D] of slots [m] that are positions, as if they were those right before `end`."""
        seems = end - len(slots) + torch.arange(len(slots), device=slots.device)
        return self.model.rotate(layer, keys, seems - slots)

    def _near(self, read: Read, index: Tensor, valid: Tensor | None) -> Tensor:
        """Slots [h, R, S] in the order of their positions; those that are not `valid` are not read."""
        heads, _, slots = index.shape
        rows = max(1, ENTRIES // (heads * slots))
        at, out = read.q_positions, torch.empty_like(read.q)
        for start in range(0, len(at), rows):
            here = slice(start, start + rows)
            there = None if valid is None else valid[:, here]
            out[here] = self._pairs(read, read.q[here], at[here], index[:, here], there)
        read.count_entries(index.numel() if valid is None else int(valid.sum()))
        return out

    def _pairs(self, read: Read, q: Tensor, at: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
        """Every row of every KV head has keys of its own."""
        (heads, rows, slots), part = index.shape, read.part
        spec = read.step.model.config.attention[read.layer]
        place = torch.arange(slots, device=index.device)
        count = slots if valid is None else valid.sum(-1)[..., None]
        stands = part.positions.expand(heads, -1).gather(1, index.flatten(1)).view_as(index)
        k, v = part.take(index.flatten(1))
        k = self.model.rotate(read.layer, k, (at[:, None] + 1 - count + place - stands).flatten(1))
        k, v = (x.reshape(heads * rows, slots, x.shape[2]) for x in (k, v))
        by_pair = q.reshape(rows, heads, -1, q.shape[2]).transpose(0, 1).reshape(1, -1, q.shape[2])
        mask = None if valid is None else valid.reshape(heads * rows, 1, slots)
        out = ops.attention(by_pair, k, v, mask, spec.scale, spec.softcap)
        return out.view(heads, rows, -1, q.shape[2]).transpose(0, 1).reshape(q.shape)


class Sizes(NamedTuple):
    """Rows that are read: the first, those chosen, the last before a chunk; and of a chunk."""

    first: int
    k: int
    local: int
    chunk: int

    @property
    def before(self) -> int:
        """Rows before a chunk that it reads, at most."""
        return self.first + self.k + self.local


class Chunks:
    """A prompt's rows. `turned`: their queries as they vote, [R, hq, D]; `stand`: what stands for the keys of slots
    start .. stop - 1, [h, stop - start, D]; `dense` layers choose nothing: there the last rows count most."""

    def __init__(
        self, sizes: Sizes, close: Close | None, turned: Callable[[Read], Tensor],
        stand: Callable[[Read, int, int], Tensor], ranked: Ranked, dense: int,
    ) -> None:  # fmt: skip
        self.sizes, self.close, self.dense, self.reader = sizes, close, dense, close or IN_TEXT
        self.turned, self.stand, self.ranked = turned, stand, ranked

    def acts(self, end: int) -> bool:
        """Whether a prompt that ends before this position has chunks that choose."""
        return self.choices(0, end) > 0

    def choices(self, start: int, end: int) -> int:
        """How many chunks with positions from `start` on, below `end`, choose."""
        sizes = self.sizes
        return max(0, (end - 1) // sizes.chunk - max(start // sizes.chunk - 1, sizes.before // sizes.chunk))

    def __call__(self, read: Read) -> Tensor | None:
        """[R, hq, D]; None: the rows read everything."""
        late = read.layer < self.dense
        if not self.acts(read.span.last + 1) or (late and self.close is None):
            return None
        spec = read.step.model.config.attention[read.layer]
        part, span = read.part, read.span
        alone = part.plain and not part.n and part.ids is None and read.rows is None and read.view is None
        if alone and span.sees is None and span.block == 1 and spec.softcap is None and spec.window is None:
            return self._in_order(read, late)
        return self.reader.masked(read, self._select(read, late))

    def _in_order(self, read: Read, late: bool) -> Tensor:
        """A whole prompt, whose rows see all before them."""
        sizes, (heads, n), scale = self.sizes, read.part.size, read.scale
        k, v, out = read.part.k, read.part.v, torch.empty_like(read.q)
        upto = min(n, (sizes.before // sizes.chunk + 1) * sizes.chunk)
        read.count(upto)
        out[:upto] = ops.causal(read.q[:upto], k[:, :upto], v[:, :upto], scale)
        if not late:
            read.count_keys(heads * n)
            stands, turned = self.stand(read, 0, n), self.turned(read)
        every = torch.arange(n, device=k.device)
        for start in range(upto, n, sizes.chunk):
            rows, end = slice(start, start + sizes.chunk), start - sizes.local
            if late:
                chosen = every[end - sizes.k : end]
            else:
                votes = self.ranked(turned[rows].float().mean(0)[None], stands[:, sizes.first : end], None)[0, 0]
                read.count_keys(heads * (end - sizes.first))
                chosen = votes.sort(descending=True, stable=True).indices[: sizes.k].sort().values + sizes.first
            far, near = torch.cat((every[: sizes.first], chosen)), slice(end, start + sizes.chunk)
            moved = k[:, far] if self.close is None else self.close.moved(read.layer, k[:, far], far, end)
            keys = torch.cat((moved, k[:, near]), 1)
            read.count(keys.shape[1])
            out[rows] = ops.causal(read.q[rows], keys, torch.cat((v[:, far], v[:, near]), 1), scale)
        return out

    def _select(self, read: Read, late: bool) -> Tensor:
        """What every row reads, bool [h, R, N], where rows are missing or hidden, or a part of the prompt is given."""
        sizes, (heads, n) = self.sizes, read.part.size
        at, rows, mask = read.q_positions, read.part.positions, read.mask()
        chunks = at // sizes.chunk * sizes.chunk
        always = (rows[:, None] < sizes.first) | (rows[:, None] >= (chunks - sizes.local)[:, None])  # [1 | h, R, N]
        always = always | (chunks <= sizes.before)[:, None]
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            always[:, :, slots] |= (delta != 0)[:, None]
        seen = always.new_ones(1, len(at), n) if mask is None else mask
        rivals = seen & ~always
        select = (seen & always).expand(heads, -1, -1).clone()
        stands, turned = (None, None) if late else (self.stand(read, 0, n), self.turned(read))
        read.count_keys(heads * n)
        for chunk in sorted({int(start) for start in chunks if start > sizes.before}):
            here = torch.nonzero(chunks == chunk)[:, 0]
            among = rivals[:, here]
            if stands is None or turned is None:
                votes = rows.float()[:, None].expand(-1, len(here), -1)
            else:
                mean = turned[here].float().mean(0)[None].expand(len(here), -1, -1)
                votes = self.ranked(mean, stands, among)
            wide = max(len(votes), len(among))
            votes, among = votes.expand(wide, -1, -1), among.expand(wide, -1, -1)
            select[:, here] |= best(votes, among, among.new_full((1, 1, 1), sizes.k, dtype=torch.int64))
        return select
