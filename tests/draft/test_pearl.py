"""PEARL: tokens per round are the closed form, and tokens those of plain decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log
from types import SimpleNamespace

import pytest

from phasewise.bench.scripted import GOLDEN
from phasewise.errors import UserError
from phasewise.methods.draft._desk import Order
from phasewise.methods.draft._seat import Answers, Inline, Seat
from phasewise.methods.draft.pearl import PEARL, _Pearl
from phasewise.options import parse
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import tiny
from tests.draft.relatives import relative

PROMPTS = tiny.prompts(30, 7, 55)
TRUTH, WRONG = 0, 1


def sampled(n: int, **rules: float) -> list[Params]:
    return [Params(max_tokens=n, temperature=0.9, seed=seed, ignore_eos=True, **rules) for seed in range(3)]


# ---- the rounds, without a model
class Scripted(Seat):
    """The target says nothing but `TRUTH`; what is guessed for the places in `wrong` is not."""

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        super().__init__()
        self.wrong = set(wrong)
        self.queue: deque[Sequence[Order]] = deque()
        self.asked = 0

    def _post(self, orders: Sequence[Order]) -> None:
        self.queue.append(orders)

    def _next(self) -> tuple[Answers, int]:
        orders = self.queue.popleft()
        self.asked += sum(order.guesses for order in orders)
        return {order.key: self.guesses(order) for order in orders}, 0

    def guesses(self, order: Order) -> list[int]:
        places = range(len(order.tokens), len(order.tokens) + order.guesses)
        return [WRONG if place in self.wrong else TRUTH for place in places]

    def _forget(self, key: int) -> None: ...

    def close(self) -> None: ...


def drafter(knobs: PEARL, seat: Seat, context: int = 1 << 20) -> _Pearl:
    return _Pearl(knobs, SimpleNamespace(counters=Counters()), seat, context)  # type: ignore[arg-type]


def play(pearl: _Pearl, request: Request, budget: int | None = None) -> tuple[int, int]:
    """One round: guesses that were made, and new tokens."""
    (draft,) = pearl.draft([request], [pearl.size(request) if budget is None else budget])
    guesses = draft.tokens if draft is not None else []
    right = next((i for i, token in enumerate(guesses) if token != TRUTH), len(guesses))
    request.tokens += [TRUTH] * (right + 1)
    return len(guesses), right + 1


def expected(a: float, k: int) -> float:
    """Tokens per round, guesses being right with probability a: 1/a rounds of a token each until one is right, then
    1 / (1 - a) tokens until one is wrong, in rounds that all of k guesses survive with probability a^k."""
    return (1 / a + 1 / (1 - a)) / (1 / a + 1 / (1 - a**k))


@pytest.mark.parametrize("k", [3, 5, 8])
@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
def test_tokens_per_round_are_the_closed_form(a: float, k: int) -> None:
    """The lengths of runs of right guesses share their luck out evenly, so few of them are enough."""
    runs = [int(log(1 - (0.5 + i * GOLDEN) % 1) / log(a)) for i in range(400)]
    place, wrong, rounds = 1, [], 0
    for run in runs:  # judged one by one, each place once: `run` right ones, and a wrong one
        place += run + 1
        wrong.append(place - 1)
        rounds += 1 + ((run - 1) // k + 1 if run else 0)
    pearl = drafter(PEARL(k=k), Scripted(wrong))
    request = Request([TRUTH], Params(max_tokens=place + 100))
    played = tokens = 0
    while request.known < place:
        played, tokens = played + 1, tokens + play(pearl, request)[1]
    assert (played, request.known) == (rounds, place), "a rejection ends a round"
    assert tokens / played == pytest.approx(expected(a, k), rel=0.01)
    assert expected(a, k) != pytest.approx((1 - a**k) / (1 - a), rel=0.05), "in turns it would be another number"


@pytest.mark.parametrize("k", [2, 4])
def test_rounds_after_a_rejection_and_after_none(k: int) -> None:
    pearl = drafter(PEARL(k=k), Scripted(wrong=[1, 4 + 2 * k]))
    request = Request([TRUTH], Params(max_tokens=100))
    verify = [(0, 1), (0, 1)]  # the first guess is wrong, the next round's is right
    run = [(k - 1, k)] * 2
    assert [play(pearl, request) for _ in range(4)] == verify + run
    assert request.known == 3 + 2 * k
    made, new = play(pearl, request)
    assert (made, new) == (k - 1, 2), "one right, one wrong"
    assert play(pearl, request) == (0, 1)


def test_a_smaller_budget_wastes_no_guess() -> None:
    """What is cut off is proposed next time, and no more than 2 k - 1 guesses are ever kept."""
    seat = Scripted()
    pearl, request = drafter(PEARL(k=5), seat), Request([TRUTH], Params(max_tokens=200))
    play(pearl, request)
    for i in range(30):
        assert play(pearl, request, i % 5) == (i % 5, i % 5 + 1)
        assert len(request.state["pearl"].stream) <= 9
    assert seat.asked <= request.known + 9


def test_nothing_is_guessed_beyond_the_limit() -> None:
    seat = Scripted()
    pearl, request = drafter(PEARL(k=8), seat), Request([TRUTH], Params(max_tokens=11))
    while request.known < request.limit:
        room = request.limit - request.known
        assert play(pearl, request)[0] < room
    assert request.known == request.limit and seat.asked <= 10


def test_a_draft_model_with_a_shorter_context() -> None:
    short = tiny.checkpoint(context=64)
    want = tiny.plain(PROMPTS[2:], tiny.greedy(30))
    placed = tiny.engine({"draft": f"pearl:model={short},where=inline"})
    assert tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(30))) == want
    assert 0 < placed.counters.accepted == placed.counters.drafted <= 64 - 55


# ---- in an engine
def seat_of(placed: Placed) -> Seat:
    drafter = placed.recipes[""].phases[1].decode.drafter
    assert isinstance(drafter, _Pearl)
    return drafter.seat


@pytest.mark.parametrize("verify", ["rejection", "match"])
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_the_target_as_its_own_draft_is_always_right(how: str, verify: str) -> None:
    """One round of pre-verify, then k tokens a round, sampled ones too; the draft model reads no token twice."""
    k = 4
    n = 1 + 1 + 5 * k
    placed = tiny.engine({"draft": f"pearl:model=tiny,k={k},where=inline", "verify": verify})
    params = [tiny.greedy(n)] * 3 if how == "greedy" else sampled(n, top_p=0.95, frequency_penalty=0.2)
    requests = tiny.run(placed, PROMPTS, params)
    counters = placed.counters
    assert counters.forwards == 1 + 1 + 5
    assert counters.accepted == counters.drafted == 3 * 5 * (k - 1)
    assert counters.draft_forwards <= 6 * k, "k passes per round for the whole batch"
    seat = seat_of(placed)
    assert isinstance(seat, Inline)
    assert seat.desk.companion.own.rows <= sum(r.known - 1 for r in requests)
    assert seat.desk.held == 0 and not seat.desk.texts


@pytest.mark.parametrize("verify", ["rejection", "match"])
def test_sampled_tokens_are_those_of_plain_decoding(verify: str) -> None:
    params = sampled(25, repetition_penalty=1.1, top_k=20)
    want = tiny.plain(PROMPTS, params)
    placed = tiny.engine({"draft": f"pearl:model={relative()},where=inline,k=2", "verify": verify})
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == want
    assert 0 < placed.counters.accepted < placed.counters.drafted


def test_a_long_prompt_is_read_in_pieces() -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(30))
    placed = tiny.engine({"draft": "pearl:model=tiny,chunk=1,where=inline"})
    assert tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(30))) == want[2:]
    assert placed.counters.drafted == 0, "it has not caught up"
    placed = tiny.engine({"draft": "pearl:model=tiny,chunk=20,where=inline"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(30))) == want
    assert placed.counters.accepted == placed.counters.drafted > 40


def test_many_requests_that_come_and_go() -> None:
    """Rows of requests that were cancelled, forked or have ended do not stay; the others' tokens are the same."""
    prompts = tiny.prompts(*range(5, 35, 3))
    want = tiny.plain(prompts, tiny.greedy(20))
    placed = tiny.engine({"draft": "pearl:model=tiny,where=inline"}, max_running=6)
    requests = [Request(prompt, tiny.greedy(20)) for prompt in prompts]
    for request in requests:
        placed.add(request)
    while requests[0].n_out < 6:
        placed.step()
    seat = seat_of(placed)
    assert isinstance(seat, Inline) and len(seat.desk.texts) == 6 and seat.desk.held > 0
    twin = Request(requests[0].prompt, requests[0].params)
    twin.adopt(requests[0])
    placed.resume(twin)
    assert placed.cancel(requests[1]) and placed.cancel(requests[9])
    tiny.finish(placed, [*requests, twin])
    assert [r.out for i, r in enumerate(requests) if i not in (1, 9)] == [
        o for i, o in enumerate(want) if i not in (1, 9)
    ]
    assert twin.out == want[0] and placed.counters.accepted == placed.counters.drafted
    assert seat.desk.held == 0 and not seat.desk.texts


def test_it_works_by_its_name_alone() -> None:
    methods = parse({"draft": "pearl"})
    assert methods["draft"] == PEARL() and type(methods["decode"]).__name__ == "Speculative"


def test_vocabularies_must_agree() -> None:
    other = tiny.checkpoint(vocab=32, layers=1)
    with pytest.raises(UserError, match=r"pearl: .* 32 tokens in its vocabulary, the model has 64"):
        tiny.engine({"draft": f"pearl:model={other}"})


@pytest.mark.parametrize(("knob", "least"), [("k", 2), ("threads", 1), ("chunk", 1)])
def test_knobs_out_of_range_are_refused(knob: str, least: int) -> None:
    with pytest.raises(UserError, match=f"pearl: {knob}={least - 1} must be at least {least}"):
        PEARL(**{knob: least - 1})  # type: ignore[arg-type]
