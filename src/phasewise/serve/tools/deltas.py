"""Deltas: a parser's output, in the order in which the model wrote it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["content", "reasoning", "call", "arguments"]
Steps = Generator[None, str, None]  # is sent one character at a time, and "" at the end of the text


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """A piece of content, reasoning or the arguments (JSON text) of a call; or a call's name, once, where it begins."""

    kind: Kind
    text: str
    index: int = 0  # which call


class DeltaCollector:
    """Collects deltas. `calls` have begun so far; `fresh`: a call or reasoning has ended and no text came since."""

    def __init__(self) -> None:
        self.calls, self.fresh = 0, False
        self._deltas: list[tuple[Kind, list[str], int]] = []

    def text(self, text: str, kind: Kind = "content") -> None:
        """Content, or reasoning."""
        if text:
            self.fresh = False
            self._add(kind, text, 0)

    def call(self, name: str, arguments: str) -> None:
        """A call begins, with as much of its arguments as is known."""
        self.fresh = True
        self._add("call", name, self.calls)
        self.calls += 1
        self.arguments(arguments)

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._add("arguments", text, self.calls - 1)

    def take(self) -> list[OutputDelta]:
        """Takes what has come since the last call; neighbours of one kind are one delta."""
        taken, self._deltas = self._deltas, []
        return [OutputDelta(kind, "".join(texts), index) for kind, texts, index in taken]

    def _add(self, kind: Kind, text: str, index: int) -> None:
        last = self._deltas[-1] if self._deltas else None
        if last is not None and kind != "call" and (last[0], last[2]) == (kind, index):
            last[1].append(text)
        else:
            self._deltas.append((kind, [text], index))


def joined(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """The same with neighbours of one kind as one delta."""
    found: list[OutputDelta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last is not None and delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            found[-1] = OutputDelta(delta.kind, last.text + delta.text, delta.index)
        else:
            found.append(delta)
    return found
