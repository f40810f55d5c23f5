"""Guess again what the model itself thought likely the last time (Token Recycling, arXiv 2408.08696): no second model,
no training; exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom, judged
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "token_recycling"
MOST = 63  # nodes: with the pending token, the rows of one native step
WEIGHTS = (0.6, 0.14, 0.07, 0.045, 0.03, 0.025, 0.02, 0.015)  # how likely a successor of each rank is taken to be right

Table = dict[int, list[int]]  # token -> its likeliest successors when it was last judged, best first


@dataclass(frozen=True)
class TokenRecycling(Method):
    """Every judged row, rejected ones too, leaves its `k` likeliest successors in a table; a guess is a fixed tree of
    `nodes` ranks filled in from that table, level by level.

    The tree holds the rank paths whose product of weights is largest. scope=engine shares the table among requests,
    which then show in each other's counters, never in each other's tokens: a verifier under which they might is
    refused. Left out: rows of prompts, whose successors nobody judges; the paper's tree of 80 nodes; guesses for
    tokens never judged (the paper's are token 0).
    """

    k: int = 8
    nodes: int = MOST
    scope: Literal["request", "engine"] = "request"

    paper: ClassVar[str] = "arXiv 2408.08696"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob, most in (("k", len(WEIGHTS)), ("nodes", MOST)):
            if not 1 <= getattr(self, knob) <= most:
                raise UserError(f"token_recycling: {knob}={getattr(self, knob)} must be from 1 to {most}")
        if self.scope not in ("request", "engine"):
            raise UserError(f"token_recycling: scope={self.scope} must be request or engine")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, candidates=self.k, learns_across=self.scope == "engine")

    def bind(self, host: Host) -> Recycler:
        return Recycler(self.k, template(self.k, self.nodes), self.scope == "engine")


class Recycler(Drafter):
    """Token Recycling in one engine."""

    def __init__(self, top: int, shape: tuple[tuple[int, ...], ...], shared: bool) -> None:
        self.top, self.shape, self.shared = top, shape, shared  # rank paths, parents first
        self.table: Table = {}  # all requests', where it is shared

    def size(self, request: Request) -> int:
        levels = headroom(request)
        return sum(len(path) <= levels for path in self.shape)

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        assert tops is not None
        rows = iter(tops.tolist())
        for span in spans:
            table = self._table(span.request)
            for row in judged(span):
                table[span.tokens[row]] = next(rows)

    def _guess(self, request: Request, budget: int) -> Draft:
        table, levels = self._table(request), headroom(request)
        draft = Draft([], [])
        nodes: dict[tuple[int, ...], int] = {(): -1}
        for path in self.shape:
            if len(draft.tokens) >= budget:
                break
            parent = nodes.get(path[:-1])
            if parent is None or len(path) > levels:
                continue
            after = table.get(request.tokens[-1] if parent < 0 else draft.tokens[parent])
            if after is None or path[-1] >= len(after):
                continue
            nodes[path] = draft.add(parent, after[path[-1]])
        return draft

    def _table(self, request: Request) -> Table:
        if self.shared:
            return self.table
        table: Table = request.state.setdefault(NAME, {})
        return table


@cache
def template(k: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `nodes` rank paths of the largest products of weights, largest first; so parents come before children."""
    paths: list[tuple[int, ...]] = []
    ahead: list[tuple[float, tuple[int, ...]]] = [(-WEIGHTS[0], (0,))]
    while len(paths) < nodes:
        weight, path = heappop(ahead)
        paths.append(path)
        heappush(ahead, (weight * WEIGHTS[0], (*path, 0)))
        if path[-1] + 1 < k:
            heappush(ahead, (weight / WEIGHTS[path[-1]] * WEIGHTS[path[-1] + 1], (*path[:-1], path[-1] + 1)))
    return tuple(paths)
