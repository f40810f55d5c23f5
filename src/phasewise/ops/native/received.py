"""Sums the attention weights that every slot receives from many rows, in one native call."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.abi import NoiseStruct, ReceivedCallStruct


class Scoring(NamedTuple):
    """The scale of scores, and how many of the last slots a row sees; None: all."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class Shaping(NamedTuple):
    """A perturbation of scores: Gumbel(0, 1) noise is added, a draw for each row, key, query head and `layer`, and what
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
    def noise(self) -> NoiseStruct | None:
        """The noise as the kernel takes it; None where there is none."""
        if self.seeds is None:
            return None
        apart = self.keys.stride(0) if self.keys.shape[0] > 1 else 0
        return NoiseStruct(
            seeds=self.seeds, rows=self.rows, keys=self.keys, keys_head=apart, heads=self.heads, layer=self.layer
        )  # fmt: skip


def fits(q: Tensor, k: Tensor) -> bool:
    """True if the kernel takes q [R, Hq, D] and k [H, N, D]: as `fit.fits`, with contiguous heads."""
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
    assert lse is None or shaping is None
    out = torch.empty((heads, n))
    call = ReceivedCallStruct(
        q=q, k=k, out=out, ends=array("q", ends), q_row=q.stride(0), q_head=q.stride(1), k_head=k.stride(0),
        k_row=k.stride(1), n=n, rows=rows, heads_q=heads_q, heads=heads, dim=dim, kind=fit.KIND[q.dtype],
        threads=torch.get_num_threads(), window=how.window or 0, scale=how.scale, softcap=how.softcap or 0.0,
        lse=lse, noise=None if shaping is None else shaping.noise, inverse=None if shaping is None else shaping.inverse,
    )  # fmt: skip
    kernels.received(call.address)
    return out
