"""Sample the target, follow the child that matches: exact for every drafter, however its guesses came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random


@dataclass(frozen=True)
class Match(Method):
    """At each node one token is drawn from the target, with the randomness plain decoding would use there; the child
    that carries it is accepted, otherwise the token itself is emitted. So even sampled output equals plain decoding's,
    token for token, whatever the drafter (drafter-invariant decoding). `rejection` accepts more of a sampled draft, but
    little more with `--sample standard:coupling=gumbel`."""

    paper: ClassVar[str] = "arXiv 2408.07978"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("verify", matches="all")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        path: list[int] = []
        node = -1
        while True:
            u = 0.0 if p.greedy(node + 1) else rng(len(path), Purpose.SAMPLE)
            token = p.draw(node + 1, u)
            child = next((c for c in draft.children(node) if draft.tokens[c] == token), None)
            if child is None:
                return path, token
            path.append(child)
            node = child
