"""PEARL: tokens per round are the closed form, and tokens those of plain decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.bench.scripted import GOLDEN
from phasewise.errors import UserError
from phasewise.methods.draft._desk import Desk, Guessed, Order
from phasewise.methods.draft._seat import Answers, Inline, Seat
from phasewise.methods.draft.pearl import PEARL, _Pearl
from phasewise.methods.sample.standard import Standard
from phasewise.methods.verify.rejection import Rejection
from phasewise.options import parse
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import loop
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.loop import Speculation
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Coupling
from tests import tiny
from tests.draft.relatives import relative
from tests.speculation.markov import Table, fits, sequences
from tests.speculation.test_drawn_trees import FOUR, TWO, Model, World, decoded

PROMPTS = tiny.prompts(30, 7, 55)
TRUTH, WRONG = 0, 1
LENGTH = 4  # tokens of which the distribution is tested


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
        return {order.key: Guessed(self.guesses(order)) for order in orders}, 0

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
        assert len(request.state["pearl"].stream.tokens) <= 9
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


# ---- guesses that come with what they were drawn from
DRAWN = "where=inline,judged=drawn"


def test_greedy_tokens_and_costs_are_those_of_guesses_that_are_compared() -> None:
    found = []
    for knobs in ("where=inline", DRAWN):
        placed = tiny.engine({"draft": f"pearl:model={relative()},k=3,{knobs}"})
        found.append((tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(25))), placed.counters.as_dict()))
    assert found[0] == found[1] and found[0][0] == tiny.plain(PROMPTS, tiny.greedy(25))


def test_the_target_accepts_all_it_would_have_drawn_itself() -> None:
    """Of a rejection there is no chance; the pass of the pre-verify and those after it are all full."""
    k, n = 4, 1 + 1 + 5 * 4
    placed = tiny.engine({"draft": f"pearl:model=tiny,k={k},{DRAWN}"})
    tiny.run(placed, PROMPTS, sampled(n, top_p=0.95))
    assert placed.counters.forwards == 1 + 1 + 5
    assert placed.counters.accepted == placed.counters.drafted == 3 * 5 * (k - 1)


def test_a_verifier_that_matches_minds_no_probabilities() -> None:
    params = sampled(25, top_p=0.95)
    placed = tiny.engine({"draft": f"pearl:model={relative()},k=3,{DRAWN}", "verify": "match"})
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert 0 < placed.counters.accepted < placed.counters.drafted


class Follower:
    """The draft model of a desk: logits hang on the last token alone."""

    def __init__(self, logits: Table) -> None:
        self.model, self.counters = Model(logits), Counters()

    def lag(self, text: Request) -> int:
        return 0

    def reserve(self, text: Request, rows: int) -> bool:
        return True

    def advance(self, texts: Sequence[Request], tokens: Sequence[list[int]]) -> Tensor:
        return self.model.logits[[each[-1] for each in tokens]]

    def grow(self, new: Sequence[NewNodes]) -> Tensor:
        return torch.tensor([[float(token)] for each in new for token in each.tokens])


def told(
    world: World, seeds: int, temperature: float, coupling: Coupling, length: int, k: int = 3
) -> tuple[list[Request], int]:
    """So many requests of at least `length` tokens, under the drafter and the decode loop, target and draft being
    tables; and the rounds that they took, those of each counted."""
    host: Any = SimpleNamespace(model=Model(world.target), sample=Standard(coupling), counters=Counters())
    desk = Desk.__new__(Desk)
    desk.sample, desk.tells, desk.texts = Standard(coupling), True, {}
    desk.companion = Follower(world.draft)  # type: ignore[assignment]
    knobs = PEARL(k=k, where="inline", judged="drawn")
    decode = Speculation(host, _Pearl(knobs, host, Inline(desk), 1 << 20), Rejection(),
                         replace(knobs.traits, matches="point"))  # fmt: skip
    return decoded(decode, seeds, temperature, length)


def p_value(world: World, seeds: int, temperature: float, coupling: Coupling) -> float:
    chances = sequences((world.target.double() / temperature).softmax(-1), LENGTH)
    requests, _ = told(world, seeds, temperature, coupling, LENGTH)
    return fits([tuple(request.out[1 : LENGTH + 1]) for request in requests], chances)


@pytest.mark.parametrize(("world", "temperature", "coupling"),
                         [(TWO, 0.6, "inverse"), (TWO, 1.0, "gumbel"), (FOUR, 1.0, "inverse"), (FOUR, 0.3, "gumbel")],
                         ids=["two-0.6", "two-1", "four-1", "four-0.3"])  # fmt: skip
def test_the_targets_distribution_is_kept(world: World, temperature: float, coupling: Coupling) -> None:
    """Over rounds that end and rounds that go on: four tokens are pre-verified, verified and late."""
    assert p_value(world, 1000, temperature, coupling) > 1e-3


def test_tokens_per_round_are_the_closed_form_at_the_best_acceptance() -> None:
    """Guesses are right as often as any rule can have it, 1 - TV. Compared with the target's own draw by the same
    number, they would be in 0.7 of all cases."""
    p, q = torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), torch.tensor([0, 0.4, 0.2, 0.2, 0.2])
    world, best = World(p.log().expand(5, -1), q.log().expand(5, -1)), float(torch.minimum(p, q).sum())
    requests, rounds = told(world, 200, 1.0, "inverse", 80)
    tokens = sum(request.n_out - 1 for request in requests)
    assert tokens / rounds == pytest.approx(expected(best, 3), rel=0.03)
    assert expected(0.7, 3) < 0.8 * expected(best, 3)


def plant(name: str, patch: pytest.MonkeyPatch) -> None:
    if name == "late guesses are taken as they are":
        real = loop._with
        patch.setattr(loop, "_with", lambda draft, late: replace(real(draft, late), q=torch.cat((
            *([] if draft.q is None else [draft.q]), torch.full_like(late.q, 1e-9)))))  # fmt: skip
    else:
        real_then = Guessed.then
        patch.setattr(Guessed, "then", lambda self, more: replace(
            each := real_then(self, more), q=None if each.q is None else each.q.roll(1, 0)))  # fmt: skip


@pytest.mark.parametrize("name", ["late guesses are taken as they are", "each has another one's probabilities"])
def test_a_planted_bias_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(name, monkeypatch)
    assert p_value(TWO, 1500, 1.0, "inverse") < 1e-6


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
