"""What single rows of a text attend to, told by native steps, and what that makes of the scores of cached rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library

MOST_SHARING = 16  # query heads of a KV head whose row can be weighed (QUERIES)
ROOM = 64  # slots that room is made for at once
TEMPERED = struct.Struct("=3qdq")  # Tempered (kernels.h)
LINE = 24  # bytes of a Line


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
    than `room` slots, their own among them.

    With `begins` [layers * h] there are no slots before these, nor room for them: `gone` are lines of `rooms`, one of
    these h after the other, and `weights` so many such lines of each as heads `share` it.
    """

    __slots__ = ("_kept", "_tempered", "_words", "address", "begins", "gone", "lines", "room", "rooms", "share",
                 "weights")  # fmt: skip

    def __init__(self, layers: int, kept: int, heads: tuple[int, int], slots: int, begins: Sequence[int] = ()) -> None:
        """`kept`: h; `heads`: H, and those of queries; room for at least so many slots."""
        self.begins, self.share = begins or (0,) * (layers * kept), heads[0] // kept
        self.rooms = [-(-(slots - begin) // ROOM) * ROOM for begin in self.begins]
        self.room: int = min(map(add, self.rooms, self.begins))
        *starts, size = accumulate(self.rooms, initial=0)
        self.gone, self.weights = torch.zeros(size, dtype=torch.uint8), torch.empty(size * self.share)
        widest = max(sum(self.rooms[row : row + kept]) for row in range(0, len(self.rooms), kept))
        self._kept = torch.empty(widest * self.share * (heads[1] // heads[0]))
        self.lines = array("q", chain.from_iterable(zip(starts, self.begins, self.rooms)))  # Line (kernels.h)
        planes = self.share, *(plane.data_ptr() for plane in (self.gone, self.weights, self._kept))
        self._words, self._tempered = array("q"), array("q", (0,) * 5)
        for layer in range(layers):
            self._words.extend((self.lines.buffer_info()[0] + layer * kept * LINE, *planes, 0, layer))
        self.address = self._words.buffer_info()[0]
        if not begins:
            self.gone, self.weights = self.gone.view(layers, kept, -1), self.weights.view(layers, heads[0], -1)

    def temper(self, doubt: Doubt | None, row: int, places: int) -> None:
        """For the next row, at position `row`; the address of Places (kernels.h) of all layers."""
        at = 0 if doubt is None else self._tempered.buffer_info()[0]
        if self._words[5] != at:
            self._words[5::7] = array("q", [at]) * (len(self._words) // 7)
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
    so many query heads; else 0. `most` may be others by layer and head, [layers * h]."""

    most: int | Sequence[int]
    recent: int
    sums: bool
    shared: int


class Retiring:
    """Scores float32 of slots, which lie as those that are `gone` and are -inf there, as the weights of one row after
    another change them."""

    __slots__ = ("_call", "_kept", "_recent")

    def __init__(self, scores: Tensor, weighed: Weighed, how: Ranking) -> None:
        most = array("q", how.most if isinstance(how.most, Sequence) else [how.most] * len(weighed.rooms))
        lines, planes = weighed.lines.buffer_info()[0], (scores, weighed.gone, weighed.weights)
        words = lines, len(most), weighed.share, most.buffer_info()[0], *(plane.data_ptr() for plane in planes)
        self._kept, self._recent = (scores, weighed, most), how.recent
        self._call = array("q", (*words, how.shared, how.sums, 0, 0, 0, 0, 0))

    def __call__(self, n: int, row: int = 0, places: int = 0) -> None:
        """The row at position `row` has weighed `n` slots, its own the last of them. With the address of their Places
        (kernels.h) scores count by how many rows could have given some."""
        kernels = library()
        assert kernels is not None
        self._call[9:] = array("q", (n, max(0, n - self._recent), torch.get_num_threads(), places, row))
        kernels.retire(self._call.buffer_info()[0])
