"""Tokens that are sure beforehand (`Sample.sure`) are computed in one pass, and nobody can tell by the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.sample.standard import Standard
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits
from tests import seeds, tiny
from tests.laws.settings import options, spell, tight

PERIOD, DICTATED = 7, range(2, 6)  # of every 7 tokens of an answer these leave no choice
N = 21
FORCED = 12  # of so many tokens
PASSES = 9  # prompt and 0, 1, 2-6, 7, 8, 9-13, 14, 15, 16-20
PROMPTS = tiny.prompts(40, 7, 21)
GREEDY = Params(max_tokens=N, ignore_eos=True, ask={"dictated": True})
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
HOW = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def dictated(request: Request, position: int) -> int | None:
    """The only token that may stand there, if there is only one."""
    index = position - request.prompt_len
    return 5 + 11 * position % 50 if request.params.ask and index % PERIOD in DICTATED else None


@dataclass(frozen=True)
class Dictating(Method, Sample):
    """Leaves but one token in some places, and `says` so beforehand, or does not."""

    says: bool = True

    traits: ClassVar[Traits] = Traits("sample", asks=("dictated",))
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def check(self, params: Params) -> None:
        pass

    def sure(self, request: Request) -> Sequence[int]:
        found: list[int] = []
        while self.says and (token := dictated(request, request.known + len(found))) is not None:
            found.append(token)
        return found

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        for row, context in zip(logits, contexts):
            token = dictated(context.request, context.position)
            if token is not None:
                kept = row[token].clone()
                row.fill_(float("-inf"))
                row[token] = kept

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        self.exclude(logits, contexts)
        return Standard()(logits, contexts)


def engine(verbs: dict[str, str] | None = None, says: bool = True, **limits: Any) -> Placed:
    methods = parse(verbs or {}) | {"sample": Dictating(says)}
    bounds = Limits(**{"kv_bytes": 64 << 20, **limits})
    return Builder(tiny.model(), methods, bounds, load=tiny.load).build()


@cache
def untold(params: str) -> list[list[int]]:
    return tiny.outs(tiny.run(engine(says=False), PROMPTS, {"greedy": GREEDY, "sampled": SAMPLED}[params]))


def want(params: Params) -> list[list[int]]:
    return untold("greedy" if params.greedy else "sampled")


@HOW
def test_one_pass_for_all_that_is_sure(params: Params) -> None:
    for prompt, tokens in zip(PROMPTS, want(params)):
        told, plain = engine(), engine(says=False)
        assert tiny.outs(tiny.run(told, [prompt], params)) == [tokens]
        tiny.run(plain, [prompt], params)
        assert plain.counters.forwards == N and plain.counters.forced == plain.counters.drafted == 0
        work = told.counters
        assert work.forwards == PASSES and work.forced == work.drafted == work.accepted == FORCED
        assert work.rows == plain.counters.rows and work.head_rows == N - FORCED, "no head for what is sure"


@pytest.mark.parametrize("n", range(1, 15))
def test_no_token_too_many(n: int) -> None:
    (request,) = tiny.run(engine(), PROMPTS[:1], replace(GREEDY, max_tokens=n))
    assert request.out == want(GREEDY)[0][:n]


@pytest.mark.parametrize(
    ("draft", "params"), seeds.params(product(catalog.names("draft"), [GREEDY, SAMPLED]), 8, "sure")
)
def test_every_drafter(draft: str, params: Params) -> None:
    """A guess and what is sure never meet in one span; the answers are plain decoding's."""
    placed = engine({"draft": spell("draft", draft, tight("draft", draft)), "verify": "match"})
    try:
        assert tiny.outs(tiny.run(placed, PROMPTS, params)) == want(params)
        work = placed.counters
        assert 0 < work.forced <= FORCED * len(PROMPTS) and work.forced <= work.accepted <= work.drafted
    finally:
        placed.close()


@pytest.mark.parametrize(
    ("verify", "params"), seeds.params(product(catalog.names("verify"), [GREEDY, SAMPLED]), 3, "sure")
)
def test_every_verifier_alone_and_beside_others(verify: str, params: Params) -> None:
    """Law 4, also where tokens hang on the guesses: what is sure is then never cut."""
    verbs = options("verify", verify)
    alone = [tiny.outs(tiny.run(engine(verbs), [prompt], params))[0] for prompt in PROMPTS]
    for schedule in ("sarathi:budget=6", "splitfuse:budget=9"):
        assert tiny.outs(tiny.run(engine({**verbs, "schedule": schedule}), PROMPTS, params)) == alone
    for prompt, out in zip(PROMPTS, alone):
        request = Request(prompt, params)
        said = [dictated(request, len(prompt) + i) for i in range(N)]
        assert all(token in (None, other) for token, other in zip(said, out))


@pytest.mark.parametrize("schedule", catalog.names("schedule"))
@pytest.mark.parametrize("verbs", [{}, {"draft": "prompt_lookup:k=4,min_match=1"}], ids=["plain", "drafted"])
def test_every_scheduler_and_few_rows(schedule: str, verbs: dict[str, str]) -> None:
    placed = engine({**verbs, "schedule": spell("schedule", schedule, tight("schedule", schedule))})
    assert tiny.outs(tiny.run(placed, PROMPTS, GREEDY)) == want(GREEDY)
    assert placed.counters.forced > 0


def test_mates_that_ask_for_nothing() -> None:
    plain = replace(GREEDY, ask=None)
    wanted = tiny.outs(tiny.run(engine(), PROMPTS, plain))
    mixed = tiny.run(engine(), [*PROMPTS, *PROMPTS], [plain] * 3 + [GREEDY] * 3)
    assert tiny.outs(mixed) == [*wanted, *want(GREEDY)]


def test_siblings_and_preemption() -> None:
    placed, first = engine(), Request(PROMPTS[0], SAMPLED)
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    for count in (3, 8):
        while family[1].n_out < count:
            placed.step()
        placed.room.preempt(family[1])  # type: ignore[attr-defined]
    tiny.finish(placed, family)
    for request in family:
        assert request.out == tiny.outs(tiny.run(engine(says=False), PROMPTS[:1], request.params))[0]


def test_log_probabilities_are_the_models_own_there_too() -> None:
    params = replace(GREEDY, logprobs=2)
    (told,), (plain,) = (tiny.run(engine(says=says), PROMPTS[:1], params) for says in (True, False))
    start = len(PROMPTS[0])
    assert list(told.scores) == list(plain.scores) == list(range(start, start + N))
    ours, theirs = ([score.logprob for score in request.scores.values()] for request in (told, plain))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_text_may_stop_within(stop: int) -> None:
    """Stop strings and stop tokens end it where they would have."""
    said: list[int] = []

    def watch(token: int) -> bool:
        said.append(token)
        return len(said) == stop

    placed, request = engine(), Request(PROMPTS[0], GREEDY, watch=watch)
    placed.add(request)
    tiny.finish(placed, [request])
    assert request.out == said == want(GREEDY)[0][:stop] and request.left is not None
    assert request.left.reason == "stop"
