"""Guess n-grams that the model itself has begun to write further on (lookahead decoding, arXiv 2402.02057): Jacobi
trajectories run beside every token; exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom, judged
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Purpose, uniform
from phasewise.verbs.traits import Traits

NAME = "lookahead"
CHUNK = 8192  # tokens of a prompt whose n-grams are taken: a very long one holds nobody up

Rows = list[list[int]]  # of a window, oldest first; the pending token stands before the first, which is one shorter
Pool = dict[int, list[tuple[int, ...]]]  # token -> what followed it, the latest last


@dataclass(frozen=True)
class Lookahead(Method):
    """A window of `window` columns and n - 1 rows stands after the pending token: row by row the model's latest guesses
    for the tokens there. A pass asks for the next row; then every column, with that, is an n-gram, and the window moves
    on by a token. Of the n-grams that begin with the pending token the latest `guesses` are guessed.

    An entry sees the first row up to its column, and its own column. The first row begins as tokens from anywhere in
    the prompt, and a pass is spent on each of the others. window=0 asks for nothing; with `prompt`, n-grams of the
    prompt are there from the start. Near the end of a text, columns beyond it are left out. The window's rows are the
    likeliest tokens, as the paper's are, where tokens are drawn too. Left out: a window spread over several devices.
    """

    window: int = 7
    n: int = 5
    guesses: int = 7
    prompt: bool = True

    paper: ClassVar[str] = "arXiv 2402.02057"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"window": 4, "n": 3}

    def __post_init__(self) -> None:
        for knob, least in (("window", 0), ("n", 2), ("guesses", 1)):
            if getattr(self, knob) < least:
                raise UserError(f"lookahead: {knob}={getattr(self, knob)} must be at least {least}")

    @property
    def nodes(self) -> int:
        """The most guesses and rows of the window that a step brings."""
        widths = ((rows, self.window + self.n - 1 - rows) for rows in range(1, self.n))  # until the last row is there
        asked = max(rows * width - 1 for rows, width in widths) if self.window else 0
        return self.guesses * (self.n - 1) + asked

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, candidates=int(self.window > 0), max_nodes=self.nodes)

    def bind(self, host: Host) -> LookaheadRun:
        return LookaheadRun(self)


class LookaheadRun(Drafter):
    """Lookahead decoding in one engine."""

    def __init__(self, knobs: Lookahead) -> None:
        self.knobs = knobs

    def size(self, request: Request) -> int:
        levels, state = headroom(request), self._state(request)
        found = len(state["pool"].get(request.tokens[-1], ())) * min(self.knobs.n - 1, levels)
        return found + _count(_narrowed(state["rows"], levels))

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        if tops is None:
            return
        ids = tops[:, 0].tolist()
        row, at = 0, sum(len(judged(span)) for span in spans)  # of a span: its first judged row, its first asking one
        for span in spans:
            if span.note is not None and span.note.ask:
                self._moved(span.request.state[NAME], span.tokens[0], ids[row], ids[at : at + span.note.ask])
                at += span.note.ask
            row += len(judged(span))

    def _moved(self, state: dict[str, Any], pending: int, after: int, said: list[int]) -> None:
        """Moves the trajectories on by what the model `said` after every entry, and `after` the pending token."""
        asked: Rows = state["asked"]
        if _count(asked) != len(said):
            return  # cut after all
        last = said[len(said) - len(asked[-1]) :]
        if len(asked) == 1:
            last = [after, *last]
        if len(asked) < self.knobs.n - 1:
            state["rows"] = [*(row[1:] for row in asked), last[1:]]
            return
        for key, gram in zip([pending, *asked[0]], zip(*asked[1:], last)):
            _remember(state["pool"], key, gram, self.knobs.guesses)
        state["rows"] = [*asked[1:], last]
        state["rows"][0] = state["rows"][0][1:]

    def _guess(self, request: Request, budget: int) -> Draft:
        levels, state = headroom(request), self._state(request)
        grams = state["pool"].get(request.tokens[-1], ())
        draft = Draft.trie([gram[:levels] for gram in reversed(grams)]).cut(budget)
        state["rows"] = rows = _narrowed(state["rows"], levels)
        state["asked"] = []
        if 0 < _count(rows) <= budget - len(draft.tokens):
            state["asked"] = rows
            _ask(draft, rows)
        return draft

    def _state(self, request: Request) -> dict[str, Any]:
        """Plain data, which goes where its request goes: the window, what asks of it in this step, and the pool."""
        state: dict[str, Any] | None = request.state.get(NAME)
        if state is None:
            prompt, n = request.tokens[: request.prompt_len], self.knobs.n
            state = request.state[NAME] = {"rows": [], "asked": [], "pool": {}}
            if self.knobs.window:
                drawn = (uniform(0, i, Purpose.METHOD) for i in range(self.knobs.window + n - 3))
                state["rows"] = [[prompt[int(u * len(prompt))] for u in drawn]]
            for end in range(max(n, len(prompt) - CHUNK), len(prompt) + 1) if self.knobs.prompt else ():
                key, *gram = prompt[end - n : end]
                _remember(state["pool"], key, tuple(gram), self.knobs.guesses)
        return state


def _remember(pool: Pool, key: int, gram: tuple[int, ...], most: int) -> None:
    """Stores an n-gram as the latest; of more than `most`, the oldest goes."""
    grams = pool.setdefault(key, [])
    if gram in grams:
        grams.remove(gram)
    grams.append(gram)
    del grams[:-most]


def _count(rows: Rows) -> int:
    return sum(map(len, rows))


def _narrowed(rows: Rows, levels: int) -> Rows:
    """The columns of which no entry stands more than `levels` tokens after the pending one."""
    width = max(0, levels - len(rows) + 2)
    return [row[: max(0, width - (not i))] for i, row in enumerate(rows)]


def _ask(draft: Draft, rows: Rows) -> None:
    """Put the window behind the guesses. Each entry of the first row is a child of the one before; each of the others,
    of the entry above it."""
    above: list[int] = []
    for i, row in enumerate(rows):
        nodes = range(len(draft.tokens), len(draft.tokens) + len(row))
        draft.parents += above if i else [-1, *nodes][: len(row)]
        draft.tokens += row
        draft.ask += len(row)
        above = [*nodes] if i else [-1, *nodes]
