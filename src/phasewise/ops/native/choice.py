"""How a single row chooses what it reads, as native kernels take it, and lists that come of it."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import fit, library

ALL, CHOSEN, PICKS, AGAIN, GIVEN = range(5)  # Way (kernels.h): of a layer, the first of its WAY_WORDS (LayerChoice)
WAY_WORDS, CHANNELS, TURN = 10, 4, 5
PROMISE, SHARE, PEAK = range(3)  # Rule
MOST_VOTING = 1024  # queries that have a say in a list, as in votes.cpp


class Candidates(NamedTuple):
    """What the row at slot n - 1 chooses among in every layer that chooses, as `Choice` (kernels.h) has it: `chosen` of
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
        """Of how many rows vectors are made where `known` are there: those that last, and those of the row's own, but
        for its key, which is listed."""
        pieces = (lasting - known, 0 if self.largest else self.end - max(known, lasting))
        return sum((count + self.parts - 1) * self.step for count in pieces if count > 0)

    def words(self, known: int, ways: int, *more: int) -> array[int]:
        """Choice: `known` vectors are there; `ways` is the address of the layers' words, and `more` those that Ways has
        beside them, or nothing."""
        queries, lists, beside = more or (0, 0, 0)
        words = (*self[:11], known, self.step, self.parts, self.width, ways, queries, lists, self.largest, self.group)
        return array("q", (*words, beside))


class Ways(NamedTuple):
    """`words` of LayerChoice for every layer of a stack. `queries`: the address of bfloat16 [layers, Hq, D], where
    those of layers that list something are put; or 0. `lists`: that of int32 [H, slots that are read], for lists that
    layers take over from each other, which may run in calls of their own; or 0. `beside` [layers, H]: how many slots
    are fetched in groups beside those listed, each of `slot` bytes; or None. `kept` lives as long."""

    words: array[int]
    queries: int = 0
    lists: int = 0
    kept: object = None
    beside: array[int] | None = None
    slot: int = 0

    @staticmethod
    def layer(vectors: Tensor, sums: Tensor | None, scale: float) -> array[int]:
        """Of one that chooses by vectors [1 | 2, H, .., width]; `scale` of products (0: the layer's own)."""
        low, more = vectors.data_ptr(), vectors.stride(0) * vectors.itemsize
        words = array("q", (CHOSEN, low, low + more if len(vectors) == 2 else 0, vectors.stride(1), 0, 0, 0))
        words.extend((vectors.stride(3), 0 if sums is None else sums.data_ptr()))
        words.frombytes(struct.pack("d", scale))
        return words


class Chosen:
    """The Choice of a span of a stack: `known` vectors are there. `bytes`: what its row reads of KV and vectors in all
    layers, but for what is fetched beside the lists. `done`: what is to be done after the step, which has added the
    vectors that were missing."""

    __slots__ = ("_done", "_ways", "_words", "address", "bytes")

    def __init__(
        self, candidates: Candidates, known: int, ways: Ways, read: int, done: Callable[[], None] | None = None
    ) -> None:
        beside = 0 if ways.beside is None else ways.beside.buffer_info()[0]
        self._words = candidates.words(known, ways.words.buffer_info()[0], ways.queries, ways.lists, beside)
        self._ways, self.address, self.bytes, self._done = ways, self._words.buffer_info()[0], read, done

    def done(self) -> int:
        """To be called after the step. -> bytes that were fetched beside what is listed"""
        if self._done is not None:
            self._done()
        return sum(self._ways.beside or ()) * self._ways.slot


class Rest(NamedTuple):
    """For a single row whose list leaves something out: the share of weight that the list holds, float32 [Hq], and what
    stands for all else, float32 [H, D]."""

    held: Tensor
    mean: Tensor

    def joined(self, exact: Tensor) -> Tensor:
        """What the list's rows gave [1, Hq, D], with the rest."""
        held, mean = self.held[:, None], self.mean.repeat_interleave(len(self.held) // len(self.mean), 0)
        return (held * exact.float() + (1 - held) * mean).to(exact.dtype)


class Ballot(NamedTuple):
    """One row q bfloat16 [1, Hq, D] at the last of n slots of keys k [H, n, D], bfloat16 or int8 with scales [H, n],
    and the words of its layer (LayerChoice), of which `kept` must outlive the call. With `sums` among these, values as
    keys, and where their Rest is put."""

    q: Tensor
    k: Tensor
    scale: Tensor | None
    candidates: Candidates
    known: int
    layer: array[int]
    kept: object = None
    v: Tensor | None = None
    v_scale: Tensor | None = None
    rest: Rest | None = None


def takes(ballot: Ballot) -> bool:
    """Whether `choose` does this one."""
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
    heads, out, words, kept = ballots[0].k.shape[0], list[Tensor](), array("q"), list[object]()
    for q, k, scale, candidates, known, layer, _, v, v_scale, rest in ballots:
        q = q.contiguous()
        choice = candidates.words(known, layer.buffer_info()[0])
        out.append(torch.empty((heads, 1, candidates.listed(k.shape[1])), dtype=torch.int32))
        kept += (q, choice)
        words.extend((choice.buffer_info()[0], q.data_ptr(), k.data_ptr(), *k.stride()[:2]))
        words.extend((0, 0) if scale is None else (scale.data_ptr(), scale.stride(0)))
        words.extend((k.shape[1], out[-1].data_ptr()))
        words.extend((0, 0, 0) if v is None else (v.data_ptr(), *v.stride()[:2]))
        words.extend((0, 0) if v_scale is None else (v_scale.data_ptr(), v_scale.stride(0)))
        words.extend((0, 0) if rest is None else (rest.held.data_ptr(), rest.mean.data_ptr()))
    call = array("q", (words.buffer_info()[0], len(ballots), heads_q, heads, dim, torch.get_num_threads()))
    kernels.choose_slots(call.buffer_info()[0])
    return out
