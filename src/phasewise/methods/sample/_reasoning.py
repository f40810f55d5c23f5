"""Reasoning before an answer that follows a grammar: whether a text is still within it, and how it is closed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from phasewise.methods.sample._words import Words

BEFORE, INSIDE, AFTER = range(3)  # the opening tag; both tags; the closing tag, or the answer itself


class Thought(NamedTuple):
    """A place in a text, and the last of its bytes, as far as a tag may begin in them."""

    phase: int
    tail: bytes = b""


class ReasoningTags:
    """The tags around reasoning (`Params.ask["reasoning"]`: open, close, and whether the prompt has `opened` it)."""

    def __init__(self, asked: Mapping[str, Any], words: Words) -> None:
        self._open, self._close = str(asked["open"]).encode(), str(asked["close"]).encode()
        self._words = words
        self._token = next((i for i in words.special if i < words.vocab and words.bytes[i] == self._close), None)
        self.start = Thought(INSIDE if asked.get("opened") else BEFORE)

    def read(self, thought: Thought, tokens: Iterable[int]) -> Thought:
        """Returns where the text is after these tokens."""
        text = thought.tail + b"".join([self._words.bytes[token] for token in tokens])
        phase = thought.phase
        if phase == BEFORE:
            bare = text.lstrip()
            if not bare.startswith(self._open):
                return Thought(BEFORE, text) if self._open.startswith(bare) else Thought(AFTER)
            phase, text = INSIDE, bare.removeprefix(self._open)
        if phase == AFTER or self._close in text:
            return Thought(AFTER)
        return Thought(INSIDE, text[-len(self._close) + 1 :])

    def closing(self, thought: Thought) -> int | None:
        """The token with which reasoning goes on to its end; None outside of it."""
        if thought.phase != INSIDE:
            return None
        said = next(n for n in range(len(self._close), -1, -1) if thought.tail.endswith(self._close[:n]))
        if said == 0 and self._token is not None:
            return self._token
        return next(iter(self._words.speller(self._close[said:])), None)
