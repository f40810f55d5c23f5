"""Guess again what the model itself thought likely the last time (Token Recycling, arXiv 2408.08696): no second model,
no training; exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
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
# How often the successor of each rank is right: of the pending token, and of a guess that is right. Measured by
# scripts/recycling_ranks.py, the mean over pocket's answers to tasks and smollm2's to questions.
FIRST = (0.326, 0.095, 0.075, 0.028, 0.020, 0.017, 0.008, 0.008)
LATER = (0.513, 0.101, 0.056, 0.022, 0.022, 0.022, 0.010, 0.010)

Table = dict[int, list[int]]  # token -> its likeliest successors when it was last judged, best first


@dataclass(frozen=True)
class TokenRecycling(Method):
    """Every judged row, rejected ones too, leaves its `k` likeliest successors in a table; a guess is a fixed tree of
    `nodes` ranks filled in from that table, level by level.

    The tree holds the rank paths that are likeliest to be right, by how often each rank was where that was measured.
    `prompts=text` puts what follows each token of a prompt into the table, in front of what it has. Rows cost time on a
    CPU: with smollm2 on one core 63 nodes took 1.8 times the processor time of plain decoding, 15 and 7 took 1.1 times.
    On a GPU rows are nearly free. scope=engine shares the table among requests, which then show in each other's
    counters, never in each other's tokens: a verifier under which they might is refused. Left out: what the model
    thinks likely after the tokens of a prompt; the paper's tree of 80 nodes; guesses for tokens never judged or read
    (the paper's are token 0).
    """

    k: int = 8
    nodes: int = 15
    scope: Literal["request", "engine"] = "request"
    prompts: Literal["none", "text"] = "text"  # what a prompt leaves in the table

    paper: ClassVar[str] = "arXiv 2408.08696"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob, most in (("k", len(FIRST)), ("nodes", MOST)):
            if not 1 <= getattr(self, knob) <= most:
                raise UserError(f"token_recycling: {knob}={getattr(self, knob)} must be from 1 to {most}")
        if self.scope not in ("request", "engine"):
            raise UserError(f"token_recycling: scope={self.scope} must be request or engine")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, candidates=self.k, learns_across=self.scope == "engine")

    def bind(self, host: Host) -> Recycler:
        return Recycler(self.k, template(self.k, self.nodes), self.scope == "engine", self.prompts == "text")


class Recycler(Drafter):
    """Token Recycling in one engine."""

    def __init__(self, top: int, shape: tuple[tuple[int, ...], ...], shared: bool, reads: bool = False) -> None:
        """`shape`: rank paths, parents first. `reads`: prompts leave in the table what follows what in them."""
        self.top, self.shape, self.shared, self.reads = top, shape, shared, reads
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
        table: Table | None = request.state.get(NAME)
        if table is None:
            table = request.state[NAME] = self.table if self.shared else {}
            if self.reads:
                follow(table, request.prompt, self.top)
        return table


def follow(table: Table, text: Sequence[int], k: int) -> None:
    """Each token of a text gets what followed it there as successors, the last one first, before those it had."""
    for token, after in pairwise(text):
        known = table.get(token, [])
        if known[:1] != [after]:
            table[token] = [after, *(each for each in known if each != after)][:k]


@cache
def template(k: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `nodes` rank paths that are likeliest to be right, likeliest first; so parents come before children."""
    paths: list[tuple[int, ...]] = []
    ahead: list[tuple[float, tuple[int, ...]]] = [(-FIRST[0], (0,))]
    while len(paths) < nodes:
        weight, path = heappop(ahead)
        paths.append(path)
        heappush(ahead, (weight * LATER[0], (*path, 0)))
        each, rank = FIRST if len(path) == 1 else LATER, path[-1]
        if rank + 1 < k:
            heappush(ahead, (weight / each[rank] * each[rank + 1], (*path[:-1], rank + 1)))
    return tuple(paths)
