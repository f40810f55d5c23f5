"""Guess that the answer goes on as its source does (Aggressive Decoding, arXiv 2205.10350): for answers that edit a
text; exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "aggressive"
MANY = -1  # in an index: occurs more than once


@dataclass(frozen=True)
class Aggressive(Method, Drafter):
    """The source, from where the answer has got to; first from its beginning.

    Where the answer leaves the source there is no guess until its last token, or its last two, up to the last `n`,
    occur in the source exactly once: then copying goes on from there. `source` is the whole prompt, or, with `marks`,
    what stands between its last token `opens` and the next token `closes` after it (or the end of the prompt); nothing
    if it is not there. A guess is at most `k` tokens. The paper's second drafter (GAD), a trained model, is
    `draft.gad`.
    """

    source: Literal["prompt", "marks"] = "prompt"
    opens: int = -1  # token ids
    closes: int = -1
    n: int = 3
    k: int = 63  # with the pending token, the rows of one native step

    paper: ClassVar[str] = "arXiv 2205.10350"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("n", "k"):
            if getattr(self, knob) < 1:
                raise UserError(f"aggressive: {knob}={getattr(self, knob)} must be at least 1")
        if self.source not in ("prompt", "marks"):
            raise UserError(f"aggressive: source={self.source} must be prompt or marks")
        if (self.source == "marks") != (self.opens >= 0):
            raise UserError(f"aggressive: opens={self.opens} must be a token id with source=marks, and only there")
        if self.source != "marks" and self.closes >= 0:
            raise UserError(f"aggressive: closes={self.closes} goes with source=marks only")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.k)

    def size(self, request: Request) -> int:
        return min(self.k, headroom(request))

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """Does nothing: guesses depend on the request's own tokens alone."""

    def _guess(self, request: Request, budget: int) -> Draft:
        copy: Copying | None = request.state.get(NAME)
        if copy is None:
            copy = request.state[NAME] = Copying(self._source(request.tokens[: request.prompt_len]), self.n)
        copy.read(request.tokens[request.prompt_len + copy.seen :])
        if copy.at is None:
            return Draft([], [])
        return Draft.chain(copy.source[copy.at : copy.at + min(self.k, budget, headroom(request))])

    def _source(self, prompt: list[int]) -> list[int]:
        if self.source == "prompt":
            return prompt
        if self.opens not in prompt:
            return []
        start = len(prompt) - prompt[::-1].index(self.opens)
        end = prompt.index(self.closes, start) if self.closes in prompt[start:] else len(prompt)
        return prompt[start:end]


class Copying(Drawer):
    """The place of an answer in its source: the next token is expected to be that `at`; None: it has left it."""

    __slots__ = ("_index", "_last", "at", "attached", "n", "seen", "source")

    def __init__(self, source: list[int], n: int) -> None:
        self.source, self.n = source, n
        self.at: int | None = 0
        self.seen = 0  # tokens of the answer
        self.attached = 0  # times it has come back
        self._last: list[int] = []  # n of them
        self._index: dict[tuple[int, ...], int] = {}  # what follows each piece of the source of up to n tokens, or MANY
        for length in range(1, n + 1):
            for start in range(len(source) - length + 1):
                piece = tuple(source[start : start + length])
                self._index[piece] = MANY if piece in self._index else start + length

    def read(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these."""
        for token in tokens:
            self.seen += 1
            self._last = [*self._last, token][-self.n :]
            if self.at is not None and self.at < len(self.source) and self.source[self.at] == token:
                self.at += 1
                continue
            self.at = self._found()
            self.attached += self.at is not None

    def fork(self) -> Copying:
        twin = Copying([], self.n)
        twin.source, twin._index = self.source, self._index  # neither changes
        twin.at, twin.seen, twin.attached, twin._last = self.at, self.seen, self.attached, self._last
        return twin

    def _found(self) -> int | None:
        """The place in the source after the shortest end of the answer that occurs there exactly once."""
        for length in range(1, len(self._last) + 1):
            after = self._index.get(tuple(self._last[-length:]))
            if after != MANY:
                return after
        return None
