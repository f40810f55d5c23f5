"""Lines of a prompt's attention map, in blocks: columns (keys that many rows look at) and diagonals (keys at a fixed
distance before the row), chosen by the share of attention that they hold, and attention over nothing else.

A line is one for all query heads that share a KV head. A row reads a block of keys if the block's column is chosen, or
the diagonal at its distance; the first column and the diagonal of the rows' own blocks always are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.step.probe import probe
from phasewise.step.read import Read

Numbers = npt.NDArray[Any]
ROWS = 512  # of a prompt, whose mask is made at once


class AttentionLines(NamedTuple):
    """What is read, by KV head: columns bool [h, B] by block of keys, diagonals bool [h, B] by distance in blocks."""

    columns: Tensor
    diagonals: Tensor

    def of(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Whether rows in blocks [R] read keys in blocks [1 | h, N]: bool [h, R, N]. Nobody asks for later keys."""
        heads = len(self.columns)
        keys = keys.expand(heads, -1)
        away = (rows[:, None] - keys[:, None]).clamp_min(0)  # [h, R, N]
        near = self.diagonals.gather(1, away.flatten(1)).view_as(away)
        return near | self.columns.gather(1, keys)[:, None]

    @property
    def share(self) -> float:
        """Of all pairs of a row's block and a block of keys up to it, the share that is read, over the heads."""
        blocks = torch.arange(self.columns.shape[1], device=self.columns.device)
        causal = blocks[:, None] >= blocks
        read = self.of(blocks, blocks[None]) & causal
        return int(read.sum()) / (int(causal.sum()) * len(self.columns))


def sampled(rows: int, count: int) -> list[int]:
    """At most so many of a prompt's new rows, evenly spread, the last among them: a question may stand anywhere."""
    return sorted({(i + 1) * rows // count - 1 for i in range(count)} - {-1})


def masses(read: Read, some: list[int], size: int) -> Tensor:
    """How much attention `some` rows of a read give to every block of keys, float32 [h, r, B]: 1 in all for each row,
    the mean over the query heads that share a KV head."""
    weights = probe(read, some).mean(1)  # [h, r, N]
    blocks = -(-weights.shape[-1] // size)
    padded = F.pad(weights, (0, blocks * size - weights.shape[-1]))
    return padded.view(*padded.shape[:-1], blocks, size).sum(-1)


def cover(mass: Tensor, at: Tensor, alpha: float) -> AttentionLines:
    """The lines that hold the share `alpha` of mass [h, r, B], the rows being in blocks `at` [r]: one after another,
    that which adds most to what the others hold already. Of equal ones the earlier column, then the nearer diagonal."""
    heads, _, blocks = mass.shape
    own, alike = torch.unique(at, return_inverse=True)  # rows of one block have the same lines
    by_block = mass.new_zeros(heads, len(own), blocks, dtype=torch.float64).index_add_(1, alike, mass.double())
    apart = own[:, None] - torch.arange(blocks, device=own.device)  # [rows, B]
    by_block[:, apart < 0] = 0.0
    by_away = torch.zeros_like(by_block).scatter_add_(2, apart.clamp_min(0).expand_as(by_block), by_block)
    both, rows = torch.stack((by_block, by_away), 1).cpu().numpy(), own.cpu().numpy()
    taken = torch.from_numpy(np.stack([_greedy(each, rows, alpha) for each in both])).to(mass.device)
    return AttentionLines(taken[:, 0], taken[:, 1])


def _greedy(left: Numbers, own: Numbers, alpha: float) -> Numbers:
    """Of one head: bool [2, B], columns and diagonals. `left` float64 [2, rows, B] is what nobody holds yet, by block
    and again by distance, of rows in the blocks `own`, no two in one; it is used up.

    A line that is taken changes what a few others would add: these are summed anew, so nothing is left of rounding.
    """
    _, _, blocks = left.shape
    adds, taken = left.sum(1), np.zeros((2, blocks), dtype=bool)
    enough = (1 - alpha) * adds[0].sum()
    for number in range(2 * blocks):
        if number < 2:  # the first column, the diagonal of the rows' own blocks
            side, place = number, 0
        else:
            side, place = divmod(int(adds.argmax()), blocks)
        rows = np.flatnonzero(own >= place)
        across = own[rows] - place  # where those lie on the other side
        left[side, :, place] = 0.0
        left[1 - side, rows, across] = 0.0
        taken[side, place] = True
        adds[1 - side, across] = left[1 - side][:, across].sum(0)
        adds[taken] = -1.0
        if number and adds[0].clip(0).sum() <= enough:
            break
    return taken


def attend(read: Read, lines: AttentionLines, size: int) -> Tensor:
    """Attention of a read's rows over the lines alone. -> [R, hq, D]"""
    part = read.part
    alone = read.rows is None and part.ids is None and read.view is None and read.span.sees is None
    if alone and not read.late and read.in_order() and read.span.block == 1:
        return _whole(read, lines, size)
    return read.attend(lines.of(read.q_positions // size, part.positions // size))


def _whole(read: Read, lines: AttentionLines, size: int) -> Tensor:
    """The same of all that comes behind the rows that are there, or of a whole prompt, some rows at a time: what a few
    neighbouring ones do not read is passed over."""
    (_, n), start, spec = read.part.size, read.part.n, read.step.model.config.attention[read.layer]
    read.count(n)
    k, v, every = read.part.k, read.part.v, torch.arange(n, device=read.q.device)
    blocks = every[: len(lines.columns[0])]
    chosen = lines.of(blocks[start // size :], blocks[None])  # [h, those of the rows, B]
    out = torch.empty_like(read.q)
    for first in range(start, n, ROWS):
        rows, keys = every[first : first + ROWS], every[: first + ROWS]
        own = rows // size - start // size
        mask = chosen[:, own].repeat_interleave(size, 2)[..., : len(keys)] & (keys <= rows[:, None])
        if spec.window is not None:
            mask &= rows[:, None] - keys < spec.window
        seen, at = (k[:, : len(keys)], v[:, : len(keys)]), slice(first - start, first - start + ROWS)
        out[at] = ops.attention(read.q[at], *seen, mask, spec.scale, spec.softcap)
    return out
