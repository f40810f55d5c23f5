"""Answers of recent requests, to be looked up by those that come after them."""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.methods.draft._automaton import SuffixAutomaton
from phasewise.request.request import Request

MOST = 32_768  # tokens of a generation; two are kept, some ten MB each
BACK = 64  # tokens that whoever comes new to a text looks back: longer matches are as sure as these
BREAK = -1  # no token: between two answers

Place = tuple[int, int]  # a state of an automaton, and how many tokens match there


class Cursor:
    """The place where the end of a request's text, up to `n` tokens, occurs in another text: its longest end that
    occurs there."""

    def __init__(self, text: SuffixAutomaton, n: int) -> None:
        self.text, self.n = text, n
        self.place: Place = (0, 0)

    def fork(self) -> Cursor:
        twin = Cursor(self.text, self.n)
        twin.place = self.place
        return twin

    def move(self, tokens: Sequence[int]) -> None:
        for token in tokens[self.n :]:
            self.place = self.text.follow(*self.place, token)
        self.n = len(tokens)


class Earlier:
    """Answers of requests that have left: a newer and an older generation, of bounded size."""

    def __init__(self, most: int = MOST) -> None:
        self.texts = [SuffixAutomaton()]
        self.most = most
        self._open: dict[str, Request] = {}

    def watch(self, request: Request) -> None:
        """Keep its answer when it has left."""
        self._open[request.id] = request

    def collect(self) -> None:
        for request in [each for each in self._open.values() if each.left is not None]:
            del self._open[request.id]
            self.add(request.out)

    def add(self, tokens: Sequence[int]) -> None:
        if self.texts[0].n and self.texts[0].n + len(tokens) > self.most:
            self.texts = [SuffixAutomaton(), self.texts[0]]
        for token in (*tokens[: self.most], BREAK):
            self.texts[0].extend(token)

    def cursors(self, old: Sequence[Cursor], tokens: Sequence[int]) -> list[Cursor]:
        """One per generation, where the text `tokens` ends; from `old` ones where they know the generation."""
        known = {id(cursor.text): cursor for cursor in old}
        found = [known.get(id(text)) or Cursor(text, max(0, len(tokens) - BACK)) for text in self.texts]
        for cursor in found:
            cursor.move(tokens)
        return found
