"""Speculation, once for all drafters: draft chains and trees become spans, verified paths become outcomes.

A draft node states how it was drawn (DESIGN law 8), so a verifier knows which rule keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from phasewise.batch import Span, ancestors, depths
from phasewise.phase import Hidden, Host, Outcome, Phase
from phasewise.sampling import Context, Dist, Purpose, choose, distribution, draw, uniform

if TYPE_CHECKING:
    from phasewise.request import Request

Drawn = Literal["point", "iid", "without_replacement", "top_plus_one"]


@dataclass(slots=True)
class Draft:
    """A tree of guesses below the pending token. `parents[i] < i`, -1 = child of the pending token; children of a node
    stand in the order they were drawn.

    `q` float32 [nodes, V]: row i is the distribution node i was really drawn from; without replacement, earlier
    siblings are taken out of it and the rest is renormalised. A zero row marks a deterministic node among drawn ones.
    None: every node is deterministic ("point"), or q is unknown; then only matching the target's own draw is exact.
    """

    tokens: list[int]
    parents: list[int]
    drawn: Drawn = "point"
    q: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], drawn: Drawn = "point", q: Tensor | None = None) -> Draft:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), drawn, q)

    @classmethod
    def trie(cls, paths: Sequence[Sequence[int]]) -> Draft:
        """Deterministic guesses whose common beginnings are shared; nodes of earlier paths come first."""
        tree = cls([], [])
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            node = -1
            for token in path:
                if (node, token) not in nodes:
                    nodes[node, token] = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(node)
                node = nodes[node, token]
        return tree

    def children(self, node: int) -> list[int]:
        """Children of a node in draw order; -1 = of the pending token."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the first node down to `node`."""
        out: list[int] = []
        while node >= 0:
            out.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(out))

    def cut(self, nodes: int) -> Draft:
        """The first `nodes` nodes (parents come before children, so this is a tree again)."""
        if nodes >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:nodes]
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.drawn, q)

    def prune(self, levels: int) -> Draft:
        """The nodes at most `levels` tokens after the pending one."""
        if len(self.tokens) <= levels:
            return self
        kept = [node for node, depth in enumerate(depths(self.parents)) if depth < levels]
        new = {-1: -1} | {node: i for i, node in enumerate(kept)}
        q = None if self.q is None else self.q[kept]
        return Draft([self.tokens[n] for n in kept], [new[self.parents[n]] for n in kept], self.drawn, q)


class Random(Protocol):
    def __call__(self, depth: int, purpose: int, index: int = 0) -> float:
        """A number in [0, 1) for the token `depth` places after the pending one."""
        ...


class Drafter(Protocol):
    """draft: what might come next?"""

    def size(self, request: Request) -> int:
        """The most nodes it may propose next (a bound on the rows a step needs); see `room`."""
        ...

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        """At most `budget` nodes per request; more are cut, as are levels beyond `room`. None or empty = no guess.

        Deterministic given the request.
        """
        ...

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> None:
        """Told what became of every span (prompt slices, plain rows, drafts), before the tokens are emitted."""
        ...


class Verifier(Protocol):
    """verify: which guesses stay? Pure: no model, no cache."""

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        """`p` row 0 is the target's distribution after the pending token, row i + 1 after node i.

        -> (accepted nodes, root first, each the parent of the next; the token that follows them).
        """
        ...


def slice_span(request: Request, rows: int, phase: Phase) -> Span:
    """The next known tokens that are not computed yet, at most `rows` of them and never across the prompt's end."""
    assert request.kv is not None
    start = request.computed
    end = min(start + rows, request.prompt_len if request.prefilling else request.known)
    return Span(request, request.kv, phase, request.tokens[start:end], range(start, end))


def catching_up(request: Request) -> bool:
    """Whether known tokens other than the last are still to be computed (a prompt, or a replay after preemption)."""
    return request.prefilling or request.known - request.computed > 1


def room(request: Request) -> int:
    """How many drafted tokens in a row the request could still take; one more follows them."""
    return request.limit - request.known - 1


def draft_span(request: Request, draft: Draft, phase: Phase) -> Span:
    """Rows: the pending token, then the draft's nodes. Siblings share a position; each sees only its ancestors."""
    assert request.kv is not None
    tree = [-1, *(parent + 1 for parent in draft.parents)]
    start = request.computed
    if tree == list(range(-1, len(tree) - 1)):  # a chain is causal
        return Span(
            request, request.kv, phase, [request.tokens[-1], *draft.tokens], range(start, start + len(tree)), note=draft
        )
    positions = [start + d for d in depths(tree)]
    return Span(
        request, request.kv, phase, [request.tokens[-1], *draft.tokens], positions, sees=ancestors(tree), note=draft
    )


