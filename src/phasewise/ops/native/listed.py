"""Attention over listed slots in one native call, and the choice of pages that such lists are made of."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.choice import Rest


class Listed(NamedTuple):
    """Rows q [R, Hq, D]: row r of KV head h reads slots[h, r] (int32 [H, R, S]; -1 = none) of k, v [H, N, D] and
    nothing else. `scales` as in Few. With a `rest`, of a single row, what is read counts for the share held alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    rest: Rest | None = None


class Pages(NamedTuple):
    """One row q [1, Hq, D] and the bounds low, high [H, P, D] of the keys of P pages of `size` slots from slot 0 on; or
    one vector for each page, low, without high.

    It is to read `chosen` of them, and the slots from `own` to `n` in any case.
    """

    q: Tensor
    low: Tensor
    high: Tensor | None
    size: int
    chosen: int
    own: int
    n: int


def fits(listed: Listed) -> bool:
    """Whether the kernel takes these rows."""
    return fit.fits(listed.q, listed.k, listed.v, listed.scales) and library() is not None


def attend(spans: Sequence[Listed], scale: float) -> list[Tensor]:
    """Exact attention over what is listed, of spans of one head shape and dtype: [R, Hq, D] each, 0 for rows without a
    slot. A row's result is the same bit for bit whatever else is in the call. Every span must fit (`fits`)."""
    kernels = library()
    assert kernels is not None
    heads_q, dim = spans[0].q.shape[1:]
    out, words, kept = list[Tensor](), array("q"), list[Tensor]()
    for q, k, v, slots, scales, rest in spans:
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        slots = slots.contiguous()
        kept += (q, slots)  # copies must outlive the call
        out.append(torch.empty((q.shape[0], heads_q, dim), dtype=q.dtype))
        words.extend((q.data_ptr(), k.data_ptr(), v.data_ptr(), out[-1].data_ptr(), q.stride(0)))
        words.extend((*k.stride()[:2], *v.stride()[:2], q.shape[0], slots.shape[2], slots.data_ptr()))
        words.extend((0, 0, 0, 0) if scales is None else [x.data_ptr() for x in scales] + [x.stride(0) for x in scales])
        words.extend((0, 0) if rest is None else (rest.held.data_ptr(), rest.mean.data_ptr()))
    call = array("q", (words.buffer_info()[0], len(spans), heads_q, spans[0].k.shape[0], dim))
    call.extend((fit.KIND[spans[0].q.dtype], torch.get_num_threads()))
    call.frombytes(struct.pack("d", scale))
    kernels.attend_listed(call.buffer_info()[0])
    return out


def takes(pages: Pages) -> bool:
    """Whether `choose` does this one."""
    kinds = {x.dtype for x in (pages.q, pages.low, pages.high) if x is not None}
    return len(kinds) == 1 and kinds <= set(fit.KIND) and pages.q.device.type == "cpu" and library() is not None


def choose(spans: Sequence[Pages]) -> list[Tensor]:
    """The slots to read, int32 [H, 1, chosen * size + n - own], increasing: of the pages that promise the most (largest
    sum over d of max(q low, q high), or of q low, over the query heads of a KV head; of equal ones the earlier), and
    the last ones.

    All of one head shape; every one must be taken (`takes`).
    """
    kernels = library()
    assert kernels is not None
    heads_q, dim = spans[0].q.shape[1:]
    heads, out, words, kept = spans[0].low.shape[0], list[Tensor](), array("q"), list[Tensor]()
    for q, low, high, size, chosen, own, n in spans:
        q, low = q.contiguous(), _lined(low)
        kept += (q, low)
        if high is not None:
            kept.append(high := _lined(high))
        out.append(torch.empty((heads, 1, chosen * size + n - own), dtype=torch.int32))
        words.extend((q.data_ptr(), low.data_ptr(), 0 if high is None else high.data_ptr(), low.stride(0)))
        words.append(0 if high is None else high.stride(0))
        words.extend((low.shape[1], size, chosen, own, n, out[-1].data_ptr()))
    call = array("q", (words.buffer_info()[0], len(spans), heads_q, heads, dim))
    call.extend((fit.KIND[spans[0].q.dtype], torch.get_num_threads()))
    kernels.choose_pages(call.buffer_info()[0])
    return out


def _lined(x: Tensor) -> Tensor:
    """[H, P, D] whose pages of a head lie one after the other."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
