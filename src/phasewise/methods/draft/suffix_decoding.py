"""Go on with what has followed the text's end before, likeliest first (SuffixDecoding, arXiv 2411.04975): exact under
every verifier that keeps chosen guesses exact, no model, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._automaton import SuffixAutomaton, automaton
from phasewise.methods.draft._automaton_native import NativeSuffixAutomaton, Odds
from phasewise.methods.draft._earlier import BREAK, Cursor, Earlier, Place
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

CHUNK = 8192  # tokens read per step: a very long prompt holds nobody up
NAME = "suffix_decoding"
# How likely a token is that followed the same n = 0, 1, 2 ... tokens (more count as the last), and was the latest of
# all that did, if nothing else or something else did, too; and what came before the latest, by place.
ONLY = (0.0, 0.38, 0.61, 0.70, 0.77, 0.80, 0.82, 0.84, 0.96)
LATEST = (0.0, 0.16, 0.31, 0.30, 0.34, 0.50)
EARLIER = (0.09, 0.05)


@dataclass(frozen=True)
class SuffixDecoding(Method):
    """After every token the longest match of the text's end is looked for, and what followed it goes on: the latest
    first, then what came earlier or after shorter matches, `branches` in all. Of all these guesses the likeliest
    are taken, at most `nodes`, down to a chance of `least` to be accepted.

    How likely a guess is taken to be hangs on its match's length and on how many different tokens have followed.
    `branches=1` guesses chains. scope=engine looks in what other requests were answered, too (the last 32,768 to 65,536
    tokens): for agents, who ask nearly the same again. Such requests then show in each other's counters, never in each
    other's tokens: a verifier under which they might is refused.

    scores=frequency is the paper's rule. After the longest match and each of its suffixes a tree of at most `factor`
    times as many nodes as tokens match is grown, the likeliest nodes first. A node's chance is its parent's, times the
    share of its token among all that followed in these places. The tree of the largest sum of chances is the guess.
    """

    nodes: int = 24
    branches: int = 3
    min_match: int = 1  # tokens
    least: float = 0.05
    scope: Literal["request", "engine"] = "request"
    scores: Literal["recency", "frequency"] = "recency"
    factor: float = 4.0  # scores=frequency: nodes for each token that matches

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
        if not 0 < self.factor <= CHUNK:
            raise UserError(f"suffix_decoding: factor={self.factor:g} must be above 0 and at most {CHUNK}")
        if self.scope not in ("request", "engine"):
            raise UserError(f"suffix_decoding: scope={self.scope} must be request or engine")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes, learns_across=self.scope == "engine")

    def bind(self, host: Host) -> Suffixes:
        return Suffixes(self)


class Suffixes(Drafter):
    """SuffixDecoding in one engine."""

    def __init__(self, knobs: SuffixDecoding) -> None:
        self.knobs, self.least = knobs, knobs.least
        self.shared = knobs.scope == "engine"
        self.counts = knobs.scores == "frequency"
        self.chains = not self.shared and not self.counts and knobs.branches == 1
        self.odds = Odds(ONLY, LATEST, knobs.nodes)
        self.earlier = Earlier()

    def size(self, request: Request) -> int:
        return min(self.knobs.nodes, headroom(request) * (self.knobs.nodes if self.knobs.branches > 1 else 1))

    def at_least(self, chance: float) -> None:
        self.least = chance

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        if self.shared:
            self.earlier.collect()
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """Nothing: the text says it all."""

    def _guess(self, request: Request, budget: int) -> Draft | None:
        text: _Text | None = request.state.get(NAME)
        if text is None:
            text = request.state[NAME] = _Text(automaton() if self.chains else SuffixAutomaton())
            if self.shared:
                self.earlier.watch(request)
        own = text.own
        own.read(request.tokens[own.n : own.n + CHUNK])
        if own.n < request.known:
            return None
        if self.chains:  # what `_grown` gives from one text where a token has one follower
            most = min(budget, self.knobs.nodes, headroom(request))
            tokens, likely = own.chain(most, self.knobs.min_match, self.least, self.odds)
            return Draft(tokens, list(range(-1, len(tokens) - 1)), likely=likely) if tokens else None
        assert isinstance(own, SuffixAutomaton)
        sources = [(own, own.end)]
        if self.shared:
            text.cursors = self.earlier.cursors(text.cursors, request.tokens)
            sources += [(cursor.text, cursor.place) for cursor in text.cursors]
        grown = self._counted if self.counts else self._grown
        return grown(sources, min(budget, self.knobs.nodes), headroom(request))

    def _grown(self, sources: Sequence[tuple[SuffixAutomaton, Place]], nodes: int, levels: int) -> Draft | None:
        texts = [text for text, _ in sources]
        tokens, parents, likely = list[int](), list[int](), list[float]()
        ahead: list[tuple[float, int, int, int, int, float, list[Place]]] = []
        number = 0  # of what lies ahead: of equally likely guesses the first found comes first

        def look_behind(places: list[Place], node: int, level: int, reached: float) -> None:
            nonlocal number
            for token, chance in self._followers(texts, places):
                if reached * chance >= self.least:
                    heappush(ahead, (-reached * chance, number, node, level, token, chance, places))
                    number += 1

        if levels > 0:
            look_behind([place for _, place in sources], -1, 1, 1.0)
        while ahead and len(tokens) < nodes:
            less, _, parent, level, token, chance, places = heappop(ahead)
            tokens.append(token)
            parents.append(parent)
            likely.append(chance)
            if level < levels:
                after = [text.follow(*place, token) for text, place in zip(texts, places)]
                look_behind(after, len(tokens) - 1, level + 1, -less)
        return Draft(tokens, parents, likely=likely) if tokens else None

    def _counted(self, sources: Sequence[tuple[SuffixAutomaton, Place]], nodes: int, levels: int) -> Draft | None:
        """Returns the tree, of those after every match, with most tokens that would be right; of equal ones the first.

        That number is the sum of its guesses' chances, each the product along its path.
        """
        best, most = None, 0.0
        for text, place in sources:
            for state, match in text.matches(*place, self.knobs.min_match):
                tree, worth = self._frequent(text, state, min(nodes, int(self.knobs.factor * match)), levels)
                if worth > most:
                    best, most = tree, worth
        return best

    def _frequent(self, text: SuffixAutomaton, state: int, nodes: int, levels: int) -> tuple[Draft, float]:
        """The likeliest `nodes` nodes behind a state by how often each token followed, and the sum of their chances."""
        tokens, parents, likely, worth = list[int](), list[int](), list[float](), 0.0
        ahead: list[tuple[float, int, int, int, int, float, int]] = []
        number = 0

        def look_behind(state: int, node: int, level: int, reached: float) -> None:
            nonlocal number
            found = text.counts(state)
            total = sum(count for _, count, _ in found)
            ranked = sorted((each for each in found if each[0] != BREAK), key=lambda each: -each[1])
            for token, count, after in ranked[: self.knobs.branches]:
                if reached * count / total >= self.least:
                    heappush(ahead, (-reached * count / total, number, node, level, token, count / total, after))
                    number += 1

        if levels > 0:
            look_behind(state, -1, 1, 1.0)
        while ahead and len(tokens) < nodes:
            less, _, parent, level, token, chance, after = heappop(ahead)
            tokens.append(token)
            parents.append(parent)
            likely.append(chance)
            worth -= less
            if level < levels:
                look_behind(after, len(tokens) - 1, level + 1, -less)
        return Draft(tokens, parents, likely=likely), worth

    def _followers(self, texts: Sequence[SuffixAutomaton], places: Sequence[Place]) -> list[tuple[int, float]]:
        """The best guesses after these places, and how likely they are."""
        found = dict[int, float]()
        for text, (state, match) in zip(texts, places):
            for token, chance in self._of(text, state, match):
                found[token] = max(chance, found.get(token, 0.0))
        best = list(found.items())
        if len(texts) > 1:
            best.sort(key=lambda each: -each[1])
        return best[: self.knobs.branches]

    def _of(self, text: SuffixAutomaton, state: int, match: int) -> list[tuple[int, float]]:
        found = list[tuple[int, float]]()
        most = self.knobs.branches
        for length, followed in text.after(state, match, self.knobs.min_match):
            latest = ONLY if len(followed) == 1 else LATEST
            for token in followed[: len(found) + most + 1]:
                if token != BREAK and all(token != other for other, _ in found):
                    chance = EARLIER[len(found) - 1] if found else latest[min(length, len(latest) - 1)]
                    found.append((token, chance))
                    if len(found) == most:
                        return found
        return found


@dataclass(slots=True)
class _Text(Drawer):
    own: SuffixAutomaton | NativeSuffixAutomaton
    cursors: list[Cursor] = field(default_factory=list)  # where it ends in what others were answered

    def fork(self) -> _Text:
        return _Text(self.own.fork(), [cursor.fork() for cursor in self.cursors])
