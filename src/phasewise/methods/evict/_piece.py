"""Running scores of all layers in one piece, for tokens that are whole native steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.kv.buffer import ROUND, rounded
from phasewise.ops.native.weighed import Ranking, Retiring, Weighed
from phasewise.request.drawer import Drawer
from phasewise.step.trail import State

GONE = float("-inf")  # the score of a slot that was given up, or is not on a row's path


class Ahead(NamedTuple):
    """Of the rows to come: there is KV for `spare` of them; after `due` of them what is gone is to be dropped, if that
    has been done in all layers before (`settled`)."""

    spare: int
    due: int
    settled: bool


class ScorePiece(Drawer):
    """A request's scores with room behind them, and the room in which its next row is weighed.

    They are written in place, but only once a row stays: a step that is tried again finds them as they were. What the
    request's drawer holds are views of them; `of` tells whether it still does, and nothing else has come between.

    Heads that have unequally many slots end at the same one, as native steps read them (kv/unequal.py): `n` of them
    are there in the longest.
    """

    def __init__(self, states: Sequence[State], how: Ranking, heads: tuple[int, int], ahead: Ahead) -> None:
        """`states` [h, n], or one [n] per head, of all layers; `heads`: those of KV, and of queries."""
        self.states, self.how, self.heads, self.settled = states, how, heads, ahead.settled
        self.n = max(len(own) for state in states for own in state)
        self.due = self.n + ahead.due  # of the longest head, slots
        self.staying: Sequence[Tensor] = ()  # slots that layers keep, while they are told one after another
        self._begins = [[self.n - len(own) for own in state] for state in states]
        self._planes: list[State] = []  # of layers, where heads have unequally many slots
        if any(map(any, self._begins)):
            self._spread(ahead.spare)
        else:
            self._lie(torch.stack([state if isinstance(state, Tensor) else torch.stack(state) for state in states]))

    def fork(self) -> None:
        """A twin has copies of the views, and makes itself one."""

    def of(self, states: Mapping[int, object]) -> bool:
        return len(states) == len(self.states) and all(map(is_, states.values(), self.states))

    @property
    def full(self) -> bool:
        """Whether there is no room for one more row."""
        return self.room.room <= self.n

    def _lie(self, scores: Tensor) -> None:
        """As [layers, h, n]."""
        layers, kept, n = scores.shape
        self.room = Weighed(layers, kept, self.heads, n + 1)
        self.scores = scores.new_empty((layers, kept, self.room.room))
        self.scores[:, :, :n] = scores
        self.room.gone[:, :, :n] = scores == GONE
        self._retire = Retiring(self.scores, self.room, self.how)

    def _spread(self, spare: int) -> None:
        """One head after the other."""
        kept, begins = len(self._begins[0]), [begin for layer in self._begins for begin in layer]
        self.room = Weighed(len(self.states), kept, self.heads, self.n + spare, begins)
        self.scores = torch.zeros(len(self.room.gone))
        rooms = [self.room.rooms[row : row + kept] for row in range(0, len(begins), kept)]
        for state, own, plane in zip(self.states, rooms, torch.split(self.scores, [sum(own) for own in rooms])):
            lines = list(torch.split(plane, own))
            self._planes.append(plane.view(kept, -1) if isinstance(state, Tensor) else lines)
            for line, head in zip(lines, state):
                line[: len(head)] = head
        self.room.gone[:] = self.scores == GONE
        self._retire = Retiring(self.scores, self.room, self.how)

    def add(self, row: int, places: int) -> dict[int, State]:
        """The row that was weighed, at position `row`, stays, and the lowest over the budget leave; see `Retiring`. ->
        the scores by layer"""
        self.n += 1
        self._retire(self.n, row, places)
        return self._views()

    def drop(self) -> dict[int, State] | None:
        """Slots that are left move together; `staying` says which they are. -> the scores by layer; None: nothing has
        left, or heads have unequally many"""
        if self._planes:
            return None
        left = self.room.gone[:, :, : self.n] == 0
        counts = left.sum(-1)
        count = int(counts.amin())
        if count == self.n or count < int(counts.amax()):
            return None
        slots = left.nonzero()[:, 2].view(*left.shape[:2], count)
        self.scores[:, :, :count] = self.scores.gather(2, slots)
        self.room.gone.zero_()
        self.n, self.settled, self.staying = count, True, slots.unbind()
        if self.room.room > rounded(count + ROUND):  # as the rows' room shrinks
            self._lie(self.scores[:, :, :count])
        return self._views()

    def _views(self) -> dict[int, State]:
        if self._planes:
            self.states = self._lines()
        else:
            self.states = self.scores[:, :, : self.n].unbind()
        return dict(enumerate(self.states))

    def _lines(self) -> list[State]:
        """The same where heads have unequally many slots: one call cuts all lines."""
        kept, ends = len(self._begins[0]), [self.n - begin for layer in self._begins for begin in layer]
        sizes = [size for end, room in zip(ends, self.room.rooms) for size in (end, room - end)]
        cut = self.scores.split_with_sizes(sizes)[::2]
        return [
            plane[:, : ends[at]] if isinstance(plane, Tensor) else list(cut[at : at + kept])
            for plane, at in zip(self._planes, range(0, len(cut), kept))
        ]
