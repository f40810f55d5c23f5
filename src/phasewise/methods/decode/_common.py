"""Runs of tokens that two texts have in common, in the same order: in time that grows with the texts and no faster, for
texts come from strangers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

GRAM = 32  # tokens by which runs are looked up, at most
Gram = tuple[int, ...]


def common(old: Sequence[int], new: Sequence[int], least: int) -> list[tuple[int, int, int]]:
    """(place in old, place in new, length) of runs of at least `least` tokens, increasing in both places.

    What occurs once in either text goes where it belongs; of what repeats, the first that fits between. So where
    a text repeats itself, a longer set of runs may exist than the one found.
    """
    gram = min(least, GRAM)
    places = _places(old, gram)
    anchors = _chain(places, _places(new, gram))
    runs: list[tuple[int, int, int]] = []
    at = to = 0  # what lies before is settled
    while to + gram <= len(new):
        while anchors and anchors[-1][0] < to:
            anchors.pop()
        spots = places.get(tuple(new[to : to + gram]), [])
        ceiling = anchors[-1][1] if anchors else len(old)
        place = bisect_left(spots, at)
        size = 0
        if place < len(spots) and spots[place] <= ceiling:
            size = _same(old, new, spots[place], to)
        if size < least:
            to += 1
            continue
        runs.append((spots[place], to, size))
        at, to = spots[place] + size, to + size
    return runs


def _same(old: Sequence[int], new: Sequence[int], at: int, to: int) -> int:
    """The number of tokens that agree from there on."""
    most = min(len(old) - at, len(new) - to)
    return next((i for i in range(most) if old[at + i] != new[to + i]), most)


def _places(text: Sequence[int], gram: int) -> dict[Gram, list[int]]:
    found: dict[Gram, list[int]] = {}
    for at in range(len(text) - gram + 1):
        found.setdefault(tuple(text[at : at + gram]), []).append(at)
    return found


def _chain(old: Mapping[Gram, list[int]], new: Mapping[Gram, list[int]]) -> list[tuple[int, int]]:
    """(place in new, place in old) of what occurs once in both: the longest chain that increases in both, the last
    first."""
    pairs = sorted((at[0], old[gram][0]) for gram, at in new.items() if len(at) == 1 == len(old.get(gram, ())))
    ends: list[int] = []  # of chains of each length, the smallest place in old that one can end with ...
    last: list[int] = []  # ... and the pair that does
    before = [-1] * len(pairs)
    for i, (_, place) in enumerate(pairs):
        length = bisect_left(ends, place)
        before[i] = last[length - 1] if length else -1
        ends[length : length + 1], last[length : length + 1] = [place], [i]
    chain, i = [], last[-1] if last else -1
    while i >= 0:
        chain.append(pairs[i])
        i = before[i]
    return chain
