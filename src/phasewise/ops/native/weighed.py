"""What single rows of a text attend to, told by native steps, and what that makes of the scores of cached rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library

MOST_SHARING = 16  # query heads of a KV head whose row can be weighed (QUERIES)
ROOM = 64  # slots that room is made for at once
TEMPERED = struct.Struct("=3qdq")  # Tempered (kernels.h)


class Doubt(NamedTuple):
    """What is made of a row's scores before the softmax that tells what it attends to, which its own attention has
    nothing of: Gumbel(0, 1) noise is added, as `Shaping` has it, with this `seed` (64 bits; None: no noise), and what
    then is there multiplied with `inverse`."""

    inverse: float
    seed: int | None


class Weighed:
    """What a single row attends to in every layer, as a native step finds it on its way: `weights` float32 [layers, H,
    room], summed over the query heads that share a KV head. `gone` uint8 [layers, h, room] (h of 1: alike in all heads)
    are slots before it that it does not see; zero behind them. It serves one row after another, which attend to no more
    than `room` slots, their own among them."""

    __slots__ = ("_kept", "_tempered", "_words", "address", "gone", "room", "weights")

    def __init__(self, layers: int, kept: int, heads: tuple[int, int], slots: int) -> None:
        """`kept`: h; `heads`: H, and those of queries; room for at least so many slots."""
        (heads_kv, heads_q), self.room = heads, -(-slots // ROOM) * ROOM
        self.gone = torch.zeros((layers, kept, self.room), dtype=torch.uint8)
        self.weights, scores = torch.empty((layers, heads_kv, self.room)), torch.empty((heads_q, self.room))
        self._kept, self._words = scores, array("q")
        self._tempered = array("q", (0,) * 5)
        apart = self.room if kept > 1 else 0
        for layer, (gone, weights) in enumerate(zip(self.gone, self.weights)):
            self._words.extend((gone.data_ptr(), apart, weights.data_ptr(), scores.data_ptr(), self.room, 0, layer))
        self.address = self._words.buffer_info()[0]

    def temper(self, doubt: Doubt | None, row: int, places: int) -> None:
        """For the next row, at position `row`; the address of Places (kernels.h) of all layers."""
        at = 0 if doubt is None else self._tempered.buffer_info()[0]
        if self._words[5] != at:
            self._words[5::7] = array("q", [at]) * len(self.weights)
        if doubt is not None:
            TEMPERED.pack_into(self._tempered, 0, doubt.seed is not None, doubt.seed or 0, row, doubt.inverse, places)


class Weighs(NamedTuple):
    """How a row is weighed: `room` for what it attends to, behind `n` slots, whom to tell when that is there, and how
    its scores are doubted."""

    room: Weighed
    n: int
    told: Callable[[], None]
    doubt: Doubt | None = None


class Ranking(NamedTuple):
    """Weights are added to scores (`sums`) or take their place. Of more than `most` slots that are left the lowest
    leave, though none of the `recent` last; of equal ones the later. `shared` by all heads, a score is the mean over
    so many query heads; else 0."""

    most: int
    recent: int
    sums: bool
    shared: int


class Retiring:
    """Scores float32 [layers, h, room] of slots, -inf where these are `gone`, as the weights of one row after another
    change them."""

    __slots__ = ("_call", "_kept", "_recent")

    def __init__(self, scores: Tensor, weighed: Weighed, how: Ranking) -> None:
        self._kept, self._recent = (scores, weighed), how.recent
        addresses = (scores.data_ptr(), weighed.gone.data_ptr(), weighed.weights.data_ptr())
        self._call = array("q", (*addresses, *weighed.weights.shape, 0, how.shared, how.sums, how.most, 0, 0))

    def __call__(self, n: int) -> None:
        """A row has weighed `n` slots, its own the last of them."""
        kernels, call = library(), self._call
        assert kernels is not None
        call[6], call[10], call[11] = n, max(0, n - self._recent), torch.get_num_threads()
        kernels.retire(call.buffer_info()[0])
