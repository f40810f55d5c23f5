"""Attention of a list of spans in one native call, each reading its keys and values where they lie."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library


class Seen(NamedTuple):
    """What rows see of the slots before them: `window` slots up to their own, and the first `sinks`; or all (0).

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
    def words(self) -> tuple[int, int, int, int, int, int]:
        """As the kernels take it (Sight)."""
        far, seats, bias = (0 if x is None else x.data_ptr() for x in (self.far, self.seats, self.bias))
        return self.window, self.sinks, far, seats, self.block, bias


NO_SIGHT = (0,) * 6  # words where rows see all before them


class Rest(NamedTuple):
    """What a Side in two classes has besides: `upper` uint8 [1, B, bytes], a bit for each slot of a block; `scale`
    float16 [1, 1, H * D]; the planes of those whose bit is not set, of `bits` each."""

    upper: Tensor
    scale: Tensor
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
    rest: Rest | None = None

    @property
    def words(self) -> tuple[int, ...]:
        """As the kernels take it (Sealed)."""
        addresses = (x.data_ptr() for x in (self.levels, self.step, self.low))
        words = *addresses, self.levels.stride(0), self.step.stride(0), self.slots, self.rows, self.bits, self.group
        rest = (0,) * 6 if self.rest is None else (*(x.data_ptr() for x in self.rest[:5]), self.rest.bits)
        return *words, *_pair(self.thin, 2), *_pair(self.apart, 1), *rest


def _pair(planes: Sequence[Tensor], strides: int) -> tuple[int, ...]:
    """Where two planes lie, numbers between two heads of so many of them, and how many numbers a line has."""
    if not planes:
        return (0,) * (3 + strides)
    return *(x.data_ptr() for x in planes), *(x.stride(0) for x in planes[:strides]), planes[0].shape[-1]


def opens(bits: int, group: int, rows: int, dim: int, rank: int = 0, apart: int = 0) -> bool:
    """Whether the kernels read keys, or values, that lie packed like that, of heads of `dim` numbers."""
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
    Head (kernels.h) [H], where each lies by itself; k and v then only say how long the longest is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sees: Tensor | None = None
    start: int = 0
    scales: tuple[Tensor, Tensor] | None = None
    seen: Seen | None = None
    sealed: tuple[Side, Side] | None = None
    heads: int = 0


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
    """How many slots each span reads in common."""
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


class Table:
    """Commons as the kernels take them: `count` structures at `address` (0: there are none), alive with the object."""

    __slots__ = ("_kept", "address", "count")

    def __init__(self, commons: Sequence[Common]) -> None:
        self.address, self.count = 0, len(commons)
        if not commons:
            return
        self._kept = [array("q", common.members) for common in commons]
        words = array("q")
        for members, common in zip(self._kept, commons):
            words.extend((members.buffer_info()[0], len(members), common.start, common.stop, common.level))
        self._kept.append(words)
        self.address = words.buffer_info()[0]


def fits(few: Few) -> bool:
    """Whether the kernel takes these rows."""
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
    out_at, lse_at = out.data_ptr(), 0 if lse is None else lse.data_ptr()
    out_row, lse_row = heads_q * dim * kind.itemsize, 0 if lse is None else heads_q * 4
    words: list[int] = []
    kept: list[Any] = []  # copies that must outlive the call
    for (q, k, v, sees, start, scales, seen, sealed, heads), reach in zip(spans, reaches(commons, len(spans))):
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
            kept.append(q)
        if sees is not None:
            sees = sees.contiguous()
            kept.append(sees)
        rows = q.shape[0]
        of_k, of_v = (x.data_ptr() - start * x.stride(1) * x.itemsize for x in (k, v))  # where slot 0 would be
        words += (q.data_ptr(), of_k, of_v, out_at, lse_at)
        words += (q.stride(0), *k.stride()[:2], *v.stride()[:2], start + k.shape[1], rows)
        words += (0 if sees is None else sees.data_ptr(), reach)
        of_scales = [x.data_ptr() - start * x.itemsize for x in scales or ()] + [x.stride(0) for x in scales or ()]
        words += of_scales or (0, 0, 0, 0)
        words += NO_SIGHT if seen is None else seen.words
        words.append(0 if sees is None else sees.shape[1] - rows)
        sides = array("q", () if sealed is None else (*sealed[0].words, *sealed[1].words))
        kept.append(sides)
        words += (sides.buffer_info()[0] if sides else 0, heads, 0)  # nobody asks for weights
        out_at += rows * out_row
        lse_at += rows * lse_row
    table, shared = array("q", words), Table(commons)
    call = array("q", [table.buffer_info()[0], len(spans), heads_q, spans[0].k.shape[0], dim])
    call.extend([fit.KIND[kind], window or 0, torch.get_num_threads()])
    call.frombytes(struct.pack("d", scale))
    call.extend([shared.address, shared.count])
    call.frombytes(struct.pack("d", softcap or 0.0))
    kernels.attend(call.buffer_info()[0])
    return out, lse
