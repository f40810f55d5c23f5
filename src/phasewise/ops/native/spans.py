"""Attention of a list of spans in one native call, each reading its keys and values where they lie."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library

KIND = {torch.float32: 0, torch.bfloat16: 1}
MOST_DIM = 256  # of a head, as in attention.cpp


class Few(NamedTuple):
    """Rows q [R, Hq, D] that read k, v [H, N, D], the last R of the N being their own.

    `sees` bool [R, R] says which of its span's own slots a row reads; None: those before it, and itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sees: Tensor | None = None


def fits(few: Few) -> bool:
    """Whether the kernel takes these rows: a known dtype on the CPU, heads of ordinary size, contiguous rows."""
    q, k, v = few.q, few.k, few.v
    kind = q.dtype
    return (
        kind in KIND
        and k.dtype == kind
        and v.dtype == kind
        and q.device.type == "cpu"
        and q.shape[2] <= MOST_DIM
        and k.stride(2) == 1
        and v.stride(2) == 1
        and library() is not None
    )


def attend(
    spans: Sequence[Few], scale: float, window: int | None = None, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Exact attention of all spans, of one head shape and dtype: out [sum of R, Hq, D], lse float32 [sum of R, Hq].

    Scores, softmax and sums are float32. With a `window`, slots are taken as consecutive positions. What a row reads is
    the same bit for bit whatever else is in the call. Every span must fit (`fits`).
    """
    kernels = library()
    assert kernels is not None
    heads_q, dim = spans[0].q.shape[1:]
    kind = spans[0].q.dtype
    total = sum(span.q.shape[0] for span in spans)
    out = torch.empty((total, heads_q, dim), dtype=kind)
    lse = torch.empty((total, heads_q)) if with_lse else None
    out_at, lse_at = out.data_ptr(), 0 if lse is None else lse.data_ptr()
    out_row, lse_row = heads_q * dim * kind.itemsize, 0 if lse is None else heads_q * 4
    words: list[int] = []
    kept: list[Tensor] = []  # copies that must outlive the call
    for q, k, v, sees in spans:
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
            kept.append(q)
        if sees is not None:
            sees = sees.contiguous()
            kept.append(sees)
        rows = q.shape[0]
        words += (q.data_ptr(), k.data_ptr(), v.data_ptr(), out_at, lse_at)
        words += (q.stride(0), *k.stride()[:2], *v.stride()[:2], k.shape[1], rows)
        words.append(0 if sees is None else sees.data_ptr())
        out_at += rows * out_row
        lse_at += rows * lse_row
    table = array("q", words)
    call = array("q", [table.buffer_info()[0], len(spans), heads_q, spans[0].k.shape[0], dim])
    call.extend([KIND[kind], window or 0, torch.get_num_threads()])
    call.frombytes(struct.pack("d", scale))
    kernels.attend(call.buffer_info()[0])
    return out, lse
