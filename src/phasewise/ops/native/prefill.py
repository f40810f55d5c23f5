"""Attention of a slice of a prompt in one native call: many rows, whose keys and values are packed once."""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.abi import PrefillCallStruct
from phasewise.ops.native.spans import SeenWindow


def fits(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> bool:
    """True if the kernel takes q [R, Hq, D] and k, v [H, N, D]: as `fit.fits`, with contiguous heads."""
    return q.stride(2) == 1 and fit.fits(q, k, v, scales) and library() is not None


def causal(
    q: Tensor, k: Tensor, v: Tensor, scale: float | tuple[float, float], scales: tuple[Tensor, Tensor] | None = None,
    seen: SeenWindow | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the last R of N rows, row i seeing 0 .. N-R+i, or as `seen` (without `seats`) has it.
    -> [R, Hq, D]. The tensors must fit (`fits`).

    What a row reads is the same bit for bit however the prompt is sliced; for the rest see `masked`.
    """
    return _prefill(q, (k, v, scales), scale, seen)[0]


def causal_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scales: tuple[Tensor, Tensor] | None = None,
    seen: SeenWindow | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`causal`, and the log-sum-exp of the scores, float32 [R, Hq]."""
    out, lse = _prefill(q, (k, v, scales), scale, seen, with_lse=True)
    assert lse is not None
    return out, lse


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | tuple[float, float],
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention of R rows over the slots that they see: bool [1 | H, R, N] (None: all of them). -> [R, Hq, D]. The
    tensors must fit (`fits`); a row that sees nothing reads 0.

    Blocks of slots that no row of a few neighbours sees are passed over. Scores, softmax and sums are float32; for
    bfloat16 the weights are rounded to it before they meet the values. With `scales` bfloat16 [H, N], k and v are int8:
    a row's numbers are its levels times its scale, in q's dtype. `scale` may come with a softcap: a score s becomes
    softcap tanh(s / softcap).
    """
    return _prefill(q, (k, v, scales), scale, SeenWindow(0, block=q.shape[0]), mask)[0]


def _prefill(
    q: Tensor, kv: tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None], scale: float | tuple[float, float],
    seen: SeenWindow | None, mask: Tensor | None = None, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One call: what is read of k, v and their scales, and the log-sum-exp of each query's scores, float32 [R, Hq], if
    asked for."""
    kernels, (k, v, scales) = library(), kv
    assert kernels is not None
    rows, heads_q, dim = q.shape
    heads, n, _ = k.shape
    of_scores, softcap = scale if isinstance(scale, tuple) else (scale, 0.0)
    out = torch.empty((rows, heads_q, dim), dtype=q.dtype)
    lse = torch.empty((rows, heads_q)) if with_lse else None
    call = PrefillCallStruct(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), q_row=q.stride(0), q_head=q.stride(1),
        k_head=k.stride(0), k_row=k.stride(1), v_head=v.stride(0), v_row=v.stride(1), n=n, rows=rows, heads_q=heads_q,
        heads=heads, dim=dim, kind=fit.KIND[q.dtype], threads=torch.get_num_threads(), scale=of_scores,
        softcap=softcap, lse=0 if lse is None else lse.data_ptr(),
    )  # fmt: skip
    if scales is not None:
        call.k_scale, call.v_scale = (x.data_ptr() for x in scales)
        call.k_scale_head, call.v_scale_head = (x.stride(0) for x in scales)
    if seen is not None:
        call.sight = seen.struct
    if mask is not None:
        mask = mask if mask.stride(2) == 1 else mask.contiguous()
        call.sees, call.sees_row = mask.data_ptr(), mask.stride(1)
        call.sees_head = 0 if mask.shape[0] == 1 else mask.stride(0)
    kernels.prefill(call.address)
    return out, lse
