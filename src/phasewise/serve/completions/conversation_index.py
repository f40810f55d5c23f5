"""Answers that have an id, and the requests behind them: for who wants to go on from the KV that one left (`after`).

A client names an answer's id, which it was told; the engine's names of requests, which can be guessed, are never taken
from outside. An id means something to the key it was given to, and to nobody else: for others it is one that no answer
ever had, whose text is computed as any other. Without keys whoever knows an id may use it; it has 122 random bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from phasewise.serve.completions.answer import AnswerChoice
from phasewise.serve.guard.context import CURRENT

NOBODY = ""  # of all requests, the one that no engine has heard of
REMEMBERED = 16_384  # answers; KV mostly goes sooner


class _Behind(NamedTuple):
    owner: str | None  # the key's name
    requests: list[str]  # of its choices


class ConversationIndex:
    """The conversations of the latest `most` answers, by id."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[str, _Behind] = OrderedDict()

    def note(self, id: str, choices: Sequence[AnswerChoice]) -> None:
        """An answer and its choices, by their index."""
        self._known[id] = _Behind(_owner(), [choice.feed.request.id for choice in choices])
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def request(self, name: str) -> str:
        """The request of an answer's first choice, or of the one with this index ('ID.2'); NOBODY if there is none, or
        it is not for whoever asks."""
        id, _, index = name.partition(".")
        behind = self._known.get(id)
        at = int(index or 0) if index.isascii() and (not index or (index.isdigit() and len(index) < 6)) else -1
        if behind is None or behind.owner != _owner() or not 0 <= at < len(behind.requests):
            return NOBODY
        return behind.requests[at]


def _owner() -> str | None:
    exchange = CURRENT.get()
    return None if exchange is None or exchange.quota is None else exchange.quota.key.name
