"""One request's output as text, piece by piece: never half a character, never a stop string or the start of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phasewise.errors import UserError
from phasewise.model.tokenizer import Detokenizer, Tokenizer


class Text:
    """Turns tokens into text that is certain: what may be the start of a stop string is held back until it is not.

    All pushes and the flush joined are the output's text up to the first of `stops`. `ends` are tokens that have no
    text because they end the output, `shown` special tokens that have it. Two instances that are given the same tokens
    decide the same, so one can watch in the engine (`watch`) and another write elsewhere. Raises UserError for an empty
    stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Sequence[str] = (), ends: Collection[int] = (),
        shown: Collection[int] = (),
    ) -> None:  # fmt: skip
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(stops):
            raise UserError(f"stop={list(stops)!r} has an empty string, which is everywhere: leave it out")
        self.stopped = False  # a stop string has appeared; there will be no more text
        self.stop: str | None = None  # which
        self._detokenizer = Detokenizer(tokenizer, shown=shown)
        self._stops = stops
        self._ends = frozenset(ends)
        self._held = ""  # the end of the text, if it may be the start of a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """The text that has become certain with these tokens, perhaps empty."""
        visible = [token for token in tokens if token not in self._ends]
        if not self._stops:
            return self._detokenizer.push(visible)
        return "".join([self._release(self._detokenizer.push([token])) for token in visible])

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        rest = self._release(self._detokenizer.flush())
        held, self._held = self._held, ""
        return rest + held

    def watch(self, token: int) -> bool:
        """For `Request.watch`: whether the output ends with this token because a stop string is complete."""
        self.push([token])
        return self.stopped

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        certain = len(text) - self._overlap(text)
        if found:
            certain, self.stop = min(found)
        self._held = "" if found else text[certain:]
        return text[:certain]

    def _overlap(self, text: str) -> int:
        """Characters at the end of `text` that are the start of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
