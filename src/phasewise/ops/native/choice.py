"""Top-k selection of the rows that a single row reads, as native kernels take it, and the lists that result."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library
from phasewise.ops.native.abi import ChoiceStruct, LayerChoiceStruct, Structures, VotesCallStruct, VotesSpanStruct

ALL, CHOSEN, PICKS, AGAIN, GIVEN = range(5)  # Way (kernels.h)
PROMISE, SHARE, PEAK = range(3)  # Rule
MOST_VOTING = 1024  # queries that have a say in a list, as in votes.cpp


class Candidates(NamedTuple):
    """The candidates of the row at slot n - 1 in every layer that chooses, as `Choice` (kernels.h) has it: `chosen` of
    `units` candidates of `size` slots, the first at slot `first`; what lies before and after them is read anyway.

    `rule`: what makes a candidate. `joint`: all heads choose together. Its vectors, of which those from `begin` to
    `end` count, are at + u * each - before to at + (u + 1) * each, each of `width` numbers, and made of the `parts`
    times `step` rows from i * step on.

    With `largest`, vectors are keys, whose numbers lie in lines, and a group of queries looks at so many of the lines;
    the row's own key has a share. With `group`, slots are fetched in groups of so many. See kernels.h.
    """

    first: int
    units: int
    size: int
    chosen: int
    rule: int
    joint: bool
    begin: int
    end: int
    at: int = 0
    each: int = 1
    before: int = 0
    step: int = 1
    parts: int = 1
    width: int = 0
    largest: int = 0
    group: int = 0

    @property
    def looked(self) -> int:
        """Numbers of a vector that are read."""
        return self.largest or self.width

    def listed(self, n: int) -> int:
        """Slots that a head reads of n."""
        return n - (self.units - self.chosen) * self.size

    def rows(self, known: int, lasting: int) -> int:
        """The number of rows that vectors are made of where `known` are there: those that last, and those of the row's
        own, but for its key, which is listed."""
        pieces = (lasting - known, 0 if self.largest else self.end - max(known, lasting))
        return sum((count + self.parts - 1) * self.step for count in pieces if count > 0)

    def struct(self, known: int, layers: Structures[LayerChoiceStruct] | LayerChoiceStruct) -> ChoiceStruct:
        """Choice: `known` vectors are there; `layers` say how each of them chooses."""
        return ChoiceStruct(
            first=self.first, units=self.units, size=self.size, chosen=self.chosen, rule=self.rule, joint=self.joint,
            begin=self.begin, end=self.end, at=self.at, each=self.each, before=self.before, known=known,
            step=self.step, parts=self.parts, width=self.width, layers=layers, largest=self.largest, group=self.group,
        )  # fmt: skip


class Ways(NamedTuple):
    """The choices of all layers of a stack.

    layers: how each of them chooses.
    queries: bfloat16 [layers, Hq, D], to which the queries of layers that list something are written; or None.
    lists: int32 [H, slots that are read], lists that layers take over from each other, which may run in calls of their
        own; or None.
    beside: int64 [layers, H], how many slots are fetched in groups beside those listed, each of `slot` bytes; or None.
    kept: what has to live as long.
    """

    layers: Structures[LayerChoiceStruct]
    queries: Tensor | None = None
    lists: Tensor | None = None
    kept: object = None
    beside: array[int] | None = None
    slot: int = 0

    @staticmethod
    def layer(vectors: Tensor, sums: Tensor | None, scale: float) -> LayerChoiceStruct:
        """The selection of a layer that chooses by vectors [1 | 2, H, .., width]; `scale` of products (0: the layer's
        own)."""
        return LayerChoiceStruct(
            way=CHOSEN, low=vectors[0], high=vectors[1] if len(vectors) == 2 else None, head=vectors.stride(1),
            line=vectors.stride(3), sums=sums, scale=scale,
        )  # fmt: skip


class Chosen:
    """The Choice of a span of a stack: `known` vectors are there. `bytes`: what its row reads of KV and vectors in all
    layers, but for what is fetched beside the lists. `done`: what is to be done after the step, which has added the
    vectors that were missing."""

    __slots__ = ("_done", "_struct", "_ways", "address", "bytes")

    def __init__(
        self, candidates: Candidates, known: int, ways: Ways, read: int, done: Callable[[], None] | None = None
    ) -> None:
        self._struct = candidates.struct(known, ways.layers)
        for name, data in (("queries", ways.queries), ("lists", ways.lists), ("beside", ways.beside)):
            if data is not None:
                self._struct.point(name, data)
        self._ways, self.address, self.bytes, self._done = ways, self._struct.address, read, done

    def done(self) -> int:
        """To be called after the step. -> bytes that were fetched beside what is listed"""
        if self._done is not None:
            self._done()
        return sum(self._ways.beside or ()) * self._ways.slot


class UnlistedRest(NamedTuple):
    """For a single row whose list leaves something out: the share of weight that the list holds, float32 [Hq], and what
    stands for all else, float32 [H, D]."""

    held: Tensor
    mean: Tensor

    def joined(self, exact: Tensor) -> Tensor:
        """Joins what the list's rows gave [1, Hq, D] with the rest."""
        held, mean = self.held[:, None], self.mean.repeat_interleave(len(self.held) // len(self.mean), 0)
        return (held * exact.float() + (1 - held) * mean).to(exact.dtype)


class Ballot(NamedTuple):
    """One row q bfloat16 [1, Hq, D] at the last of n slots of keys k [H, n, D], bfloat16 or int8 with scales [H, n],
    and how its layer chooses. With `sums` in this, values as keys, and where their Rest is put."""

    q: Tensor
    k: Tensor
    scale: Tensor | None
    candidates: Candidates
    known: int
    layer: LayerChoiceStruct
    v: Tensor | None = None
    v_scale: Tensor | None = None
    rest: UnlistedRest | None = None


def takes(ballot: Ballot) -> bool:
    """True if `choose` does this one."""
    q, k, scale = ballot[:3]
    fits = fit.fits(q, k, k if ballot.v is None else ballot.v, None if scale is None else (scale, scale))
    voting = q.shape[1] // (1 if ballot.candidates.joint else k.shape[0])
    return q.dtype == torch.bfloat16 and fits and voting <= MOST_VOTING and library() is not None


def choose(ballots: Sequence[Ballot]) -> list[Tensor]:
    """The slots to read, int32 [H, 1, S], increasing; vectors that were missing are there after it. All of one head
    shape; every one must be taken (`takes`)."""
    kernels = library()
    assert kernels is not None
    heads_q, dim = ballots[0].q.shape[1:]
    heads = ballots[0].k.shape[0]
    sizes = [(heads, 1, one.candidates.listed(one.k.shape[1])) for one in ballots]
    out = [torch.empty(size, dtype=torch.int32) for size in sizes]
    call = VotesCallStruct(
        spans=Structures(VotesSpanStruct, [_struct(one, slots) for one, slots in zip(ballots, out)]),
        count=len(ballots), heads_q=heads_q, heads=heads, dim=dim, threads=torch.get_num_threads(),
    )  # fmt: skip
    kernels.choose_slots(call.address)
    return out


def _struct(ballot: Ballot, slots: Tensor) -> VotesSpanStruct:
    """The list goes to `slots`."""
    q, k, scale, candidates, known, layer, v, v_scale, rest = ballot
    struct = VotesSpanStruct(
        choice=candidates.struct(known, layer), q=q.contiguous(), k=k, k_head=k.stride(0), k_row=k.stride(1),
        n=k.shape[1], slots=slots,
    )  # fmt: skip
    if scale is not None:
        struct.k_scale, struct.k_scale_head = scale.data_ptr(), scale.stride(0)
    if v is not None:
        struct.v, struct.v_head, struct.v_row = v.data_ptr(), v.stride(0), v.stride(1)
    if v_scale is not None:
        struct.v_scale, struct.v_scale_head = v_scale.data_ptr(), v_scale.stride(0)
    if rest is not None:
        struct.held, struct.rest = rest.held.data_ptr(), rest.mean.data_ptr()
    return struct
