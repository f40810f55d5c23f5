"""Attention of a list of spans in one native call, each reading its keys and values where they lie."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.abi import (
    AttentionCallStruct,
    CommonStruct,
    PlanesStruct,
    SealedStruct,
    SidesStruct,
    SightStruct,
    SpanStruct,
    Structures,
)


class SeenWindow(NamedTuple):
    """The attention window of rows: `window` slots up to their own, and the first `sinks`; or all (0).

    Of their span's own slots, those up to the end of their `block` of so many rows, counted from the span's first.
    `far` [R, Hq, D], contiguous, are the queries that read these first ones, where they are others than q. `seats`
    int64 [R] are the slots that windows are counted from, where they are not those the rows lie in. `bias` float32 [Hq]
    is added to the scores of slot 0, after scale and softcap, in rows that see it; such spans are no members of
    commons, and have no `heads`.
    """

    window: int
    sinks: int = 0
    far: Tensor | None = None
    seats: Tensor | None = None
    block: int = 1
    bias: Tensor | None = None

    @property
    def struct(self) -> SightStruct:
        return SightStruct(
            window=self.window, sinks=self.sinks, far=self.far, seats=self.seats, block=self.block, bias=self.bias
        )  # fmt: skip


class SecondClass(NamedTuple):
    """Further planes of a Side in two classes: `upper` uint8 [1, B, bytes], a bit for each slot of a block; `scale`
    float16 [1, 1, H * D]; the planes of those whose bit is not set, of `bits` each. Without a scale, steps and lowest
    numbers of both classes are those of channels, [1, B, H * D]."""

    upper: Tensor
    scale: Tensor | None
    levels: Tensor
    step: Tensor
    low: Tensor
    bits: int


class Side(NamedTuple):
    """Keys or values of the first `slots` slots, packed (ops/packing.py): `levels` uint8 [H, B, lines, bytes] of `bits`
    each, of which `group` consecutive ones of a line share `step` and `low`, float16 [H, B, lines, groups].

    Of keys a line is what a block of `rows` slots has of one channel, of values what a slot has of all. Added to it are
    a `thin` product of each block, float16 [H, B, rows, r] and [H, B, D, r], and numbers `apart` of each line, float16
    [H, B, lines, k] at int16 places. With a `rest`, levels, step and low are [1, B, n, ..] of one class, slot by slot
    in whichever blocks, and a line is what a slot has of all heads.
    """

    levels: Tensor
    step: Tensor
    low: Tensor
    slots: int
    rows: int
    bits: int
    group: int
    thin: Sequence[Tensor] = ()
    apart: Sequence[Tensor] = ()
    rest: SecondClass | None = None

    @property
    def struct(self) -> SealedStruct:
        struct = SealedStruct(
            levels=self.levels, step=self.step, low=self.low, levels_head=self.levels.stride(0),
            ends_head=self.step.stride(0), slots=self.slots, rows=self.rows, bits=self.bits, group=self.group,
        )  # fmt: skip
        if self.thin:
            for name, plane in zip(("left", "right"), self.thin):
                struct.point(name, plane)
            struct.left_head, struct.right_head = (plane.stride(0) for plane in self.thin)
            struct.rank = self.thin[0].shape[-1]
        if self.apart:
            for name, plane in zip(("apart", "places"), self.apart):
                struct.point(name, plane)
            struct.apart_head, struct.aparts = self.apart[0].stride(0), self.apart[0].shape[-1]
        if self.rest is not None:
            rest = self.rest
            planes = {"upper": rest.upper, "rest": rest.levels, "rest_step": rest.step, "rest_low": rest.low}
            if rest.scale is not None:
                planes["scale"] = rest.scale
            for name, plane in planes.items():
                struct.point(name, plane)
            struct.rest_bits, struct.rest_rows = self.rest.bits, self.rest.levels.shape[-2]
        return struct


def opens(bits: int, group: int, rows: int, dim: int, rank: int = 0, apart: int = 0) -> bool:
    """True if the kernels read keys, or values, that lie packed like that, of heads of `dim` numbers."""
    levels = bits in (2, 4) and group * bits % 8 == 0 and rows % 8 == 0
    return levels and dim % 32 == 0 and dim <= fit.MOST_DIM and rank <= fit.MOST_RANK and apart <= fit.MOST_APART


class Few(NamedTuple):
    """Rows q [R, Hq, D] that read k, v [H, N, D], the last R of the N being their own.

    `sees` bool [R, F + R] says which of the last slots a row reads: F of its tree that came earlier, and its span's.
    None: as `seen` has it, else those before it, and itself. The N are the slots from `start` on, where those before
    are read from others (`Common`). With `scales` bfloat16 [H, N], keys and values are int8: a row's numbers are its
    levels times its scale, in q's dtype. A window of `seen` takes the place of the call's; such spans are no members of
    commons, and neither are those whose first keys and values are `sealed` (bfloat16): these are read where they lie
    packed, and `start` is at most the number of either. Nothing has rounded such numbers; what meets their levels may
    be rounded to bfloat16, or to whole numbers of two bytes (paired.h, sealed.h). `heads` is the address of
    Head (kernels.h) [H], where each lies by itself; k and v then only say how long the longest is. `shared` says where
    the slots before `start` lie, BLOCK in each (PlanesStruct), of a span that reads them for itself or for others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sees: Tensor | None = None
    start: int = 0
    scales: tuple[Tensor, Tensor] | None = None
    seen: SeenWindow | None = None
    sealed: tuple[Side, Side] | None = None
    heads: int = 0
    shared: Sequence[PlanesStruct] = ()


