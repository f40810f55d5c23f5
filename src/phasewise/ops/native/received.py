"""What every slot gets of many rows' weights, in one native call."""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library


class Scoring(NamedTuple):
    """What a score is, and how many of the last slots that there are for a row it sees; None: all."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class Shaping(NamedTuple):
    """What becomes of scores: Gumbel(0, 1) noise is added, a draw for each row, key, query head and `layer`, and what
    then is there multiplied with `inverse` float32 [R].

    `seeds` (None: no noise) and `rows` int64 [R] are those of the rows and their positions, `keys` int32 [1 | H, N]
    positions, `heads` int64 [H] the KV heads by number.
    """

    inverse: Tensor
    seeds: Tensor | None
    rows: Tensor
    keys: Tensor
    heads: Tensor
    layer: int

    @property
    def words(self) -> array[int]:
        """As the kernel takes it (Noise)."""
        assert self.seeds is not None
        apart = self.keys.stride(0) if self.keys.shape[0] > 1 else 0
        first = (self.seeds.data_ptr(), self.rows.data_ptr(), self.keys.data_ptr())
        return array("q", (*first, apart, self.heads.data_ptr(), self.layer))


def fits(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel takes q [R, Hq, D] and k [H, N, D]: as `fit.fits`, with contiguous heads."""
    return q.stride(2) == 1 and fit.fits(q, k, k, None) and library() is not None


def received(
    q: Tensor, k: Tensor, ends: list[int], how: Scoring, lse: Tensor | None = None, shaping: Shaping | None = None
) -> Tensor:
    """The weights of q's rows summed over them and over the query heads of a KV head, float32 [H, N]. Row i sees the
    slots below ends[i] (which do not fall), of these the last `how.window`. The tensors must fit (`fits`).

    `lse` float32 [R, Hq], contiguous, is the log-sum-exp of the rows' scores, where it is known; with `shaping`, which
    changes scores, it is not. Scores, softmax and sums are float32, and do not depend on the number of threads.
    """
    kernels = library()
    assert kernels is not None
    rows, heads_q, dim = q.shape
    heads, n, _ = k.shape
    out, upto = torch.empty((heads, n)), array("q", ends)
    call = array("q", (q.data_ptr(), k.data_ptr(), out.data_ptr(), upto.buffer_info()[0]))
    call.extend((*q.stride()[:2], *k.stride()[:2], n, rows, heads_q, heads, dim))
    call.extend((fit.KIND[q.dtype], torch.get_num_threads(), how.window or 0))
    call.frombytes(struct.pack("2d", how.scale, how.softcap or 0.0))
    assert lse is None or shaping is None
    call.append(0 if lse is None else lse.data_ptr())
    noise = None if shaping is None or shaping.seeds is None else shaping.words
    call.extend((0 if noise is None else noise.buffer_info()[0], 0 if shaping is None else shaping.inverse.data_ptr()))
    kernels.received(call.buffer_info()[0])
    return out
