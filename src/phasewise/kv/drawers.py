"""Bytes booked for tensors that methods keep in a request's drawers (scores of its rows, say) from step to step.

They are booked with the rows, and given back as these go. A method cannot do without them, so each fork, whose drawers
are copies, has bookings of its own. What is a few numbers, however long the text, and what a step under way has noted,
is not booked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phasewise.kv.buffer import Ledger

if TYPE_CHECKING:
    from phasewise.kv.layer_kv import LayerKV


class Room(NamedTuple):
    """The capacity of a layer: so many `rows` a head, on average, at positions below `end`. `prompt`: the prompt is
    not complete."""

    rows: int
    end: int
    prompt: bool


Draws = Callable[[Room], int]
"""Bytes at most of what lies in a request's drawers for a layer with such room."""


class Drawers:
    """The bytes booked for the drawers of one request, by layer."""

    __slots__ = ("booked", "draws", "ledger", "most", "prompt")

    def __init__(self, draws: Sequence[Draws], ledger: Ledger) -> None:
        self.draws, self.ledger, self.prompt = draws, ledger, True
        self.booked, self.most = [0] * len(draws), [sys.maxsize] * len(draws)

    @property
    def bytes(self) -> int:
        return sum(self.booked)

    def lacks(self, i: int, layer: LayerKV, rows: int = 0) -> int:
        """Bytes that are to be booked for a layer with room for `rows` more rows; below 0: to be given back."""
        wanted = self.draws[i](Room(*layer.room(rows), self.prompt)) if layer.slabs else 0
        return min(wanted, self.most[i]) - self.booked[i]

    def growth(self, layers: Sequence[LayerKV], rows: Sequence[int]) -> int:
        """Bytes that `book` would add once there is that much room."""
        return sum(max(0, self.lacks(i, layer, rows[i])) for i, layer in enumerate(layers))

    def book(self, layers: Sequence[LayerKV]) -> None:
        for i, layer in enumerate(layers):
            self._add(i, self.lacks(i, layer))

    def settle(self, i: int, layer: LayerKV) -> None:
        """Rows of a layer have gone, or less is wanted: give back what is too much. What lacks is booked if there is
        room, else with that for the next rows."""
        lacking = self.lacks(i, layer)
        if lacking < 0 or (lacking and self.ledger.room(lacking)):
            self._add(i, lacking)

    def fork(self) -> Drawers:
        twin = Drawers(self.draws, self.ledger)
        twin.prompt, twin.most, twin.booked = self.prompt, [*self.most], [*self.booked]
        self.ledger.add(self.bytes)
        return twin

    def close(self) -> None:
        for i, booked in enumerate(self.booked):
            self._add(i, -booked)

    def _add(self, i: int, n_bytes: int) -> None:
        self.ledger.add(n_bytes)
        self.booked[i] += n_bytes
