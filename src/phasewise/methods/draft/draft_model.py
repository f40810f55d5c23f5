"""A smaller model with the same vocabulary guesses ahead (arXiv 2211.17192, 2302.01318); as exact as its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.branching import branch
from phasewise.speculation.companion import Companion
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drawn, headroom
from phasewise.verbs.host import Host
from phasewise.verbs.sample import Context, Dist, Purpose, uniform


@dataclass(frozen=True)
class DraftModel:
    """A chain of `k` tokens; with `branches` > 1 every level has that many guesses, of which the first is followed up.

    So a tree costs the draft model no more passes than a chain: `k` per step, whatever the number of requests. Guesses
    obey the request's own sampling rules; the first of a level is drawn with the very random number the target would
    use there (arXiv 2408.07978), so that `match` too accepts a good draft. Where tokens are the same with any draft, a
    request goes on without one if there is no memory for the draft model's KV. Left out: following up several guesses
    of one level, and a length adapted to the acceptance rate.
    """

    model: str = "pocket-draft"
    k: int = 4
    branches: int = 1
    drawn: Literal["without_replacement", "iid", "top_plus_one", "point"] = "without_replacement"
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2211.17192"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("k", "branches", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"draft_model: {knob}={getattr(self, knob)} must be at least 1")

    def bind(self, host: Host) -> _DraftModel:
        model = host.load(self.model)
        ours, theirs = model.config.vocab, host.model.config.vocab
        if ours != theirs:
            raise UserError(
                f"draft_model: {self.model!r} has {ours:,} tokens in its vocabulary, the model has {theirs:,}: "
                f"give a draft model made for the same tokenizer"
            )
        return _DraftModel(self, host, host.companion("draft_model", model))


@dataclass(slots=True)
class _Growing:
    """A request's draft under way: `levels` to come in all, and the path of first guesses."""

    request: Request
    levels: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    end: int = -1  # node at the end of the path
    q: list[Tensor] = field(default_factory=list)

    def add(self, tokens: Sequence[int], q: Tensor | None) -> None:
        """One level of guesses; the first carries on the path."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.parents.extend([self.end] * len(tokens))
        self.path.append(tokens[0])
        self.end = first
        if q is not None:
            self.q.append(q)

    def draft(self, drawn: Drawn) -> Draft:
        return (
            Draft(self.tokens, self.parents, drawn, torch.cat(self.q)) if self.q else Draft(self.tokens, self.parents)
        )


class _DraftModel:
    def __init__(self, knobs: DraftModel, host: Host, companion: Companion) -> None:
        self.knobs, self.host, self.companion = knobs, host, companion

    def draws(self, request: Request) -> bool:
        return self.knobs.drawn != "point" and not request.params.greedy

    @property
    def largest(self) -> int:
        return self.knobs.k * self.knobs.branches

    def size(self, request: Request) -> int:
        return min(self.knobs.k, headroom(request)) * self.knobs.branches

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        late = {r.id: r for r in requests if self._late(r)}
        growing: dict[int, _Growing] = {}
        for i in sorted(range(len(requests)), key=lambda i: self.companion.optional(requests[i])):
            request, budget = requests[i], budgets[i]
            levels = min(self.knobs.k, headroom(request), -(-budget // self.knobs.branches))
            if request.id not in late and levels > 0 and self.companion.reserve(request, request.known + levels - 1):
                growing[i] = _Growing(request, levels)
        level = 0
        while active := [g for g in growing.values() if g.levels > level]:
            self._grow(active)
            level += 1
        ready = [r for r in late.values() if self.companion.reserve(r, r.known)]
        if ready:
            self.companion.catch_up(ready, self.knobs.chunk)
        return [growing[i].draft(self.knobs.drawn) if i in growing else None for i in range(len(requests))]

    def _late(self, request: Request) -> bool:
        """Whether the draft model has still to read, and nothing is drafted in this step.

        Where a draft must be, that is the request's own affair: so many tokens as it takes to read the prompt if
        nothing comes between, however much is really read (after a preemption the rest is read at once).
        """
        chunk = self.knobs.chunk
        if self.companion.optional(request):
            return self.companion.lag(request) > chunk
        return request.known - (request.n_out - 1) * chunk > chunk

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> None:
        pass  # the companion finds out by itself which of its rows still hold

    def _grow(self, active: Sequence[_Growing]) -> None:
        """One pass of the draft model, one more level for each."""
        n = self.knobs.branches
        logits = self.companion.follow([g.request for g in active], [g.path for g in active])
        ranked = logits.topk(min(n, logits.shape[1])).indices.tolist() if n > 1 else []
        dist = self.host.sample(logits, [Context(g.request, tuple(g.path)) for g in active])
        for row, g in enumerate(active):
            if dist.greedy(row):
                best = dist.top[row]
                g.add([best, *(token for token in (ranked[row] if n > 1 else ()) if token != best)][:n], None)
            else:
                g.add(*self._draw(g, dist, row))

    def _draw(self, g: _Growing, dist: Dist, row: int) -> tuple[list[int], Tensor | None]:
        seed, position = g.request.params.seed, g.request.known + len(g.path)

        def us(i: int) -> float:
            return uniform(seed, position, Purpose.DRAFT if i else Purpose.SAMPLE, i)

        return branch(dist.row(row), self.knobs.branches, self.knobs.drawn, us)
