"""Methods together, over whatever is discovered: exact o X == X, whoever schedules and wherever it runs (law 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import pytest

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.place import Placed
from tests import tiny
from tests.laws import axes
from tests.laws.axes import Choice, Row, Verbs
from tests.laws.compare import Reference, agree, build, reference

LENGTHS, N = (41, 7, 66), 12


@cache
def alone(verbs: Verbs) -> Reference:
    return reference(dict(verbs), tiny.prompts(*LENGTHS), tiny.greedy(N))


def shaping(row: Row) -> Verbs:
    """What of a row makes other tokens than plain decoding."""
    return tuple(chain.from_iterable(choice.alone for choice in row))


def composed(row: Row) -> Placed:
    script = next((choice.script for choice in row if choice.script), "")

    def change(methods: dict[str, Any]) -> None:
        if script:
            drafter, verify = Scripted(alone(shaping(row)), script == "tree"), catalog.build("verify", "match")
            methods["decode"] = catalog.method("decode", "speculative")(draft=drafter, verify=verify)

    return build(axes.verbs(row), change)


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


@axes.over(axes.compositions, axes.label, most=120)
def test_methods_together_give_what_the_lossy_ones_give_alone(case: Row) -> None:
    """One prompt at a time, in one piece, plainly decoded, in one engine: so X is met first. Then all together, in the
    row's steps and places, with its guesses, of which some hold and some do not: rows really come and go."""
    want = alone(shaping(case))
    placed = composed(case)
    want.check(tiny.outs(tiny.run(placed, want.prompts, tiny.greedy(N))))
    if any(choice.script for choice in case):
        if placed.counters.accepted in (0, placed.counters.drafted):  # all came at once and left few rows for guesses
            agree(tiny.outs(tiny.run(placed, want.prompts[:1], tiny.greedy(N)))[0], want.tokens[0], want.gaps[0])
        assert 0 < placed.counters.accepted < placed.counters.drafted


def test_what_is_listed_as_refused_is_refused() -> None:
    for pair, reason in axes.REFUSED.items():
        with pytest.raises(UserError, match=reason):
            composed(tuple(choice for choice in every_choice() if choice.name in pair))


def every_choice() -> list[Choice]:
    factors = [axes.methods(verb) for verb in (*axes.DRIVING, *axes.SHAPING)] + [axes.decoders()]
    return [choice for values in factors for choice in values]


def test_every_two_methods_meet() -> None:
    """Whatever of different verbs may work together does so in some row."""
    met = axes.meetings(axes.compositions(full=False))
    factors = [axes.methods(verb) for verb in (*axes.DRIVING, *axes.SHAPING)] + [axes.decoders()]
    for i, values in enumerate(factors):
        for others in factors[i + 1 :]:
            for a in values:
                assert all(frozenset((a.name, b.name)) in met for b in others if axes.allowed(a, b)), a


def test_comparison_fails_where_the_reference_was_sure() -> None:
    agree([1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.warns(UserWarning, match="near tie at token 1"):
        agree([1, 9, 9], [1, 2, 3], [1.0, 1e-5, 1.0])
    with pytest.raises(AssertionError, match="token 1 is 9 instead of 2"):
        agree([1, 9, 9], [1, 2, 3], [1.0, 1e-3, 1e-5])
    with pytest.raises(AssertionError, match="2 tokens instead of 3"):
        agree([1, 2], [1, 2, 3], [1.0, 1.0, 1.0])
