"""A second model's guesses and those that are looked up, fused into one tree (RASD, arXiv 2503.03434): as exact as its
verifier."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, HoldingDrafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits, joined


@dataclass(frozen=True)
class RASD(Method):
    """All guesses of `base` and all of `source`: a beginning that both have is one node, and what only the source has
    comes after the base's siblings. So no greedy step accepts less than with either alone.

    `base` is any drafter, mostly a second model's; `source` one that chooses its guesses, such as `retrieval` or
    `prompt_lookup`. With `among` > 0 the source's guesses stay only where they begin with one of so many likeliest next
    tokens by the base's second model: fewer rows, and now and then a good guess less. Where rows are scarce the base's
    come first. Left out: counts of the source that weigh what is pruned; drafting while the source is searched.
    """

    base: Any = part("draft", "draft_model")
    source: Any = part("draft", "retrieval")
    among: int = 0

    paper: ClassVar[str] = "arXiv 2503.03434"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        if self.among < 0:
            raise UserError(f"rasd: among={self.among} must be at least 0")
        twice = set(_held(self.base)) & set(_held(self.source))
        if twice:
            raise UserError(
                f"rasd: base and source both hold {' and '.join(sorted(twice))}: they would share what it "
                "remembers of a request. Choose two different drafters"
            )

    @property
    def traits(self) -> Traits:
        base, source = self.base.traits, self.source.traits
        return replace(
            joined(base, source), drawn=base.drawn, max_nodes=base.max_nodes + source.max_nodes,
            idles=base.idles and source.idles, late=False,
        )  # fmt: skip

    def bind(self, host: Host) -> Fusion:
        base, source = host.bind(self.base), host.bind(self.source)
        if source.companion is not None or self.source.traits.drawn:
            raise UserError(
                f"rasd: source={_named(self.source)} may draw its guesses: take one that chooses them, such as "
                "retrieval or prompt_lookup, and make a second model the base"
            )
        if base.first_layers is not None:
            raise UserError(
                f"rasd: base={_named(self.base)} begins to compute the rows of its guesses, and one guess more beside "
                "them would undo that: use it alone, or take another base, such as draft_model"
            )
        if self.among and base.companion is None:
            raise UserError(
                f"rasd: among={self.among} asks what a second model thinks, and base={_named(self.base)} has none: "
                "leave it out, or take a base such as draft_model"
            )
        return Fusion(self.among, base, source, (self.base.traits.candidates, self.source.traits.candidates))


class Fusion(HoldingDrafter):
    """Two drafters as one, in one engine. What they remember of a request is theirs."""

    def __init__(self, among: int, base: Drafter, source: Drafter, candidates: tuple[int, int] = (0, 0)) -> None:
        """`candidates`: how many likeliest tokens each of them is given (`Traits.candidates`)."""
        super().__init__(base, source)
        self.among, self.base, self.source, self.candidates = among, base, source, candidates

    def late(self, request: Request) -> None:
        """None: behind a tree of two drafters' guesses nobody's next one is known."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        bases, sources = (
            its.draft(requests, [min(budget, its.size(request)) for request, budget in zip(requests, budgets)])
            for its in self.parts
        )
        return [self._fused(base, source, budget) for base, source, budget in zip(bases, sources, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for its, wanted in zip(self.parts, self.candidates):
            its.learn(spans, hidden, outcomes, None if tops is None or not wanted else tops[:, :wanted])

    def _fused(self, base: Draft | None, source: Draft | None, budget: int) -> Draft | None:
        if source is None:
            return base
        assert source.q is None, "a source chooses its guesses"
        source = source.cut(len(source.tokens) - source.ask)  # whoever asks is the base
        if base is None:
            return source
        likely, thought = None, (base.thoughts or {}).get(())
        if self.among and thought is not None:
            likely = thought.topk(min(self.among, len(thought))).indices.tolist()
        return fuse(base, source, likely).cut(budget)


def fuse(base: Draft, source: Draft, likely: Collection[int] | None = None) -> Draft:
    """All nodes of `base` as they are, then those of `source` that it has not, by their tokens; only such as begin with
    a token of `likely`, where that is given. Where the base was drawn they are chosen nodes, with zero rows of q. Nodes
    of the base that ask stay the last."""
    first = len(base.tokens) - base.ask
    tokens, parents = base.tokens[:first], base.parents[:first]
    nodes: dict[tuple[int, int], int] = {}
    for node, below in enumerate(zip(parents, tokens)):
        nodes.setdefault(below, node)  # of equal siblings the first is the one that is accepted, if any
    places, added = {-1: -1}, list[int]()
    for node, (parent, token) in enumerate(zip(source.parents, source.tokens)):
        if parent not in places or (parent < 0 and likely is not None and token not in likely):
            continue
        below = (places[parent], token)
        if below not in nodes:
            nodes[below] = len(tokens)
            tokens.append(token)
            parents.append(below[0])
            added.append(node)
        places[node] = nodes[below]
    more = len(added)
    if not more:
        return base
    tokens += base.tokens[first:]
    parents += [parent if parent < first else parent + more for parent in base.parents[first:]]
    q = base.q
    if q is not None:
        q = torch.cat((q[:first], q.new_zeros(more, q.shape[1]), q[first:]))
    chances = None  # without those of either side, guesses are counted by their place
    if base.likely is not None and source.likely is not None:
        chances = [*base.likely[:first], *(source.likely[node] for node in added), *base.likely[first:]]
    return Draft(tokens, parents, base.drawn, q, base.thoughts, base.ask, chances)


def _held(method: Any) -> list[str]:
    """Names of the drafters that a method is, or holds."""
    return [*_held(method.base), *_held(method.source)] if isinstance(method, RASD) else [_named(method)]


def _named(method: Any) -> str:
    return str(type(method).__module__).rpartition(".")[2]
