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
from phasewise.step.span import Span, ancestors, depths
from phasewise.verbs.skip import Skip

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.request import Request
    from phasewise.verbs.draft import Draft

COUNTED = ("rows", "row_layers", "kv_bytes_read", "kv_bytes_written", "expert_loads")  # as the model's own


@dataclass(slots=True)
class _Begun:
    """One request's tokens that the first layers have run, its pending one and guesses behind it. `parents`: as of the
    span that they become, -1 for the pending token. Those of rows that begin `behind` these layers come last."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # [d] each
    behind: list[Tensor] = field(default_factory=list)  # [d] each

    def carries(self, tokens: Sequence[int], parents: Sequence[int]) -> bool:
        """True if these are the first of its rows."""
        known = min(len(tokens), len(self.rows))
        fits = len(tokens) <= len(self.rows) + len(self.behind)
        return fits and [*tokens[:known]] == self.tokens[:known] and [*parents] == self.parents[: len(parents)]


class FirstLayers:
    """The first `depth` layers of the model, which run the pending token of a request, then one guess after the other,
    or with it a whole tree of guesses.

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
            begun.parents.append(first - 1)
        x = self._forward(spans)
        for span, row in zip(spans, x.unbind()):
            self._begun[span.request.id].rows.append(row)
        return x

    def run_trees(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Tensor]:
        """Rows after the first layers, [1 + guesses, d] of each request: of its pending token, then of the guesses of a
        draft. Nodes that ask begin behind these layers (`begin_behind`). One pass."""
        assert self._phase is not None, "guesses are made while these layers are lent"
        spans: list[Span] = []
        for request, draft in zip(requests, drafts, strict=True):
            assert request.kv is not None and request.computed == request.known - 1
            assert request.id not in self._begun, "a tree comes in one piece"
            tree, start = [-1, *(parent + 1 for parent in draft.parents)], request.computed + self.beyond
            rows = len(tree) - draft.ask
            tokens, positions = [request.tokens[-1], *draft.tokens[: rows - 1]], [start + at for at in depths(tree)]
            sees = None if _chain(tree[:rows]) else ancestors(tree[:rows], self.model.device)
            at = range(start, start + rows) if sees is None else positions[:rows]
            spans.append(Span(request, request.kv, self._phase, tokens, at, sees))
            self._begun[request.id] = _Begun(request, tokens, tree)
        x, each = self._forward(spans), list[Tensor]()
        for span in spans:
            each.append(x[span.slice])
            self._begun[span.request.id].rows += each[-1].unbind()
        return each

    def begin_behind(self, request: Request, rows: Tensor) -> None:
        """The rows [asking nodes, d] with which those nodes of its tree enter the layer behind these."""
        begun = self._begun[request.id]
        assert len(begun.rows) + len(rows) == len(begun.parents)
        begun.behind += rows.unbind()

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        """The rows of spans after the first layers [n, d]; counts what they cost."""
        own = Counters()
        x = forward(self.model, spans, own).x
        self.counters.draft_forwards += 1
        self.counters.draft_depth += self.depth
        for name in COUNTED:
            self.counters.count(name, getattr(own, name))
        return x

    def hand_over(self, span: Span) -> None:
        """Let a span go on from the rows of its tokens that are there. Where they are none of its beginning, these are
        dropped, and the span runs all layers."""
        begun = self._begun.get(span.request.id)
        if begun is None:
            return
        below = range(span.rows - 1) if span.note is None else (parent + 1 for parent in span.note.parents)
        if begun.carries(span.tokens, [-1, *below]):
            span.kv.spread()
            rows = [*begun.rows, *begun.behind][: span.rows]
            span.layers, span.hidden = (self.depth, self.model.config.layers), torch.stack(rows)
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
