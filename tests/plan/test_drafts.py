"""Guesses in the simulator against closed forms, and against no guesses at all."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from phasewise.bench.workloads import Fixed, Lognormal
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.cost import Price, StepWork
from phasewise.plan.drafts import Drafts
from phasewise.plan.search import Question, SearchSpace, search
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.setting import CostsByRole, ServerSetting
from phasewise.plan.simulate import run
from phasewise.request.params import SLO
from tests.plan.scenarios import Linear, scenario
from tests.plan.test_simulate import settled


def drafting(cost: Any, drafts: Drafts, **more: Any) -> Any:
    """A scenario whose decodes bring guesses."""
    made = scenario(cost, **more)
    return replace(made, layout=replace(made.layout, engine=replace(made.layout.engine, drafts=drafts)))


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("depth", [1, 4])
def test_tokens_of_a_step_are_those_of_the_closed_form(depth: int, accept: float) -> None:
    """(1 - a^(k+1)) / (1 - a), in the form and in steps of one long request."""
    drafts = Drafts(depth, accept)
    assert drafts.tokens == pytest.approx(sum(accept**i for i in range(depth + 1)))
    job = SimulatedRequest("a", range(8), 4_000, 0.0)
    outcome = run(drafting(Linear(1.0), drafts, kv_bytes=1 << 40), [job])
    assert job.finished and job.n_out == 4_000
    steps = outcome.numbers()["steps"] - 1  # the prompt's
    assert job.n_out / steps == pytest.approx(drafts.tokens, rel=0.04)
    assert job.tpot == pytest.approx(steps / (job.n_out - 1))


def test_as_many_guesses_hold_as_drawn_one_by_one() -> None:
    luck, drafts = Random(1), Drafts(4, 0.6)
    found = [drafts.held(4, luck) for _ in range(4_000)]
    for i in range(1, 5):
        assert sum(n >= i for n in found) / len(found) == pytest.approx(0.6**i, rel=0.1)
    assert set(found) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("place", "kv_bytes"),
    [("colocated", 5 << 20), ("disaggregated", 1 << 30), ("splitwise:prompt=2,token=1", 5 << 20), ("semi_pd", 5 << 20)],
)
def test_every_token_comes_once_and_nothing_is_kept(place: str, kv_bytes: int) -> None:
    """With preemptions too; and what is counted of workers comes to nothing in the end."""
    jobs = Load(Lognormal(), 120, 300.0).jobs(SLO())
    outcome = run(drafting(Linear(0.002, 1e-4), Drafts(4, 0.6), place=place, kv_bytes=kv_bytes), jobs)
    assert kv_bytes > 1 << 24 or place != "colocated" or outcome.numbers()["preemptions"]
    assert 0 < outcome.numbers()["accepted"] < outcome.numbers()["drafted"]
    settled(outcome)


def test_guesses_that_never_hold_change_no_token_time_but_their_rows() -> None:
    """Steps that cost nothing per row come when they would without guesses, if none holds. The same seed, the same."""
    times = []
    for drafts in (Drafts(), Drafts(4, 0.0), Drafts(4, 0.7), Drafts(4, 0.7), Drafts(4, 0.7, seed=1)):
        jobs = Load(Lognormal(), 60, 20.0).jobs(SLO())
        run(drafting(Linear(0.01), drafts, schedule="sarathi:budget=100000"), jobs)
        times.append([(job.first_token, job.last_token) for job in jobs])
    assert times[0] == times[1] and times[2] == times[3]
    assert times[2] != times[0] and times[2] != times[4]


class Seen:
    """Keeps every step it is asked to price."""

    def __init__(self) -> None:
        self.steps: list[StepWork] = []

    def seconds(self, step: StepWork) -> float:
        self.steps.append(step)
        return 1.0

    def price(self, step: StepWork) -> Price:
        return Price(self.seconds(step))


def test_rows_of_guesses_are_paid_for() -> None:
    """One request of 10 tokens and a decode of 3 guesses: KV is read once, and seen by each row."""
    seen = Seen()
    job = SimulatedRequest("a", range(10), 9, 0.0)
    outcome = run(drafting(seen, Drafts(3, 1.0, seconds=0.25)), [job])
    prompt, first, second = seen.steps
    assert prompt.prefill_rows == 10 and prompt.decode_rows == 0
    assert (first.decode_rows, first.context, first.emits) == (4, 14, 4)
    assert first.pairs + first.context == 11 + 12 + 13 + 14
    assert (second.decode_rows, second.context) == (4, 18)
    assert outcome.seconds == pytest.approx(1 + 2 * (1 + 3 * 0.25)) and job.n_out == 9


def asked(accept: float, cost: Any) -> Question:
    return Question(
        Load(Fixed(prompt=100, new=40), 60, None, 1.0, 3), SLO(2.0, 0.02),
        lambda choice: CostsByRole(lambda role, threads: cost, lambda role: 1 << 30, 1024, 4, 1),
        ServerSetting(kv_bytes=1 << 30, drafts=Drafts(0, accept)), precision=0.05,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accept", "cost", "depth"),
    [(0.8, Linear(base=0.01, prompt=0.001), 4), (0.05, Linear(base=0.001, row=0.002), 0)],
    ids=["rows for nothing", "dear rows"],
)
def test_the_search_takes_the_depth_that_pays(accept: float, cost: Any, depth: int) -> None:
    space = SearchSpace(1, ["colocated"], ["sarathi"], depths=(0, 1, 2, 4))
    found = search(space, asked(accept, cost), prune=False)
    assert found[0].choice.depth == depth and len(found) == 4
    assert f"{depth} guesses a step" in str(found[0].choice) or not depth


@pytest.mark.parametrize("words", [{"depth": -1}, {"depth": 1, "accept": 1.2}, {"depth": 1, "accept": float("nan")},
                                   {"depth": 1, "seconds": -1.0}])  # fmt: skip
def test_what_makes_no_sense_is_said(words: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Drafts(**words)
