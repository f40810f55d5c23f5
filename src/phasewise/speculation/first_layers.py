"""The model's first layers, run over guesses before these are judged: their rows stay, and the verdict goes on there.

A drafter that guesses from what the first layers make of a token (arXiv 2404.18911) runs these on every guess. What
they leave, keys and values of those layers and the rows after the last of them, is what a pass over the guesses would
compute first. So that pass begins at the layer behind them (`Span.layers`), and no row runs a layer twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.request.counters import Counters
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.skip import Skip

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.request import Request

COUNTED = ("rows", "row_layers", "kv_bytes_read", "kv_bytes_written", "expert_loads")  # as the model's own


@dataclass(slots=True)
class _Begun:
    """One request's tokens that the first layers have run, its pending one and a chain of guesses behind it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # [d] each


class FirstLayers:
    """The first `depth` layers of the model, which run the pending token of a request, then one guess after the other.

    Rows are written to the request's own KV, uncommitted, within what the step has reserved (`room`), by the methods of
    its own phase. `Speculation` lends them for the time of one proposal (`lent`), and has the request's span go on from
    them (`hand_over`). If anything raises in between, they are dropped.
    """

    def __init__(self, model: Model, depth: int, counters: Counters) -> None:
        """`counters`: the engine's."""
        assert 0 < depth < model.config.layers
        self.model, self.depth, self.counters = model, depth, counters
        self.beyond = 0  # rows behind every prompt that stand for no token
        self._skip = _Above(depth)
        self._phases: dict[int, tuple[Phase, Phase]] = {}  # by the phase that it stands for, which lives as long
        self._phase: Phase | None = None  # of the requests under way
        self._begun: dict[str, _Begun] = {}  # by request

    @contextmanager
    def lent(self, phase: Phase) -> Iterator[None]:
        """Requests of `phase` are guessed for, and their spans made. Whoever has no span then has no rows either."""
        touched = self._begun = {}
        self._phase = self._part_of(phase)
        try:
            yield
        except BaseException:
            for begun in touched.values():
                self.drop(begun.request)
            raise
        finally:
            self._begun, self._phase = {}, None

    def _part_of(self, phase: Phase) -> Phase:
        if id(phase) not in self._phases:
            self._phases[id(phase)] = phase, replace(phase, skip=self._skip)
        return self._phases[id(phase)][1]

    @staticmethod
    def room(request: Request) -> int:
        """Rows that there is room for, the pending token's among them."""
        assert request.kv is not None
        return request.kv.spare

    def run(self, requests: Sequence[Request], tokens: Sequence[int]) -> Tensor:
        """Rows after the first layers [n, d] of one token of each request: its pending one, then the guess behind the
        last that was run. One pass."""
        assert self._phase is not None, "guesses are made while these layers are lent"
        spans: list[Span] = []
        for request, token in zip(requests, tokens, strict=True):
            assert request.kv is not None and request.computed == request.known - 1
            begun = self._begun.setdefault(request.id, _Begun(request))
            first, at = len(begun.tokens), request.computed + self.beyond + len(begun.tokens)
            spans.append(Span(request, request.kv, self._phase, [token], range(at, at + 1), first=first))
            begun.tokens.append(token)
        own = Counters()
        x = forward(self.model, spans, own).x
        self.counters.draft_forwards += 1
        self.counters.draft_depth += self.depth
        for name in COUNTED:
            self.counters.count(name, getattr(own, name))
        for span, row in zip(spans, x.unbind()):
            self._begun[span.request.id].rows.append(row)
        return x

    def hand_over(self, span: Span) -> None:
        """Let a span go on from the rows of its tokens that are there. Where they are none of its beginning, these are
        dropped, and the span runs all layers."""
        begun = self._begun.get(span.request.id)
        if begun is None:
            return
        chain = span.sees is None or (span.note is not None and _chain(span.note.parents))
        if chain and span.rows <= len(begun.rows) and [*span.tokens] == begun.tokens[: span.rows]:
            span.kv.spread()
            span.layers, span.hidden = (self.depth, self.model.config.layers), torch.stack(begun.rows[: span.rows])
        else:
            self.drop(span.request)

    @staticmethod
    def drop(request: Request) -> None:
        """Rows of a request that were begun are there no more; its span will run all layers."""
        if request.kv is not None:
            request.kv.commit(0)


class _Above(Skip):
    """No row runs the layers from `depth` on."""

    def __init__(self, depth: int) -> None:
        self.depth, self.walk = depth, tuple(range(depth))

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return None if layer < self.depth else torch.empty(0, dtype=torch.int64, device=x.device)


def _chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))