class Speculation:
    """The decode loop of every drafter: propose pending token + draft, verify, keep the accepted path.

    Prompts and replays go through as plain slices. With no draft a step is one ordinary row.
    """

    def __init__(self, host: Host, drafter: Drafter, verifier: Verifier) -> None:
        self.host, self.drafter, self.verifier = host, drafter, verifier

    def rows(self, request: Request) -> int:
        if catching_up(request):
            return (request.prompt_len if request.prefilling else request.known) - request.computed
        return 1 + (self.drafter.size(request) if room(request) > 0 else 0)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans: list[Span | None] = [None] * len(requests)
        ready = []
        for i, (request, budget) in enumerate(zip(requests, budgets)):
            if catching_up(request):
                spans[i] = slice_span(request, budget, phase)
            else:
                ready.append(i)
        if ready:
            nodes = [min(budgets[i], self.rows(requests[i])) - 1 for i in ready]
            with torch.inference_mode():
                drafts = self.drafter.draft([requests[i] for i in ready], nodes)
            for i, most, draft in zip(ready, nodes, drafts):
                if draft is not None and draft.tokens and most > 0:
                    spans[i] = draft_span(requests[i], draft.prune(room(requests[i])).cut(most), phase)
                else:
                    spans[i] = slice_span(requests[i], 1, phase)
        return [span for span in spans if span is not None]

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        wanted: list[int] = []
        contexts: list[Context] = []
        for span in spans:
            if span.note is not None:
                draft: Draft = span.note
                wanted.extend(range(span.start, span.start + span.rows))
                contexts.extend(Context(span.request, draft.path(node)) for node in range(-1, len(draft.tokens)))
            elif span.positions[-1] + 1 == span.request.known:
                wanted.append(span.start + span.rows - 1)
                contexts.append(Context(span.request))
        if wanted:
            dist = distribution(self.host.sample, self.host.model, hidden.rows(wanted), contexts)
            self.host.counters.head_rows += len(wanted)
        else:
            dist = Dist([], self.host.model.config.vocab)
        outcomes, row = [], 0
        for span in spans:
            outcome, used = self._judge(span, dist, row)
            outcomes.append(outcome)
            row += used
        self.drafter.learn(spans, hidden, outcomes)
        return outcomes

    def _judge(self, span: Span, dist: Dist, row: int) -> tuple[Outcome, int]:
        """The outcome of one span whose distributions start at `row`, and how many rows it had."""
        seed, known = span.request.params.seed, span.request.known

        def rng(depth: int, purpose: int, index: int = 0) -> float:
            return uniform(seed, known + depth, purpose, index)

        if span.note is None:
            if span.positions[-1] + 1 != known:
                return Outcome(span.rows, []), 0
            u = 0.0 if dist.greedy(row) else rng(0, Purpose.SAMPLE)
            return Outcome(span.rows, [dist.draw(row, u)]), 1
        draft: Draft = span.note
        path, token = self.verifier(draft, dist.part(row, row + span.rows), rng)
        keep: int | list[int] = [0, *(node + 1 for node in path)]
        if keep == list(range(len(path) + 1)):
            keep = len(path) + 1
        tokens = [*(draft.tokens[node] for node in path), token]
        return Outcome(keep, tokens, drafted=len(draft.tokens), accepted=len(path)), span.rows


def draw_outcomes(
    host: Host, spans: Sequence[Span], hidden: Hidden, shape: Callable[[Tensor, list[Span]], Tensor] | None = None
) -> list[Outcome]:
    """Plain decoding: a token for every span that reaches its request's last known token.

    `shape`, if given, replaces the logits [n, V] of those spans (two-model methods).
    """
    outcomes: list[Outcome] = []
    done: list[Span] = []
    drawn: list[list[int]] = []  # where their tokens go
    for span in spans:
        outcomes.append(outcome := Outcome(span.rows, []))
        if span.positions[-1] + 1 == span.request.known:
            done.append(span)
            drawn.append(outcome.tokens)
    if done:
        x = hidden.rows([span.start + span.rows - 1 for span in done])
        contexts = [Context(span.request) for span in done]
        if shape is None:
            chosen = choose(host.sample, host.model, x, contexts)
        else:
            chosen = draw(host.sample(shape(host.model.head(x), done), contexts), contexts)
        host.counters.head_rows += len(done)
        for tokens, token in zip(drawn, chosen):
            tokens.append(token)
    return outcomes
