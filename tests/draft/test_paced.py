"""paced: against a clock and a drafter of which everything is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phasewise.engine.engine import Engine
from phasewise.methods.draft.paced import PAUSE, SHARE, Paced, Pacer
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.loop import draft_span
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, HoldingDrafter
from tests import tiny

RIGHT, WRONG, LOOK = 7, 8, 2e-5  # tokens; seconds that a look takes


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Script(Drafter):
    """Guesses chains of `k`; every token is right with `chance`, by itself. Looking takes LOOK seconds a request, and a
    guess `node` seconds more."""

    clock: Clock
    k: int
    chance: float
    node: float = 0.0
    rng: Random = field(default_factory=lambda: Random(0))
    looks: int = 0  # calls ...
    looked: int = 0  # ... and requests in them
    guessed: int = 0

    def size(self, request: Request) -> int:
        return self.k

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        self.looks += 1
        self.looked += len(requests)
        self.clock.now += LOOK * len(requests)
        found: list[Draft | None] = []
        for budget in budgets:
            self.clock.now += self.node * min(budget, self.k)
            self.guessed += min(budget, self.k)
            tokens = [RIGHT if self.rng.random() < self.chance else WRONG for _ in range(min(budget, self.k))]
            found.append(Draft.chain(tokens))
        return found

    def learn(self, spans: Sequence[Span], hidden: Any, outcomes: Sequence[Outcome], tops: Any = None) -> None:
        pass


@dataclass
class World:
    """Requests whose text is all RIGHT, on a machine where a step takes `base` and `row` seconds for every row."""

    pacer: Pacer
    clock: Clock
    base: float
    row: float
    n: int = 1

    def __post_init__(self) -> None:
        self.requests = [Request([1, RIGHT], Params(max_tokens=100_000)) for _ in range(self.n)]
        for request in self.requests:
            request.computed, request.kv = 1, object()  # type: ignore[assignment]  # no model looks at it
        self.pacer.sized = lambda request: True

    def run(self, steps: int) -> tuple[float, list[int]]:
        """-> tokens per second of all, sizes of the guesses of the first request"""
        began, sizes, made = self.clock.now, list[int](), 0
        for _ in range(steps):
            drafts = self.pacer.draft(self.requests, [self.pacer.size(request) for request in self.requests])
            spans, outcomes = [], []
            for request, draft in zip(self.requests, drafts):
                draft = draft or Draft([], [])
                spans.append(draft_span(request, draft, None))  # type: ignore[arg-type]
                good = next((i for i, token in enumerate(draft.tokens) if token != RIGHT), len(draft.tokens))
                outcomes.append(Outcome(good + 1, [RIGHT] * (good + 1)))
            self.clock.now += self.base + self.row * sum(span.rows for span in spans)
            self.pacer.learn(spans, None, outcomes)  # type: ignore[arg-type]
            for request, outcome in zip(self.requests, outcomes):
                request.tokens += outcome.tokens
                request.computed += outcome.kept
                made += len(outcome.tokens)
            sizes.append(spans[0].rows - 1)
        return made / (self.clock.now - began), sizes


def world(chance: float, n: int = 1, k: int = 8, base: float = 6e-3, row: float = 0.4e-3) -> tuple[World, Script]:
    clock = Clock()
    script = Script(clock, k, chance)
    return World(Pacer(script, clock), clock, base, row, n), script


def rate(size: int, chance: float, base: float, row: float) -> float:
    return sum(chance**i for i in range(size + 1)) / (base + row * (size + 1))


@pytest.mark.parametrize("chance", [0.9, 0.7, 0.4])
@pytest.mark.parametrize("row", [0.2e-3, 1e-3])
def test_alone_it_comes_near_the_best_size(chance: float, row: float) -> None:
    """Of all fixed sizes, the closed form's best; found within some hundred steps, kept within 5 % of its speed."""
    here, _ = world(chance, row=row)
    here.run(400)
    found, _ = here.run(600)
    best = max(rate(size, chance, here.base, row) for size in range(9))
    assert found > 0.95 * best


@pytest.mark.parametrize("n", [1, 8, 32])
def test_guesses_that_do_not_pay_cost_next_to_nothing(n: int) -> None:
    """Beside plain steps: at most what looking may take, and the trials; and a pause makes no claim to rows."""
    here, script = world(0.02, n)
    found, _ = here.run(300)
    plain = n / (here.base + here.row * n)
    assert found > 0.97 * plain
    looked = script.looked
    found, sizes = here.run(500)
    assert found > (1 - 1.5 * SHARE) * plain
    assert sum(sizes) < 0.1 * 500  # after a lucky guess, a few more
    wanted = SHARE * (here.base + here.row * n) / (LOOK * n)  # a step and request
    assert script.looked - looked == pytest.approx(500 * n * min(1, max(wanted, 1 / PAUSE)), rel=0.35, abs=2 * n)


