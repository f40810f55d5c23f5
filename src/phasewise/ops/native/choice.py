"""How a single row chooses what it reads, as native kernels take it, and lists that come of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library

ALL, CHOSEN, PICKS, AGAIN, GIVEN = range(5)  # Way (kernels.h): of a layer, the first of its WAY_WORDS (LayerChoice)
WAY_WORDS, CHANNELS, TURN = 8, 4, 5
PROMISE, SHARE, PEAK = range(3)  # Rule
MOST_VOTING = 1024  # queries that have a say in a list, as in votes.cpp


class Candidates(NamedTuple):
    """What the row at slot n - 1 chooses among in every layer that chooses, as `Choice` (kernels.h) has it: `chosen` of
    `units` candidates of `size` slots, the first at slot `first`; what lies before and after them is read anyway.

    `rule`: what makes a candidate. `joint`: all heads choose together. Its vectors, of which those from `begin` to
    `end` count, are at + u * each - before to at + (u + 1) * each, each of `width` numbers, and made of the `parts`
    times `step` rows from i * step on.
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

    def listed(self, n: int) -> int:
        """Slots that a head reads of n."""
        return n - (self.units - self.chosen) * self.size

    def rows(self, known: int, lasting: int) -> int:
        """Of how many rows vectors are made where `known` are there: those that last, and those of the row's own."""
        pieces = (lasting - known, self.end - max(known, lasting))
        return sum((count + self.parts - 1) * self.step for count in pieces if count > 0)

    def words(self, known: int, ways: int, queries: int = 0, lists: int = 0) -> array[int]:
        """Choice: `known` vectors are there; `ways` is the address of the layers' words."""
        return array("q", (*self[:11], known, self.step, self.parts, self.width, ways, queries, lists))


class Ways(NamedTuple):
    """`words` of LayerChoice for every layer of a stack. `queries`: the address of bfloat16 [layers, Hq, D], where
    those of layers that list something are put; or 0. `lists`: that of int32 [H, slots that are read], for lists that
    layers take over from each other, which may run in calls of their own; or 0. `kept` lives as long."""

    words: array[int]
    queries: int = 0
    lists: int = 0
    kept: object = None


class Chosen:
    """The Choice of a span of a stack: `known` vectors are there. `bytes`: what its row reads of KV and vectors in all
    layers. `done`: to be called after the step, which has added the vectors that were missing."""

    __slots__ = ("_ways", "_words", "address", "bytes", "done")

    def __init__(self, candidates: Candidates, known: int, ways: Ways, read: int, done: Callable[[], None]) -> None:
        self._words = candidates.words(known, ways.words.buffer_info()[0], ways.queries, ways.lists)
        self._ways, self.address, self.bytes, self.done = ways, self._words.buffer_info()[0], read, done


class Ballot(NamedTuple):
    """One row q bfloat16 [1, Hq, D] at the last of n slots of keys k [H, n, D], bfloat16 or int8 with scales [H, n],
    and the words of its layer (LayerChoice), of which `kept` must outlive the call."""

    q: Tensor
    k: Tensor
    scale: Tensor | None
    candidates: Candidates
    known: int
    layer: array[int]
    kept: object = None


def takes(ballot: Ballot) -> bool:
    """Whether `choose` does this one."""
    q, k, scale = ballot[:3]
    fits = fit.fits(q, k, k, None if scale is None else (scale, scale))
    voting = q.shape[1] // (1 if ballot.candidates.joint else k.shape[0])
    return q.dtype == torch.bfloat16 and fits and voting <= MOST_VOTING and library() is not None


def choose(ballots: Sequence[Ballot]) -> list[Tensor]:
    """The slots to read, int32 [H, 1, S], increasing; vectors that were missing are there after it. All of one head
    shape; every one must be taken (`takes`)."""
    kernels = library()
    assert kernels is not None
    heads_q, dim = ballots[0].q.shape[1:]
    heads, out, words, kept = ballots[0].k.shape[0], list[Tensor](), array("q"), list[object]()
    for q, k, scale, candidates, known, layer, _ in ballots:
        q = q.contiguous()
        choice = candidates.words(known, layer.buffer_info()[0])
        out.append(torch.empty((heads, 1, candidates.listed(k.shape[1])), dtype=torch.int32))
        kept += (q, choice)
        words.extend((choice.buffer_info()[0], q.data_ptr(), k.data_ptr(), *k.stride()[:2]))
        words.extend((0, 0) if scale is None else (scale.data_ptr(), scale.stride(0)))
        words.extend((k.shape[1], out[-1].data_ptr()))
    call = array("q", (words.buffer_info()[0], len(ballots), heads_q, heads, dim, torch.get_num_threads()))
    kernels.choose_slots(call.buffer_info()[0])
    return out
