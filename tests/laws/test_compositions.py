"""Methods together, over whatever is discovered: neutral ones give dense tokens, and exact o X == X (law 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.options import DEFAULTS
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.laws.compare import Reference, agree, build, reference
from tests.laws.settings import guarantee, options, spell, tight

LENGTHS, N = (41, 7, 66), 12
SHAPING = ("attend", "evict", "skip", "store")  # verbs whose methods change what a token is computed from
DRIVING = ("schedule", "place")  # verbs whose methods change only when and where

Verbs = tuple[tuple[str, str], ...]  # {verb: text} in a form that can be cached


def others(*verbs: str) -> Iterator[tuple[str, str]]:
    """Every discovered method of these verbs but their defaults."""
    return ((verb, name) for verb in verbs for name in catalog.names(verb) if name != DEFAULTS.get(verb))


def named(given: Mapping[str, str]) -> str:
    return " ".join(f"{verb}.{text.partition(':')[0]}" for verb, text in given.items()) or "dense"


def decoders(neutral: bool) -> list[dict[str, str]]:
    """Ways to decode: every drafter, and if `neutral` every decode method that has none."""
    found = [{"draft": spell("draft", name, tight("draft", name))} for name in catalog.names("draft")]
    for name in catalog.names("decode") if neutral else ():
        cls = catalog.method("decode", name)
        if not catalog.slots_of(cls):
            found.append(options("decode", name, cls.neutral))
    return found


def lossy(*verbs: str) -> list[dict[str, str]]:
    return [options(verb, name) for verb, name in others(*(verbs or SHAPING)) if guarantee(verb, name) == "lossy"]


def pairs() -> list[dict[str, str]]:
    return [a | b for a, b in combinations(lossy(), 2) if not a.keys() & b.keys()]


def neutral(verb: str, name: str) -> dict[str, str]:
    return options(verb, name, catalog.method(verb, name).neutral)


@cache
def alone(verbs: Verbs, n: int = N) -> Reference:
    return reference(dict(verbs), tiny.prompts(*LENGTHS), tiny.greedy(n))


def run(given: Mapping[str, str], change: Any = None) -> list[list[int]]:
    """Tokens of all prompts together; a combination that is refused in so many words is skipped."""
    try:
        placed = build(given, change)
    except UserError as error:
        pytest.skip(f"{named(given)} is refused: {error}")
    return tiny.outs(tiny.run(placed, tiny.prompts(*LENGTHS), tiny.greedy(N)))


@dataclass(frozen=True)
class Scripted:
    """A drafter that knows what X alone gives and, at every third position, says something else.

    With `tree`, a wrong guess stands beside every guess, so that accepted rows have rejected siblings.
    """

    known: Reference
    tree: bool
    k: int = 4

    def size(self, request: Request) -> int:
        return self.k * (2 if self.tree else 1)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request) for request in requests]

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> None:
        pass

    def _guess(self, request: Request) -> Draft:
        want = self.known.tokens[self.known.prompts.index(request.prompt)]
        guess, last = Draft([], []), -1
        for at, token in enumerate(want[request.n_out : request.n_out + self.k], request.n_out):
            wrong = 3 + (token + 1) % (tiny.VOCAB - 3)
            for each in ([wrong] if self.tree else []) + [wrong if at % 3 == 2 else token]:
                guess.tokens.append(each)
                guess.parents.append(last)
            last = len(guess.tokens) - 1
        return guess


@pytest.mark.parametrize("method", others(*DRIVING, *SHAPING), ids=".".join)
@pytest.mark.parametrize("decoder", decoders(neutral=True), ids=named)
def test_neutral_methods_together_equal_dense(decoder: dict[str, str], method: tuple[str, str]) -> None:
    alone(()).check(run(neutral(*method) | decoder))


@pytest.mark.parametrize("x", lossy("decode", *SHAPING), ids=named)
@pytest.mark.parametrize("method", others(*DRIVING), ids=".".join)
def test_driving_changes_nothing(method: tuple[str, str], x: dict[str, str]) -> None:
    """Whoever schedules and wherever it runs, X gives X's tokens."""
    alone(tuple(x.items())).check(run(x | options(*method)))


@pytest.mark.parametrize("x", [*lossy("decode", *SHAPING), *pairs()], ids=named)
def test_chunks_change_nothing(x: dict[str, str]) -> None:
    alone(tuple(x.items())).check(run(x | {"schedule": "sarathi:budget=7"}))


@pytest.mark.parametrize("x", lossy(), ids=named)
@pytest.mark.parametrize("decoder", decoders(neutral=False), ids=named)
def test_speculation_changes_nothing(decoder: dict[str, str], x: dict[str, str]) -> None:
    """Every drafter over X gives X's tokens."""
    alone(tuple(x.items())).check(run(x | decoder))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("x", [{}, *lossy(), *pairs()], ids=named)
def test_accepted_and_rejected_rows_change_nothing(x: dict[str, str], tree: bool) -> None:
    """The same with guesses of which some hold and some do not, whatever the model: rows really come and go."""
    want = alone(tuple(x.items()))

    def change(methods: dict[str, Any]) -> None:
        verify = catalog.build("verify", "match")
        methods["decode"] = catalog.method("decode", "speculative")(draft=Scripted(want, tree), verify=verify)

    placed = build(x, change)
    got = tiny.outs(tiny.run(placed, want.prompts, tiny.greedy(N)))
    want.check(got)
    assert 0 < placed.counters.accepted < placed.counters.drafted


def test_comparison_fails_where_the_reference_was_sure() -> None:
    agree([1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.warns(UserWarning, match="near tie at token 1"):
        agree([1, 9, 9], [1, 2, 3], [1.0, 1e-5, 1.0])
    with pytest.raises(AssertionError, match="token 1 is 9 instead of 2"):
        agree([1, 9, 9], [1, 2, 3], [1.0, 1e-3, 1e-5])
    with pytest.raises(AssertionError, match="2 tokens instead of 3"):
        agree([1, 2], [1, 2, 3], [1.0, 1.0, 1.0])
