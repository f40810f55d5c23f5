"""Go on with what has followed the text's end before, likeliest first (SuffixDecoding, arXiv 2411.04975): exact under
every verifier that keeps chosen guesses exact, no model, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._automaton import SuffixAutomaton
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, headroom
from phasewise.verbs.host import ENDLESS, Host

CHUNK = 8192  # tokens read per step: a very long prompt holds nobody up
NAME = "suffix_decoding"
# How likely a token is that followed the same n = 0, 1, 2 ... tokens (more count as the last), and was the latest of
# all that did, if nothing else or something else did, too; and what came before the latest, by place.
ONLY = (0.0, 0.38, 0.61, 0.70, 0.77, 0.80, 0.82, 0.84, 0.96)
LATEST = (0.0, 0.16, 0.31, 0.30, 0.34, 0.50)
EARLIER = (0.09, 0.05)


@dataclass(frozen=True)
class SuffixDecoding:
    """After every token the longest match of the text's end is looked for, and what followed it goes on: the latest
    first, then what came earlier or after shorter matches, `branches` in all. Of all these guesses the likeliest
    are taken, at most `nodes`, down to a chance of `least` to be accepted.

    How likely a guess is taken to be hangs on its match's length and on how many different tokens have followed.
    `branches=1` guesses chains. Left out: counts (what followed lately is the better guess, nearly always); a tree of
    what other requests were answered.
    """

    nodes: int = 24
    branches: int = 3
    min_match: int = 1  # tokens
    least: float = 0.05

    paper: ClassVar[str] = "arXiv 2411.04975"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob, most in (("nodes", 63), ("branches", 1 + len(EARLIER)), ("min_match", CHUNK)):
            if not 1 <= getattr(self, knob) <= most:
                raise UserError(f"suffix_decoding: {knob}={getattr(self, knob)} must be from 1 to {most}")
        if not 0 < self.least < 1:
            raise UserError(f"suffix_decoding: least={self.least:g} must lie between 0 and 1")

    def bind(self, host: Host) -> Suffixes:
        return Suffixes(self)


class Suffixes:
    """SuffixDecoding in one engine."""

    def __init__(self, knobs: SuffixDecoding) -> None:
        self.knobs, self.least = knobs, knobs.least

    @property
    def largest(self) -> int:
        return self.knobs.nodes

    def size(self, request: Request) -> int:
        return min(self.knobs.nodes, headroom(request) * (self.knobs.nodes if self.knobs.branches > 1 else 1))

    def reach(self, context: int) -> int:
        return ENDLESS

    def draws(self, request: Request) -> bool:
        return False

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> None:
        """Nothing: the text says it all."""

    def _guess(self, request: Request, budget: int) -> Draft | None:
        text: SuffixAutomaton | None = request.state.get(NAME)
        if text is None:
            text = request.state[NAME] = SuffixAutomaton()
        for token in request.tokens[text.n : text.n + CHUNK]:
            text.extend(token)
        if text.n < request.known:
            return None
        return self._grown(text, min(budget, self.knobs.nodes), headroom(request))

    def _grown(self, text: SuffixAutomaton, nodes: int, levels: int) -> Draft | None:
        tokens, parents, likely = list[int](), list[int](), list[float]()
        ahead: list[tuple[float, int, int, int, int, int, int, float]] = []
        number = 0  # of what lies ahead: of equally likely guesses the first found comes first

        def look_behind(state: int, match: int, node: int, level: int, reached: float) -> None:
            nonlocal number
            for found, token, after, chance in self._followers(text, state, match):
                if reached * chance < self.least:
                    continue
                heappush(ahead, (-reached * chance, number, node, level, token, after, found, chance))
                number += 1

        if levels > 0:
            look_behind(*text.end, -1, 1, 1.0)
        while ahead and len(tokens) < nodes:
            less, _, parent, level, token, state, match, chance = heappop(ahead)
            tokens.append(token)
            parents.append(parent)
            likely.append(chance)
            if level < levels:
                look_behind(state, match + 1, len(tokens) - 1, level + 1, -less)
        return Draft(tokens, parents, likely=likely) if tokens else None

    def _followers(self, text: SuffixAutomaton, state: int, match: int) -> list[tuple[int, int, int, float]]:
        """The best guesses after a match: how many tokens matched, token, state after it, how likely it is."""
        found: list[tuple[int, int, int, float]] = []
        most = self.knobs.branches
        for length, edges in text.after(state, match, self.knobs.min_match):
            latest = ONLY if len(edges) == 1 else LATEST
            for token, after in edges[: len(found) + most]:
                if all(token != other for _, other, _, _ in found):
                    chance = EARLIER[len(found) - 1] if found else latest[min(length, len(latest) - 1)]
                    found.append((length, token, after, chance))
                    if len(found) == most:
                        return found
        return found
