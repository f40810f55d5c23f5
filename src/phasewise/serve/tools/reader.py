"""Text in pieces as they come, deltas out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phasewise.serve.tools.deltas import DeltaCollector, OutputDelta, Steps
from phasewise.serve.tools.formats import Format
from phasewise.serve.tools.reasoning import Tags, finish, split
from phasewise.serve.tools.scan import Brackets, KnownTools, until


@dataclass(frozen=True)
class ParserOptions:
    """Settings of a parser: calls of this `format` to these `tools`, if there are any; reasoning between `tags`, if it
    is split off, which the prompt may have `opened`; `single`: the answer ends with its first call; `exact`: white
    space after reasoning is the answer's own."""

    format: Format | None = None
    tools: frozenset[str] = frozenset()
    tags: Tags | None = None
    opened: bool = False
    single: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)  # of the tools' parameters, by their names
    exact: bool = False


class OutputParser:
    """Reads one answer. Pushes and the finish, joined, give the same however the text is cut."""

    def __init__(self, manner: ParserOptions) -> None:
        self.called = False  # a call has begun
        self.done = False  # the answer has ended with its first call, whatever the model still writes
        self._out, self._single, self._arguments = DeltaCollector(), manner.single, Brackets()
        steps = _steps(manner, self._out)
        if manner.tags is not None:
            steps = split(self._out, manner.tags, manner.opened, steps, manner.exact)
        self._steps = steps
        next(self._steps)

    def push(self, text: str) -> list[OutputDelta]:
        """Takes text, and returns the deltas that have become certain with it."""
        for c in text:
            self._steps.send(c)
        return self._taken()

    def finish(self) -> list[OutputDelta]:
        """Returns what was held back, at the end of the text."""
        finish(self._steps)
        return self._taken()

    def _taken(self) -> list[OutputDelta]:
        found = []
        for delta in self._out.take():
            if self._single and (self.done or (self.called and delta.kind != "arguments")):
                self.done = True
                break
            self.called |= delta.kind == "call"
            found.append(delta)
            if self._single and delta.kind == "arguments":
                fine = all(self._arguments.step(c) for c in delta.text)
                self.done = fine and self._arguments.depth == 0
        return found


def _steps(manner: ParserOptions, out: DeltaCollector) -> Steps:
    if manner.format is not None:
        return manner.format.read(out, KnownTools(manner.tools, manner.schemas))
    return _plain(out)


def _plain(out: DeltaCollector) -> Steps:
    yield from until(out, (yield), ())
