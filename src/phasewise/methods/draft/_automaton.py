"""A suffix automaton that grows with its text: the longest earlier match of the end, at constant cost per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from phasewise.methods.draft._automaton_native import NativeSuffixAutomaton, Odds
from phasewise.ops.native import library

MARKED = 32  # matches of one text's end whose position is brought up to date with each token


def automaton() -> SuffixAutomaton | NativeSuffixAutomaton:
    """Returns an empty automaton: the native one where there are kernels."""
    return SuffixAutomaton() if library() is None else NativeSuffixAutomaton()


class SuffixAutomaton:
    """Every substring of the tokens so far, as states of substrings that end at the same places.

    Amortised O(1) time and memory per token. A state knows where its substrings ended last, and how often they have
    occurred; only where more than `MARKED` different matches nest (long runs of a short period) may the shortest of
    them know an older place and a lower number.
    """

    __slots__ = ("_count", "_end", "_last", "_length", "_link", "_next", "n")

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that also ends elsewhere
        self._length = [0]  # of the state's longest substring
        self._end = [-1]  # position of a substring's last token
        self._count = [0]  # occurrences of a substring
        self._last = 0  # the state of the whole text
        self.n = 0

    def fork(self) -> SuffixAutomaton:
        twin = SuffixAutomaton()
        twin._next = [edges.copy() for edges in self._next]
        twin._link, twin._length, twin._end = self._link.copy(), self._length.copy(), self._end.copy()
        twin._count, twin._last, twin.n = self._count.copy(), self._last, self.n
        return twin

    @property
    def match(self) -> int:
        """Length of the longest suffix of the text that has ended before."""
        return self._length[self._link[self._last]] if self.n else 0

    def extend(self, token: int) -> None:
        now = self._state({}, 0, self._length[self._last] + 1, self.n, 1)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = now
            state = self._link[state]
        if state >= 0:
            self._link[now] = self._suffix(state, token)
        self._last = now
        link = self._link[now]
        for _ in range(MARKED):
            if link <= 0:
                break
            self._end[link] = self.n
            self._count[link] += 1
            link = self._link[link]
        self.n += 1

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.extend(token)

    def places(self, shortest: int, most: int) -> list[int]:
        """At most `most` positions right after places where a suffix of at least `shortest` tokens ended: longest
        suffix first, then latest; per suffix one for each token that has followed it."""
        return list(islice(self._followers(shortest), most))

    def _followers(self, shortest: int) -> Iterator[int]:
        state = self._link[self._last]
        while state > 0 and self._length[state] >= shortest:
            yield from sorted((self._end[after] for after in self._next[state].values()), reverse=True)
            state = self._link[state]

    @property
    def end(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that has ended before, and its length; (0, 0): none has."""
        state = self._link[self._last] if self.n else 0
        return state, self._length[state]

    def after(self, state: int, match: int, shortest: int) -> Iterator[tuple[int, list[int]]]:
        """Yields what has followed a text that ends in the `match` tokens of `state`: for its suffixes of at least
        `shortest` tokens, longest first, how many tokens match and the tokens that followed, latest first."""
        while match >= shortest and state > 0:
            edges = self._next[state]
            if len(edges) == 1:
                yield match, list(edges)
            elif edges:
                end = self._end
                yield match, sorted(edges, key=lambda token: -end[edges[token]])
            state = self._link[state]
            match = self._length[state]

    def matches(self, state: int, match: int, shortest: int) -> Iterator[tuple[int, int]]:
        """Yields the state and the length of the `match` tokens of `state` and of their suffixes of at least `shortest`
        tokens, longest first: those that were followed by other tokens, or otherwise often. At most `MARKED`."""
        for _ in range(MARKED):
            if match < shortest or state <= 0:
                return
            yield state, match
            state = self._link[state]
            match = self._length[state]

    def counts(self, state: int) -> list[tuple[int, int, int]]:
        """Returns what has followed the substrings of a state: token, how often, and the state where it leads."""
        return [(token, self._count[after], after) for token, after in self._next[state].items()]

    def latest(self, state: int, match: int, shortest: int) -> tuple[int, int, int, int] | None:
        """Returns the first that `after` yields: the latest token, how many tokens match before it, how many different
        ones have followed these, and the state where the token leads (it matches one token more); None: nothing."""
        while match >= shortest and state > 0:
            edges = self._next[state]
            if edges:
                end = self._end
                token = next(iter(edges)) if len(edges) == 1 else max(edges, key=lambda token: end[edges[token]])
                return token, match, len(edges), edges[token]
            state = self._link[state]
            match = self._length[state]
        return None

    def chain(self, most: int, shortest: int, least: float, odds: Odds) -> tuple[list[int], list[float]]:
        """At most `most` tokens that go on, each the latest of those that followed the longest match of at least
        `shortest`, as long as all of them together are as likely as `least`; and how likely each is."""
        tokens, likely, reached, (state, match) = list[int](), list[float](), 1.0, self.end
        while len(tokens) < most and (found := self.latest(state, match, shortest)) is not None:
            token, length, followed, state = found
            table = odds.only if followed == 1 else odds.latest
            chance = table[length] if length < len(table) else table[-1]
            reached *= chance
            if reached < least:
                break
            tokens.append(token)
            likely.append(chance)
            match = length + 1
        return tokens, likely

    def follow(self, state: int, match: int, token: int) -> tuple[int, int]:
        """The longest end of a text that occurs in this one, one token on: from the state and length of that before."""
        while match <= self._length[self._link[state]] and state > 0:  # since split off: this text has grown
            state = self._link[state]
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            match = self._length[state]
        after = self._next[state].get(token)
        return (0, 0) if after is None else (after, match + 1)

    def _suffix(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring followed by `token`, split off where it has more to it."""
        found = self._next[state][token]
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        split = self._state(self._next[found].copy(), self._link[found], length, self._end[found], self._count[found])
        self._link[found] = split
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _state(self, edges: dict[int, int], link: int, length: int, end: int, count: int) -> int:
        self._next.append(edges)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        self._count.append(count)
        return len(self._link) - 1