class Common(NamedTuple):
    """Slots `start` .. `stop` that several spans hold alike, none of them fresh: the first member's are read, for all.

    A span's commons follow one another without gaps from slot 0 on; `level` counts them.
    """

    members: tuple[int, ...]
    start: int
    stop: int
    level: int

    @property
    def saved(self) -> int:
        """Rows that need not be read."""
        return (len(self.members) - 1) * (self.stop - self.start)


BLOCK = 64  # slots whose softmax is taken together (KEYS): a common that ends between blocks changes roundings


def reaches(commons: Sequence[Common], spans: int) -> list[int]:
    """The number of slots that each span reads in common."""
    out = [0] * spans
    for common in commons:
        for member in common.members:
            out[member] = max(out[member], common.stop)
    return out


def starts(commons: Sequence[Common], spans: int) -> list[int]:
    """The first slot that each span has to bring itself."""
    out = reaches(commons, spans)
    for common in commons:
        out[common.members[0]] = min(out[common.members[0]], common.start)
    return out


class CommonTable:
    """Commons as the kernels take them: `count` structures at `address` (0: there are none), alive with the object."""

    __slots__ = ("_structs", "address", "count")

    def __init__(self, commons: Sequence[Common]) -> None:
        self.address, self.count = 0, len(commons)
        if commons:
            self._structs = Structures(CommonStruct, [_common(common) for common in commons])
            self.address = self._structs.address


def _common(common: Common) -> CommonStruct:
    struct = CommonStruct(spans=array("q", common.members), count=len(common.members), level=common.level)
    struct.from_, struct.to = common.start, common.stop
    return struct


def fits(few: Few) -> bool:
    """True if the kernel takes these rows."""
    if few.sealed is not None and few.q.dtype != torch.bfloat16:
        return False
    return fit.fits(few.q, few.k, few.v, few.scales) and library() is not None


def attend(
    spans: Sequence[Few], scale: float, window: int | None = None, with_lse: bool = False,
    commons: Sequence[Common] = (), softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Exact attention of all spans, of one head shape and dtype: out [sum of R, Hq, D], lse float32 [sum of R, Hq].

    Scores, softmax and sums are float32. With a `window`, slots are taken as consecutive positions, and it must hide
    none of a common. With a `softcap`, a score s becomes softcap tanh(s / softcap). What a row reads is the same bit
    for bit whatever else is in the call, and whatever is read in common up to a multiple of BLOCK. Every span must fit
    (`fits`).
    """
    kernels = library()
    assert kernels is not None
    heads_q, dim = spans[0].q.shape[1:]
    kind = spans[0].q.dtype
    total = sum(span.q.shape[0] for span in spans)
    out = torch.empty((total, heads_q, dim), dtype=kind)
    lse = torch.empty((total, heads_q)) if with_lse else None
    structs, at = list[SpanStruct](), 0
    for few, reach in zip(spans, reaches(commons, len(spans))):
        rows = few.q.shape[0]
        own = slice(at, at + rows)
        structs.append(_span(few, reach, out[own], None if lse is None else lse[own]))
        at += rows
    shared = CommonTable(commons)
    call = AttentionCallStruct(
        spans=Structures(SpanStruct, structs), count=len(spans), heads_q=heads_q, heads=spans[0].k.shape[0], dim=dim,
        kind=fit.KIND[kind], window=window or 0, threads=torch.get_num_threads(), scale=scale, commons=shared.address,
        common_count=shared.count, softcap=softcap or 0.0,
    )  # fmt: skip
    kernels.attend(call.address)
    return out, lse


def _span(few: Few, common: int, out: Tensor, lse: Tensor | None) -> SpanStruct:
    """Its first `common` slots are read in common; results go to `out` and `lse`."""
    q, k, v, sees, start, scales, seen, sealed, heads, shared = few
    rows = q.shape[0]
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    sees = None if sees is None else sees.contiguous()
    struct = SpanStruct(
        q=q, k=_first(k, start), v=_first(v, start), out=out, lse=lse, q_row=q.stride(0), k_head=k.stride(0),
        k_row=k.stride(1), v_head=v.stride(0), v_row=v.stride(1), n=start + k.shape[1], rows=rows, sees=sees,
        common=common, first=0 if sees is None else sees.shape[1] - rows, heads=heads,
    )  # fmt: skip
    if scales is not None:
        struct.k_scale, struct.v_scale = (x.data_ptr() - start * x.itemsize for x in scales)
        struct.k_scale_head, struct.v_scale_head = (x.stride(0) for x in scales)
    if seen is not None:
        struct.sight = seen.struct
    if shared:
        struct.point("shared", Structures(PlanesStruct, shared))
        struct.shared_slots = len(shared) * BLOCK
    if sealed is not None:
        struct.point("sealed", SidesStruct(keys=sealed[0].struct, values=sealed[1].struct))
    return struct


def _first(rows: Tensor, start: int) -> int:
    """The address that slot 0 would have in rows [H, N, D] that begin with slot `start`."""
    return rows.data_ptr() - start * rows.stride(1) * rows.itemsize