class Bursts(Script):
    """Mostly nothing is found; what is, is right to its end."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        self.clock.now += LOOK * len(requests)
        self.looks += 1
        return [Draft.chain([RIGHT] * self.k) if self.rng.random() < self.chance else None for _ in requests]


def test_seldom_and_many_is_worth_a_look() -> None:
    """One look of five finds eight tokens, at half of a step's time: who always looked would be 1.7 times as fast as
    who never does. By the mean of what single steps gain, ln 9 / 5, looking would hardly be worth its time."""
    clock = Clock()
    script = Bursts(clock, 8, 0.2)
    here = World(Pacer(script, clock), clock, 2 * LOOK, 0.01 * LOOK)
    here.run(300)
    found, _ = here.run(3000)
    assert found > 1.1 / (here.base + here.row)


def test_a_pause_of_the_machine_is_no_price() -> None:
    """One look that took a tenth of a second (a garbage collection, a prompt read) does not end looking; looks that
    all take so long do."""
    here, script = world(0.9)
    here.run(200)
    draft = script.draft

    def slow(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        here.clock.now += 0.1
        return draft(requests, budgets)

    script.draft = slow  # type: ignore[method-assign]
    here.run(1)
    script.draft = draft  # type: ignore[method-assign]
    assert min(here.run(20)[1]) > 0
    script.draft = slow  # type: ignore[method-assign]
    looks = script.looks
    here.run(500)
    assert script.looks - looks < 50


def test_it_wakes_up_when_guesses_become_right() -> None:
    """Guesses that were never run are counted too: nothing has to be risked to find out."""
    here, script = world(0.02, n=8)
    here.run(300)
    script.chance = 0.95
    here.run(300)
    assert sum(here.run(50)[1]) / 50 > 2


def test_many_sharing_a_step_get_smaller_guesses() -> None:
    alone, _ = world(0.6)
    alone.run(300)
    crowd, _ = world(0.6, n=16)
    crowd.run(300)
    assert sum(alone.run(50)[1]) > 2 * sum(crowd.run(50)[1])


def test_what_must_not_be_sized_is_left_alone() -> None:
    """Drawn guesses, say: whole, whatever they cost and however wrong they are."""
    here, _ = world(0.0, n=4)
    first = here.requests[0]
    here.pacer.sized = lambda request: request is not first
    assert here.run(200)[1] == [8] * 200


def test_a_second_model_is_asked_for_what_pays() -> None:
    """Its guesses cost before they are judged, so fewer are made; none but trials where they are too dear."""
    here, script = world(0.8)
    script.companion = object()  # type: ignore[attr-defined]
    here.pacer = Pacer(script, here.clock)
    here.__post_init__()
    here.run(200)
    cheap = sum(here.run(200)[1])
    script.node = 2e-3
    here.run(200)
    dear = sum(here.run(200)[1])
    assert 0 < dear < 0.6 * cheap
    script.node = 20e-3
    here.run(400)
    before, made = here.clock.now, script.guessed
    here.run(4000)
    assert (script.guessed - made) * script.node < 0.05 * (here.clock.now - before)


def test_it_passes_on_what_its_drafter_says() -> None:
    """What the loop asks a drafter for is the inner drafter's own answer."""
    methods = parse({"draft": "paced:of=(token_recycling:scope=engine,nodes=9)"})
    assert isinstance(methods["draft"], Paced)
    traits = methods["draft"].traits
    assert (traits.learns_across, traits.candidates, traits.drawn, traits.idles) == (True, 8, False, True)
    plain = parse({"draft": "paced"})["draft"]
    assert (plain.traits.learns_across, plain.traits.candidates) == (False, 0)
    assert Pacer(plain.of.bind(None)).companion is None and Pacer(plain.of.bind(None)).reach(100) > 1 << 30


