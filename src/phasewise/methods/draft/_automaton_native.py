"""The suffix automaton of `_automaton.py` by the kernels: no Python runs between the tokens of a text that is read."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phasewise.ops.native import library
from phasewise.ops.native.abi import ChainStruct, SuffixesStruct

FIRST = 256  # tokens that there is room for at first
OF_STATE = ("link", "length", "end", "first", "followers")  # columns of numbers, as in kernels.h
OF_EDGE = ("from_", "token", "target", "next")
STATES, EDGES = 2, 3  # of a token, at most; two and four more


class Odds:
    """The chance of a token to come next, by how many tokens before it match (the last entry: as many or more): `only`
    if nothing else ever followed these, `latest` if it is the latest of several. An instance has room for one answer,
    so two threads may not use it at once."""

    def __init__(self, only: Sequence[float], latest: Sequence[float], most: int) -> None:
        """`most` tokens at a time."""
        self.only, self.latest = array("d", only), array("d", latest)
        self.tokens, self.likely = array("q", bytes(8 * most)), array("d", bytes(8 * most))
        self._chain = ChainStruct(
            only=self.only, latest=self.latest, onlys=len(only), latests=len(latest), tokens=self.tokens,
            likely=self.likely,
        )  # fmt: skip

    def ask(self, most: int, shortest: int, least: float) -> int:
        """Returns the address of a Chain (kernels.h) that asks for at most `most` tokens; see `chain`."""
        assert most <= len(self.tokens)
        self._chain.most, self._chain.shortest, self._chain.least = most, shortest, least
        return self._chain.address


class NativeSuffixAutomaton:
    """`SuffixAutomaton` in native calls, for tokens from 0 to 2^31 - 1. Needs kernels (ops/native/suffixes.cpp).

    States and edges are int32 columns that grow with the text. It has the members that drafters from one text need.
    """

    __slots__ = ("_edges", "_room", "_states", "_struct", "_table")

    def __init__(self) -> None:
        self._room = 0
        self._states = np.zeros((len(OF_STATE), 1), dtype=np.int32)  # the state of no token
        self._states[:, 0] = -1, 0, -1, -1, 0
        self._edges = np.zeros((len(OF_EDGE), 0), dtype=np.int32)
        self._struct = SuffixesStruct(states=1)
        self._grow(FIRST)

    @property
    def n(self) -> int:
        """Tokens of the text."""
        return self._struct.n

    @property
    def match(self) -> int:
        """Length of the longest suffix of the text that has ended before."""
        return int(self._kernels().suffixes_match(self._struct.address))

    def fork(self) -> NativeSuffixAutomaton:
        twin = NativeSuffixAutomaton.__new__(NativeSuffixAutomaton)
        of = self._struct
        twin._room = self._room
        twin._struct = SuffixesStruct(states=of.states, edges=of.edges, last=of.last, n=of.n)
        twin._states, twin._edges, twin._table = self._states.copy(), self._edges.copy(), self._table.copy()
        twin._point()
        return twin

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        if self.n + len(tokens) > self._room:
            self._grow(max(2 * self._room, self.n + len(tokens)))
        more = array("q", tokens)
        self._kernels().suffixes_read(self._struct.address, more.buffer_info()[0], len(more))

    def chain(self, most: int, shortest: int, least: float, odds: Odds) -> tuple[list[int], list[float]]:
        """At most `most` tokens that go on, each the latest of those that followed the longest match of at least
        `shortest`, as long as all of them together are as likely as `least`; and how likely each is."""
        ask = odds.ask(most, shortest, least)
        count = self._kernels().suffixes_chain(self._struct.address, ask)
        return odds.tokens[:count].tolist(), odds.likely[:count].tolist()

    def places(self, shortest: int, most: int) -> list[int]:
        """At most `most` positions right after places where a suffix of at least `shortest` tokens ended: longest
        suffix first, then latest; per suffix one for each token that has followed it."""
        found = array("q", bytes(8 * most))
        count = self._kernels().suffixes_places(self._struct.address, shortest, most, found.buffer_info()[0])
        return found[:count].tolist()

    @staticmethod
    def _kernels() -> ctypes.CDLL:
        kernels = library()
        assert kernels is not None
        return kernels

    def _grow(self, room: int) -> None:
        """Makes room for a text of so many tokens."""
        self._room = room
        self._states = _wider(self._states, STATES * room + 2)
        self._edges = _wider(self._edges, EDGES * room + 4)
        self._table = np.zeros(1 << (2 * self._edges.shape[1]).bit_length(), dtype=np.int32)
        self._point()
        self._kernels().suffixes_place(self._struct.address)

    def _point(self) -> None:
        """Writes the addresses of all columns into the structure."""
        for names, columns in ((OF_STATE, self._states), (OF_EDGE, self._edges)):
            for name, column in zip(names, columns):
                setattr(self._struct, name, column.ctypes.data)
        self._struct.table, self._struct.mask = self._table.ctypes.data, len(self._table) - 1


def _wider(columns: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    found = np.zeros((len(columns), width), dtype=np.int32)
    found[:, : columns.shape[1]] = columns
    return found
