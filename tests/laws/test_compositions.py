"""Methods together, over whatever is discovered: exact o X == X, whoever schedules and wherever it runs (law 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, product
from typing import Any, ClassVar

import pytest
from torch import Tensor

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.traits import Traits
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
class Scripted(Method, Drafter):
    """A drafter that knows what X alone gives and, at every third position, says something else.

    With `tree`, a wrong guess stands beside every guess, so that accepted rows have rejected siblings.
    """

    known: Reference
    tree: bool
    k: int = 4

    traits: ClassVar[Traits] = Traits("draft")

    def size(self, request: Request) -> int:
        return self.k * (2 if self.tree else 1)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request) for request in requests]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
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


def test_methods_in_conflict_are_refused() -> None:
    """By the engine, with the reason that `conflict` gives."""
    found = 0
    for a, b in pairs():
        if (reason := axes.refusal((a, b))) is not None:
            found += 1
            with pytest.raises(UserError) as refused:
                composed((a, b))
            assert reason in str(refused.value)
    assert found > 100


EXPECTED = {  # by pair of choices, a part of the reason
    ("attend.tidal", "evict.h2o"): "gives up rows they need",
    ("attend.tidal", "decode.block_diffusion"): "finishes tokens in blocks: choose",
    ("store.kivi", "attend.quest"): "packs finished rows in blocks: attend quest chooses among rows",
    ("store.kivi", "attend.hydragen"): "reads those of several requests at once",
    ("store.gear", "evict.snapkv"): "packs finished rows in blocks: evict snapkv gives single rows up",
    ("store.gear", "skip.lazyllm"): "packs finished rows in blocks: skip lazyllm lets single rows pass",
    ("store.zipcache", "attend.power"): "packs finished rows in blocks",
    ("store.zipcache", "evict.streaming"): "store zipcache also fills evict: leave out --evict streaming",
    ("store.zipcache", "skip.lazyllm"): "both fill evict",
    ("store.zipcache", "decode.block_diffusion"): "finishes tokens in blocks of its own",
    ("store.zipcache", "decode.pie"): "takes rows of prompts from elsewhere",
    ("store.zipvl", "evict.streaming"): "store zipvl also fills evict: leave out --evict streaming",
    ("evict.zipvl", "decode.block_diffusion"): "evict zipvl takes prompts whole",
    ("evict.zipvl", "attend.quest"): "evict zipvl also fills attend: leave out --attend quest",
    ("evict.zipvl", "skip.lazyllm"): "both fill attend",
    ("attend.loopserve", "decode.block_diffusion"): "attend loopserve takes prompts whole",
    ("attend.power", "evict.longgen"): "both bring low-rank weights",
    ("skip.unified", "evict.longgen"): "both bring low-rank weights",
    ("decode.c2c", "evict.tova"): "takes rows of prompts from elsewhere, and evict tova is not shown them",
    ("decode.kv_prediction", "attend.infllm"): "takes rows of prompts from elsewhere",
    ("decode.pie", "skip.lazyllm"): "takes rows of prompts from elsewhere",
    ("decode.augment", "attend.hydragen"): "decode augment brings its own attend: leave out --attend hydragen",
    ("decode.augment", "store.zipcache"): "brings its own evict: leave out --store zipcache",
    ("skip.lazyllm", "attend.quest"): "skip lazyllm also fills attend: leave out --attend quest",
    ("skip.lazyllm", "draft.prompt_lookup"): "may bring several",
    ("skip.lazyllm", "tree"): "may bring several",
    ("draft.kangaroo", "attend.quest"): "one by one, and attend quest chooses what rows read",
    ("draft.kangaroo", "evict.h2o"): "ranks rows by what all layers have seen",
    ("draft.kangaroo", "store.zipcache"): "ranks rows by what all layers have seen",
    ("draft.kangaroo", "skip.unified"): "decides which layers run",
    ("draft.hidden_transfer", "attend.quest"): "one by one, and attend quest chooses what rows read",
    ("draft.hidden_transfer", "evict.h2o"): "ranks rows by what all layers have seen",
    ("draft.hidden_transfer", "store.zipcache"): "ranks rows by what all layers have seen",
}
TOGETHER = [  # what a rule might wrongly forbid
    ("attend.tidal", "evict.snapkv"), ("store.kivi", "skip.unified"), ("store.int8", "attend.quest"),
    ("decode.pie", "attend.quest"), ("decode.pie", "attend.loopserve"), ("decode.c2c", "attend.quest"),
    ("decode.pie", "attend.hydragen"), ("store.zipcache", "draft.prompt_lookup"), ("attend.power", "evict.streaming"),
    ("skip.lazyllm", "decode.contrastive"), ("attend.infllm", "evict.longgen"), ("decode.augment", "store.kivi"),
    ("store.cachegen", "attend.quest"), ("attend.token_select", "decode.block_diffusion"),
    ("draft.kangaroo", "evict.snapkv"), ("draft.kangaroo", "attend.hydragen"), ("draft.kangaroo", "store.kivi"),
    ("draft.hidden_transfer", "evict.snapkv"), ("draft.hidden_transfer", "store.kivi"),
    ("draft.ppd", "attend.quest"), ("draft.ppd", "evict.h2o"), ("draft.ppd", "skip.unified"),
    ("draft.masked_mtp", "attend.quest"), ("draft.masked_mtp", "evict.h2o"), ("draft.masked_mtp", "skip.unified"),
]  # fmt: skip


def test_conflicts_are_those_that_are_known() -> None:
    """An independent list, whatever the methods say of themselves."""
    every = {choice.name: choice for choice in every_choice()}
    for (a, b), reason in EXPECTED.items():
        assert reason in str(axes.refusal((every[a], every[b]))), (a, b)
        assert reason in str(axes.refusal((every[b], every[a]))), "whoever comes first"
    for a, b in TOGETHER:
        assert axes.refusal((every[a], every[b])) is None, (a, b)


def pairs() -> Iterator[tuple[Choice, Choice]]:
    factors = [axes.methods(verb) for verb in (*axes.DRIVING, *axes.SHAPING)] + [axes.decoders()]
    for values, others in combinations(factors, 2):
        yield from product(values, others)


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
