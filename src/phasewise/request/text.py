"""One request's output as text, piece by piece: never half a character, never a stop string or the start of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phasewise.errors import UserError
from phasewise.model.tokenizer import Detokenizer, Tokenizer
from phasewise.request.params import Params


class Text:
    """Turns tokens into text that is certain: what may be the start of a stop string is held back until it is not.

    All pushes and the flush joined are the output's text up to the first of `stops`, or to its end
    (`Params.include_stop_str_in_output`); the first `min_tokens` tokens are not searched. `ends` are tokens that have
    no text because they end the output, `shown` special tokens that have it, `before` those that the output's text goes
    on from; none where it begins one. Two instances that are given the same
    tokens decide the same, so one can watch in the engine (`watch`) and another write elsewhere. Raises UserError for
    a stop string that is empty or no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: str | Sequence[str] = (),
        ends: Collection[int] = (),
        params: Params = Params(),  # noqa: B008  (frozen)
        shown: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        stops = (stops,) if isinstance(stops, (str, bytes)) else tuple(stops)
        if not all(isinstance(stop, str) for stop in stops):
            raise UserError(f"stop={list(stops)!r:.80} must be a text or several: decode bytes first")
        if not all(stops):
            raise UserError(f"stop={list(stops)!r} has an empty string, which is everywhere: leave it out")
        self.stopped = False  # a stop string has appeared; there will be no more text
        self.stop: str | None = None  # which
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, shown, before)
        self._stops = stops
        self._ends = frozenset(ends)
        self._free = params.min_tokens if stops else 0  # so many tokens to come are not searched
        self._keeps = params.include_stop_str_in_output
        self._held = ""  # the end of the text, if it may be the start of a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """The text that has become certain with these tokens, perhaps empty."""
        if self._free:
            free, tokens = tokens[: self._free], tokens[self._free :]
            self._free -= len(free)
            return self._detokenizer.push(self._visible(free)) + (self.push(tokens) if tokens else "")
        visible = self._visible(tokens)
        if not self._stops:
            return self._detokenizer.push(visible)
        return "".join([self._release(self._detokenizer.push([token])) for token in visible])

    def _visible(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._ends]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the output."""
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
        found = [(at, at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        certain = len(text) - self._overlap(text)
        if found:
            start, end, self.stop = min(found)
            certain = end if self._keeps else start
        self._held = "" if found else text[certain:]
        return text[:certain]

    def _overlap(self, text: str) -> int:
        """Characters at the end of `text` that are the start of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
