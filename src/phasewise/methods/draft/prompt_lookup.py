"""Copy what followed the last time (prompt lookup, n-gram speculation): exact under every verifier that keeps chosen
guesses exact, no model, no training. No paper; the automaton is that of arXiv 2411.10666 (SAM decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._automaton import SuffixAutomaton, automaton
from phasewise.methods.draft._automaton_native import NativeSuffixAutomaton
from phasewise.methods.draft._continuations import copied
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.speculation.companion import common
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

CHUNK = 8192  # tokens read per step: a very long prompt holds nobody up
NEAR = 4  # matches looked at per branch wanted
SORTS = 6  # of guesses, by their match's length
NAME = "prompt_lookup"


@dataclass(frozen=True)
class PromptLookup(Method, Drafter):
    """The continuation of the longest earlier match of the text's end (the latest, of equally long ones).

    `k` caps a guess; so does twice the match's length, and a cap per request that halves when a guess is rejected
    whole and doubles when it is accepted whole. A match that reaches the end of the text goes on with the guess itself.
    With `branches` > 1, continuations of several matches are merged into a tree. Left out: matches in other requests.
    """

    k: int = 8
    min_match: int = 2  # tokens
    branches: int = 1

    paper: ClassVar[str] = "arXiv 2411.10666"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("k", "min_match", "branches"):
            if getattr(self, knob) < 1:
                raise UserError(f"prompt_lookup: {knob}={getattr(self, knob)} must be at least 1")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.k * self.branches)

    def size(self, request: Request) -> int:
        return min(self.k, headroom(request)) * self.branches

    def reach(self, context: int) -> int:
        return ENDLESS

    def sort(self, request: Request) -> int:
        """The longer the match, the better the guess: 1 token, 2 or 3, 4 to 7, ..."""
        state: _Lookup = request.state[NAME]
        return min(SORTS, state.text.match.bit_length())

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """From its own guess, whatever stood beside it in the draft."""
        for span, outcome in zip(spans, outcomes):
            if isinstance(span.note, Draft):
                state: _Lookup = span.request.state[NAME]
                held = max((common(path, outcome.tokens) for path in state.guess), default=0)
                if state.guess and not held:
                    state.cap = max(1, state.cap // 2)
                elif state.guess and held >= len(state.guess[-1]):
                    state.cap = min(self.k, state.cap * 2)

    def _guess(self, request: Request, budget: int) -> Draft | None:
        state: _Lookup | None = request.state.get(NAME)
        if state is None:
            state = request.state[NAME] = _Lookup(automaton(), self.k)
        text = state.text
        text.read(request.tokens[text.n : text.n + CHUNK])
        state.guess = []
        if text.n < request.known or text.match < self.min_match or budget < 1:
            return None
        length = min(self.k, 2 * text.match, state.cap, headroom(request), budget)
        paths: list[list[int]] = []
        for start in text.places(self.min_match, NEAR * self.branches if self.branches > 1 else 1):
            path = copied(request.tokens, start, length)
            if path not in paths:
                paths.append(path)
            if len(paths) == self.branches:
                break
        state.guess = paths
        return Draft.trie(paths)


@dataclass(slots=True)
class _Lookup(Drawer):
    text: SuffixAutomaton | NativeSuffixAutomaton
    cap: int
    guess: list[list[int]] = field(default_factory=list)  # in the step under way

    def fork(self) -> _Lookup:
        return _Lookup(self.text.fork(), self.cap)
