"""Recipes that come while workers run: told to real processes, to those that replace them, or to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.cluster.recipe_update import read, told
from phasewise.cluster.router import Router
from phasewise.errors import UserError
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.processes import handle, kill, pid, segments, started
from tests.seeds import draw

PROMPTS = tiny.prompts(120, 40, 7)
WINDOW = {"evict": "streaming:sinks=2,window=12"}
CHOICES: list[dict[str, str | None]] = [
    {}, WINDOW, {"draft": "prompt_lookup:k=2"}, {"draft": "paced:of=prompt_lookup", "verify": "match"},
    {"decode": "block_diffusion:block=2,mask=3"}, {"store": "int8", "sample": "grammar+momentum"},
    {"draft": "swift"}, {"skip": "unified:weights=none"}, {"attend": "quest:budget=64"},
]  # fmt: skip


@pytest.fixture(scope="module", params=[draw(__name__).choice(["disaggregated:prefill=1,decode=1", "semi_pd"])])
def placed(request: pytest.FixtureRequest) -> Iterator[Router]:
    router = started(request.param, {}, prefix_cache=False)
    yield router
    router.close()
    assert segments(router) == []


def run(router: Router, recipe: str, tokens: int = 24) -> list[list[int]]:
    requests = [Request(prompt, Params(tokens, ignore_eos=True), recipe=recipe) for prompt in PROMPTS]
    for request in requests:
        router.add(request)
    while any(request.left is None for request in requests):
        router.step()
    return tiny.outs(requests)


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_recipes_are_the_same_elsewhere(options: dict[str, str | None]) -> None:
    recipes = {"own": parse(options)}
    assert read(told(recipes)) == recipes


def test_workers_learn_and_requests_under_way_keep_theirs(placed: Router) -> None:
    plain, narrow = tiny.plain(PROMPTS, Params(24, ignore_eos=True)), tiny.plain(
        PROMPTS, Params(24, ignore_eos=True), WINDOW
    )  # fmt: skip
    assert plain != narrow, "the recipes cannot be told apart"
    early = Request(PROMPTS[0], Params(200, ignore_eos=True))
    placed.add(early)
    while early.n_out < 3:
        placed.step()
    placed.learn({"narrow": parse(WINDOW)})
    assert run(placed, "narrow") == narrow and run(placed, "") == plain
    placed.learn({"fast": parse({"draft": "prompt_lookup:k=2"})})
    assert run(placed, "fast") == plain and run(placed, "narrow") == narrow
    while early.left is None:
        placed.step()
    assert early.out == tiny.plain(PROMPTS[:1], Params(200, ignore_eos=True))[0]


def test_whoever_replaces_a_worker_is_told_as_well(placed: Router) -> None:
    placed.learn({"again": parse(WINDOW)})
    for role in {each.role for each in placed.handles}:
        lost = placed.counters.workers_lost
        kill(pid(handle(placed, role)))
        while placed.counters.workers_lost == lost:
            placed.step()
        while not placed.supervisor.ready:
            placed.step()
    assert run(placed, "again") == tiny.plain(PROMPTS, Params(24, ignore_eos=True), WINDOW)


def test_what_a_worker_cannot_make_is_refused_by_its_name(placed: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"bad": parse({"draft": "draft_model:model=no/such"})}
    with pytest.raises(UserError, match="no/such"):
        placed.learn(bad)
    for front in placed.fronts:  # which would find it out by themselves
        monkeypatch.setattr(front, "learn", lambda recipes: None)
    with pytest.raises(UserError, match=r"worker \S+-\d+: .*no/such"):
        placed.learn(bad)
    monkeypatch.undo()
    assert "bad" not in placed._recipe_update
    placed.learn({"good": parse({"draft": "prompt_lookup:k=3"})})
    assert run(placed, "good") == tiny.plain(PROMPTS, Params(24, ignore_eos=True))


def test_a_worker_that_dies_of_it_is_replaced_and_nothing_is_learned(
    placed: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = placed.handles[0]
    plain: Any = victim.tell

    def deadly(command: dict[str, Any]) -> None:
        if command["do"] == "learn":
            kill(pid(victim))
        plain(command)

    monkeypatch.setattr(victim, "tell", deadly)
    with pytest.raises(UserError, match=f"worker {victim.name} has died"):
        placed.learn({"lost": parse(WINDOW)})
    monkeypatch.undo()
    assert "lost" not in placed._recipe_update
    assert run(placed, "") == tiny.plain(PROMPTS, Params(24, ignore_eos=True))
