"""Attention of a slice of a prompt in one native call: many rows, whose keys and values are packed once."""

from __future__ import annotations

import struct
from array import array

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.spans import Seen


def fits(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> bool:
    """Whether the kernel takes q [R, Hq, D] and k, v [H, N, D]: as `fit.fits`, with contiguous heads."""
    return q.stride(2) == 1 and fit.fits(q, k, v, scales) and library() is not None


def causal(
    q: Tensor, k: Tensor, v: Tensor, scale: float | tuple[float, float], scales: tuple[Tensor, Tensor] | None = None,
    seen: Seen | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the last R of N rows, row i seeing 0 .. N-R+i, or as `seen` (without `seats`) has it.
    -> [R, Hq, D]. The tensors must fit (`fits`).

    Scores, softmax and sums are float32; for bfloat16 the weights are rounded to it before they meet the values. What a
    row reads is the same bit for bit however the prompt is sliced. With `scales` bfloat16 [H, N], k and v are int8: a
    row's numbers are its levels times its scale, in q's dtype. `scale` may come with a softcap: a score s becomes
    softcap tanh(s / softcap).
    """
    kernels = library()
    assert kernels is not None
    rows, heads_q, dim = q.shape
    heads, n, _ = k.shape
    of_scores, softcap = scale if isinstance(scale, tuple) else (scale, 0.0)
    out = torch.empty((rows, heads_q, dim), dtype=q.dtype)
    call = array("q", (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()))
    call.extend((*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], n, rows, heads_q, heads, dim))
    call.extend((fit.KIND[q.dtype], torch.get_num_threads()))
    call.frombytes(struct.pack("d", of_scores))
    if scales is None:
        call.extend((0, 0, 0, 0))
    else:
        call.extend([x.data_ptr() for x in scales] + [x.stride(0) for x in scales])
    call.frombytes(struct.pack("d", softcap))
    call.extend((0, 0, 0, 0, 0) if seen is None else seen.words)
    kernels.prefill(call.buffer_info()[0])
    return out