@pytest.mark.parametrize("held", ["paced:of=(prompt_lookup)", "rasd:base=(prompt_lookup),source=(token_recycling)"])
@pytest.mark.parametrize(("question", "answer"), [("sort", 5), ("draws", True), ("think", True)])
def test_who_holds_a_drafter_asks_it(held: str, question: str, answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop asks of a drafter is answered by the one that guesses."""
    placed = tiny.engine({"draft": held})
    assert isinstance(placed, Engine)
    drafter = placed.recipes[""].phases[0].decode.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, HoldingDrafter)
    guesses = SimpleNamespace(**{question: lambda *request: answer})
    monkeypatch.setattr(drafter, "parts", (guesses, *drafter.parts[1:]))
    request = Request([5, 6, 7])
    assert getattr(drafter, question)(*([] if question == "think" else [request])) == answer


def test_the_drafter_inside_is_told_who_is_sized() -> None:
    heard: list[object] = []
    pacer = Pacer(
        cast(Any, SimpleNamespace(companion=None, first_layers=None, drawer=None, token_rows=(), sized_by=heard.append))
    )
    pacer.sized_by(callable)
    assert heard == [callable]


@pytest.mark.parametrize("held", ["paced:of=({})", "rasd:base=(prompt_lookup),source=({})"])
def test_who_holds_a_drafter_ends_what_it_has_running(held: str) -> None:
    """As the loop ends the drafter's own."""
    placed = tiny.engine({"draft": held.format("pearl:model=tiny-draft,where=inline")})
    assert isinstance(placed, Engine)
    drafter = placed.recipes[""].phases[0].decode.drafter  # type: ignore[attr-defined]
    ended: list[bool] = []
    inner = drafter.of if hasattr(drafter, "of") else drafter.source
    inner.close = lambda: ended.append(True)
    placed.close()
    assert ended


def test_who_is_guessed_well_is_not_starved_by_those_who_are_not() -> None:
    """Eight requests of which one repeats itself: it goes on to be looked at while the others are paused."""
    here, script = world(0.0, n=8, row=0.05e-3)
    good = here.requests[0]
    asked = dict.fromkeys((id(request) for request in here.requests), 0)

    def draft(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        script.clock.now += 10 * LOOK * len(requests)
        for request in requests:
            asked[id(request)] += 1
        return [Draft.chain([RIGHT if each is good else WRONG] * n) for each, n in zip(requests, budgets)]

    script.draft = draft  # type: ignore[method-assign]
    here.run(200)
    asked.update(dict.fromkeys(asked, 0))
    _, sizes = here.run(200)
    assert min(sizes) > 0, "guesses that are all right are made in every step"
    assert asked[id(good)] == 200
    assert max(count for request, count in asked.items() if request != id(good)) < 40


@pytest.mark.parametrize(("look", "kept"), [(0.2e-3, True), (1e-3, True), (40e-3, False)])
def test_looking_is_weighed_against_what_it_brings(look: float, kept: bool) -> None:
    """Guesses of up to eight tokens, seven of eight right: worth two steps, 12 ms, and a little more."""
    here, script = world(0.875)
    draft = script.draft

    def dear(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        here.clock.now += look
        return draft(requests, budgets)

    script.draft = dear  # type: ignore[method-assign]
    here.run(400)
    looks = script.looks
    found, _ = here.run(1000)
    if kept:
        assert script.looks - looks > 950
    else:
        assert script.looks - looks < 30
        assert found > 0.97 / (here.base + here.row)


def test_a_long_prompt_is_read_once_and_that_is_no_price_of_looking() -> None:
    """The first look at a request takes as long as forty steps, each later one next to nothing."""
    here, script = world(0.9)
    draft, seen = script.draft, set[int]()

    def reading(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        for request in requests:
            here.clock.now += 0.0 if id(request) in seen else 40 * here.base
            seen.add(id(request))
        return draft(requests, budgets)

    script.draft = reading  # type: ignore[method-assign]
    for _ in range(5):
        here.__post_init__()
        _, sizes = here.run(60)
        assert sum(size > 0 for size in sizes[5:]) > 50


def test_who_comes_after_requests_without_luck_waits_a_little() -> None:
    """Short answers that never repeat themselves: most are over before they are looked at. When texts come that do,
    looks are made again."""
    here, script = world(0.0)
    draft = script.draft

    def dear(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        here.clock.now += 2e-3
        return draft(requests, budgets)

    script.draft = dear  # type: ignore[method-assign]
    for _ in range(20):
        here.__post_init__()
        here.run(10)
    looks = script.looks
    for _ in range(100):
        here.__post_init__()
        here.run(10)
    assert script.looks - looks < 60
    script.chance = 0.98
    for _ in range(20):
        here.__post_init__()
        here.run(60)
    here.__post_init__()
    assert sum(here.run(60)[1]) > 200


def test_where_nobody_is_looked_at_the_drafter_is_not_asked() -> None:
    """Such steps are plain decoding's, drawn tokens too."""
    params = Params(max_tokens=24, temperature=1.0, seed=3)
    plain, paced = tiny.engine({}), tiny.engine({"draft": "paced"})
    assert isinstance(paced, Engine)
    drafter = paced.recipes[""].phases[0].decode.drafter  # type: ignore[attr-defined]
    asked: list[int] = []
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: asked.append(1) or draft(requests, budgets)
    drafter.size = lambda request: 0
    answers = []
    for engine in (plain, paced):
        requests = [Request(prompt, params) for prompt in tiny.prompts(5, 9)]
        for request in requests:
            engine.add(request)
        while not engine.idle:
            engine.step()
        answers.append([request.out for request in requests])
    assert answers[0] == answers[1]
    assert len(asked) <= 1, "the step before the first verdict, at most"
