"""Automata in native calls say, bit for bit, what the plain one says."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.methods.draft._automaton import SuffixAutomaton
from phasewise.methods.draft._automaton_native import FIRST, NativeSuffixAutomaton, Odds
from phasewise.methods.draft.suffix_decoding import LATEST, ONLY
from phasewise.ops.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels were built for this processor")

ODDS = Odds(ONLY, LATEST, 200)


def said(
    text: SuffixAutomaton | NativeSuffixAutomaton, most: int = 24, shortest: int = 1, least: float = 0.05
) -> object:
    return text.chain(most, shortest, least, ODDS)


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12),
    most=st.integers(0, 40),
    shortest=st.integers(1, 4),
    least=st.floats(1e-9, 0.5),
)
def test_it_goes_on_as_the_plain_one(pieces: list[list[int]], most: int, shortest: int, least: float) -> None:
    native, plain = NativeSuffixAutomaton(), SuffixAutomaton()
    assert said(native) == said(plain) == ([], [])
    for piece in pieces:
        native.read(piece)
        plain.read(piece)
        assert native.n == plain.n
        assert said(native, most, shortest, least) == said(plain, most, shortest, least)
        assert native.places(shortest, most) == plain.places(shortest, most)
        assert native.match == plain.match


@pytest.mark.parametrize("kinds", [1, 2, 50, 50_000])
def test_long_texts_grow_out_of_their_room(kinds: int) -> None:
    """Of one token over and over (states nest as deep as the text), of few, of many, and of nearly all different."""
    rng = random.Random(kinds)
    tokens = [rng.randrange(kinds) for _ in range(3 * FIRST)]
    tokens += tokens[FIRST : 2 * FIRST] + [rng.randrange(kinds) for _ in range(FIRST)] + tokens[:FIRST]
    native, plain = NativeSuffixAutomaton(), SuffixAutomaton()
    for at in range(0, len(tokens), 97):
        native.read(tokens[at : at + 97])
        plain.read(tokens[at : at + 97])
        assert said(native, 200, least=1e-12) == said(plain, 200, least=1e-12)
    assert kinds == 50_000 or said(native) != ([], [])


def test_a_fork_goes_its_own_way() -> None:
    native, plain = NativeSuffixAutomaton(), SuffixAutomaton()
    for text in (native, plain):
        text.read([1, 2, 3, 1, 2, 4, 1, 2])
    twin, again = native.fork(), plain.fork()
    for text in (twin, again):
        text.read([3, 1, 2, 4] * 200)
    assert said(twin) == said(again) and twin.n == again.n
    native.read([5, 1, 2])
    plain.read([5, 1, 2])
    assert said(native) == said(plain) != said(twin)


def test_reading_is_far_faster_than_the_plain_one() -> None:
    """Some thirty times (beside a busy core, too): a sixth of that is no question of the machine."""
    rng = random.Random(0)
    tokens = [rng.randrange(200) for _ in range(4000)]

    def seconds(make: type[SuffixAutomaton] | type[NativeSuffixAutomaton]) -> float:
        start = time.process_time()
        make().read(tokens)
        return time.process_time() - start

    assert min(seconds(NativeSuffixAutomaton) for _ in range(5)) * 5 < min(seconds(SuffixAutomaton) for _ in range(3))
