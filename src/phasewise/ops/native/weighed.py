"""Attention weights of single rows, recorded by native steps, and the scores of cached rows that they update."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.abi import LineStruct, RetireCallStruct, Structures, TallyStruct, TemperedStruct

MOST_SHARING = 16  # query heads of a KV head whose row can be weighed (QUERIES)
ROOM = 64  # slots that room is made for at once


class Doubt(NamedTuple):
    """A perturbation of a row's scores that changes only its recorded weights and not its own attention: Gumbel(0, 1)
    noise is added, as `Shaping` has it, with this `seed` (64 bits; None: no noise), and what then is there multiplied
    with `inverse`."""

    inverse: float
    seed: int | None


class Weighed:
    """Attention weights of a single row in every layer, as a native step records them: `weights` float32 [layers, H,
    room], summed over the query heads that share a KV head. `gone` uint8 [layers, h, room] (h of 1: alike in all heads)
    are slots before it that it does not see; zero behind them. It serves one row after another, which attend to no more
    than `room` slots, their own among them.

    With `begins` [layers * h] there are no slots before these, nor room for them: `gone` are lines of `rooms`, one of
    these h after the other, and `weights` so many such lines of each as heads `share` it.
    """

    __slots__ = ("_tallies", "_tempered", "address", "begins", "gone", "lines", "room", "rooms", "share",
                 "weights")  # fmt: skip

    def __init__(self, layers: int, kept: int, heads: tuple[int, int], slots: int, begins: Sequence[int] = ()) -> None:
        """`kept`: h; `heads`: H, and those of queries; room for at least so many slots."""
        self.begins, self.share = begins or (0,) * (layers * kept), heads[0] // kept
        self.rooms = [-(-(slots - begin) // ROOM) * ROOM for begin in self.begins]
        self.room: int = min(map(add, self.rooms, self.begins))
        *starts, size = accumulate(self.rooms, initial=0)
        self.gone, self.weights = torch.zeros(size, dtype=torch.uint8), torch.empty(size * self.share)
        widest = max(sum(self.rooms[row : row + kept]) for row in range(0, len(self.rooms), kept))
        scores = torch.empty(widest * self.share * (heads[1] // heads[0]))
        places = zip(starts, self.begins, self.rooms)
        self.lines = Structures(LineStruct, [LineStruct(from_=at, begin=b, length=n) for at, b, n in places])
        self._tempered: TemperedStruct | None = None  # what the tallies point to
        self._tallies = Structures(
            TallyStruct,
            [
                TallyStruct(
                    lines=self.lines[layer * kept].address, heads=self.share, gone=self.gone, weights=self.weights,
                    scores=scores, layer=layer,
                )
                for layer in range(layers)
            ],
        )  # fmt: skip
        self.address = self._tallies.address
        if not begins:
            self.gone, self.weights = self.gone.view(layers, kept, -1), self.weights.view(layers, heads[0], -1)

    def temper(self, doubt: Doubt | None, row: int, places: int) -> None:
        """For the next row, at position `row`; the address of Places (kernels.h) of all layers."""
        if doubt is None:
            self._point(None)
            return
        tempered = self._tempered or TemperedStruct()
        self._point(tempered)
        tempered.noisy, tempered.seed = doubt.seed is not None, doubt.seed or 0
        tempered.row, tempered.inverse, tempered.places = row, doubt.inverse, places

    def _point(self, tempered: TemperedStruct | None) -> None:
        if tempered is not self._tempered:
            self._tempered = tempered
            for tally in self._tallies:
                tally.tempered = 0 if tempered is None else tempered.address


class Weighs(NamedTuple):
    """The recording of a row's weights: `room` for what it attends to, behind `n` slots, whom to tell when that is
    there, and how its scores are doubted."""

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
        self._kept, self._recent = (scores, weighed, most), how.recent
        self._call = RetireCallStruct(
            lines=weighed.lines, count=len(most), heads=weighed.share, most=most, scores=scores, gone=weighed.gone,
            weights=weighed.weights, together=how.shared, sums=how.sums,
        )  # fmt: skip

    def __call__(self, n: int, row: int = 0, places: int = 0) -> None:
        """The row at position `row` has weighed `n` slots, its own the last of them. With the address of their Places
        (kernels.h) scores count by how many rows could have given some."""
        kernels = library()
        assert kernels is not None
        call = self._call
        call.n, call.older, call.threads = n, max(0, n - self._recent), torch.get_num_threads()
        call.places, call.row = places, row
        kernels.retire(call.address)
