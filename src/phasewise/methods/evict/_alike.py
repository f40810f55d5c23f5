"""Running scores that lie alike in all layers, in one piece, for tokens that are whole native steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import Tensor

from phasewise.kv.buffer import ROUND, rounded
from phasewise.ops.native.weighed import Ranking, Retiring, Weighed

GONE = float("-inf")  # the score of a slot that was given up, or is not on a row's path


class Alike:
    """A request's scores [layers, h, n] with room behind them, and the room in which its next row is weighed.

    They are written in place, but only once a row stays: a step that is tried again finds them as they were. What the
    request's drawer holds are views of them; `of` tells whether it still does, and nothing else has come between.
    """

    def __init__(self, states: Sequence[Tensor], how: Ranking, heads: tuple[int, int], settled: bool) -> None:
        """`states` [h, n] of all layers; `heads`: those of KV, and of queries. `settled`: rows have been dropped in all
        layers."""
        self.states, self.how, self.heads, self.settled = states, how, heads, settled
        self.n = states[0].shape[1]
        self.staying: Sequence[Tensor] = ()  # slots that layers keep, while they are told one after another
        self._lie(torch.stack(list(states)))

    def fork(self) -> None:
        """A twin has copies of the views, and makes itself one."""

    def of(self, states: Mapping[int, object]) -> bool:
        return len(states) == len(self.states) and all(map(is_, states.values(), self.states))

    def _lie(self, scores: Tensor) -> None:
        layers, kept, n = scores.shape
        self.room = Weighed(layers, kept, self.heads, n + 1)
        self.scores = scores.new_empty((layers, kept, self.room.room))
        self.scores[:, :, :n] = scores
        self.room.gone[:, :, :n] = scores == GONE
        self._retire = Retiring(self.scores, self.room, self.how)

    def ready(self) -> Weighed:
        """Room for one more row."""
        if self.n + 1 > self.room.room:
            self._lie(self.scores[:, :, : self.n])
        return self.room

    def add(self) -> dict[int, Tensor]:
        """The row that was weighed stays, and the lowest over the budget leave. -> the scores by layer"""
        self.n += 1
        self._retire(self.n)
        return self._views()

    def drop(self) -> dict[int, Tensor] | None:
        """Slots that are left move together; `staying` says which they are. -> the scores by layer; None: nothing has
        left, or heads have unequally many"""
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

    def _views(self) -> dict[int, Tensor]:
        self.states = self.scores[:, :, : self.n].unbind()
        return dict(enumerate(self.states))
