"""Attention over listed slots in one native call, and the choice of pages that such lists are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.abi import ListedCallStruct, ListedStruct, PagesCallStruct, PagesStruct, Structures
from phasewise.ops.native.choice import UnlistedRest


class Listed(NamedTuple):
    """Rows q [R, Hq, D]: row r of KV head h reads slots[h, r] (int32 [H, R, S]; -1 = none) of k, v [H, N, D] and
    nothing else. `scales` as in Few. With a `rest`, of a single row, what is read counts for the share held alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    rest: UnlistedRest | None = None


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
    """True if the kernel takes these rows."""
    return fit.fits(listed.q, listed.k, listed.v, listed.scales) and library() is not None


def attend(spans: Sequence[Listed], scale: float) -> list[Tensor]:
    """Exact attention over what is listed, of spans of one head shape and dtype: [R, Hq, D] each, 0 for rows without a
    slot. A row's result is the same bit for bit whatever else is in the call. Every span must fit (`fits`)."""
    kernels = library()
    assert kernels is not None
    heads_q, dim = spans[0].q.shape[1:]
    out = [torch.empty((one.q.shape[0], heads_q, dim), dtype=one.q.dtype) for one in spans]
    structs = Structures(ListedStruct, [_struct(one, into) for one, into in zip(spans, out)])
    call = ListedCallStruct(
        spans=structs, count=len(spans), heads_q=heads_q, heads=spans[0].k.shape[0], dim=dim,
        kind=fit.KIND[spans[0].q.dtype], threads=torch.get_num_threads(), scale=scale,
    )  # fmt: skip
    kernels.attend_listed(call.address)
    return out


def _struct(one: Listed, out: Tensor) -> ListedStruct:
    q, k, v, slots, scales, rest = one
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    struct = ListedStruct(
        q=q, k=k, v=v, out=out, q_row=q.stride(0), k_head=k.stride(0), k_row=k.stride(1), v_head=v.stride(0),
        v_row=v.stride(1), rows=q.shape[0], count=slots.shape[2], slots=slots.contiguous(),
    )  # fmt: skip
    if scales is not None:
        struct.k_scale, struct.v_scale = (x.data_ptr() for x in scales)
        struct.k_scale_head, struct.v_scale_head = (x.stride(0) for x in scales)
    if rest is not None:
        struct.held, struct.rest = rest.held.data_ptr(), rest.mean.data_ptr()
    return struct


def takes(pages: Pages) -> bool:
    """True if `choose` does this one."""
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
    heads = spans[0].low.shape[0]
    out, structs = list[Tensor](), list[PagesStruct]()
    for q, low, high, size, chosen, own, n in spans:
        low, high = _lined(low), None if high is None else _lined(high)
        out.append(torch.empty((heads, 1, chosen * size + n - own), dtype=torch.int32))
        structs.append(
            PagesStruct(
                q=q.contiguous(), low=low, high=high, low_head=low.stride(0),
                high_head=0 if high is None else high.stride(0), pages=low.shape[1], size=size, chosen=chosen, own=own,
                n=n, slots=out[-1],
            )
        )  # fmt: skip
    call = PagesCallStruct(
        spans=Structures(PagesStruct, structs), count=len(spans), heads_q=heads_q, heads=heads, dim=dim,
        kind=fit.KIND[spans[0].q.dtype], threads=torch.get_num_threads(),
    )  # fmt: skip
    kernels.choose_pages(call.address)
    return out


def _lined(x: Tensor) -> Tensor:
    """[H, P, D] whose pages of a head lie one after the other."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
