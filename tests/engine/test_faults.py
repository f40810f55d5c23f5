"""Whatever a method raises for one request fails that request, and nobody else notices."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from phasewise.engine.attempt import isolate
from phasewise.request.drawer import Drawer
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step import reference
from phasewise.step.plan import AttentionPlan
from phasewise.step.read import Read
from tests import seeds, tiny
from tests.asking import Asking
from tests.engine.engines import Boom, Faulty, alone, break_decode, method_options, sampled, step_all

SCHEDULES = ("sarathi:budget=11", "prefill_first", "layered:rows_per_group=9")
PROMPTS = tiny.prompts(30, 12, 21, 5, 17)


def crowd(engine: tiny.Placed, bad: int | None = 2, params: Params | None = None) -> list[Request]:
    params = params or tiny.greedy(6)
    requests = [Request(p, params, id="bad" if i == bad else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    return requests


def only_the_bad_one_failed(requests: list[Request], why: str) -> None:
    for request in requests:
        if request.id == "bad":
            assert (request.left.how, request.left.reason) == ("failed", why)
        else:
            assert request.left.how == "finished" and request.out == alone(request)


@pytest.mark.parametrize(("verb", "schedule"), zip(["rows", "propose", "accept"], SCHEDULES))
def test_a_decode_method_that_raises(verb: str, schedule: str) -> None:
    engine = tiny.engine({"schedule": schedule})
    break_decode(engine, [verb], {"bad"})
    requests = crowd(engine)
    step_all(engine, requests)
    only_the_bad_one_failed(requests, f"Boom: {verb}")


def test_a_sampler_that_raises() -> None:
    engine = tiny.engine({"schedule": SCHEDULES[0]})
    host = engine.parts.phases[0].decode.host
    sample = host.sample

    class Sampler(type(sample)):
        def __call__(self, logits: object, contexts: list) -> object:
            if any(context.request.id == "bad" and context.request.n_out == 3 for context in contexts):
                raise Boom("no")
            return super().__call__(logits, contexts)

    sample.__class__ = Sampler
    requests = crowd(engine, params=sampled(6))
    step_all(engine, requests)
    only_the_bad_one_failed(requests, "Boom: no")
    assert requests[2].n_out == 3


class Breaks(Asking):
    """Reads everything, and raises for one request in some layer."""

    everything = True

    def __call__(self, reads: Sequence[Read]) -> list[None]:
        if any(read.span.request.id == "bad" and read.layer == 2 for read in reads):
            raise Boom("layer 2")
        return [None] * len(reads)


def test_an_attend_method_that_raises_in_the_middle_of_the_model() -> None:
    engine = tiny.engine({"schedule": SCHEDULES[2]})
    for phase in engine.parts.phases:
        object.__setattr__(phase, "attend", Breaks())
    requests = crowd(engine)
    step_all(engine, requests)
    only_the_bad_one_failed(requests, "Boom: layer 2")


EVICTORS = [options for options in method_options("evict") if options["evict"] != "none"]
HOOKS = ["plan", "look", "due", "keep"]


@pytest.mark.parametrize(
    ("verb", "options", "schedule"),
    seeds.params(
        [(HOOKS[i % 4], options, SCHEDULES[i % 3]) for i, options in enumerate(EVICTORS)], 2, "evictors that raise"
    )
    + [(hook, {"evict": "h2o:heavy=6,recent=4"}, SCHEDULES[0]) for hook in HOOKS],
    ids=str,
)
def test_an_evictor_that_raises(
    verb: str, options: dict[str, str], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed try, rows are seen again: that must not change what the others keep."""
    engine, look = tiny.engine(options | {"schedule": schedule}), reference.look

    def broken(plan: AttentionPlan, read: Read) -> None:
        look(plan, read)
        if verb == "look" and read.span.request.id == "bad" and plan.record is not None:
            raise Boom(verb)

    monkeypatch.setattr(reference, "look", broken)
    evict = Faulty(engine.parts.phases[0].evict, [verb], {"bad"})
    for phase in engine.parts.phases:
        object.__setattr__(phase, "evict", evict)
    requests = crowd(engine)
    step_all(engine, requests)
    if requests[2].left.how == "failed":  # an evictor may have nothing to `keep` here
        assert requests[2].left.reason == f"Boom: {verb}"
    for request in requests:
        if request.id != "bad":
            assert [request.out] == tiny.plain([request.prompt], request.params, options)


@pytest.mark.parametrize(
    ("verb", "options"),
    seeds.params([(("size", "draft", "learn")[i % 3], each) for i, each in enumerate(method_options("draft"))], 6,
                 "drafters that raise"), ids=str,
)  # fmt: skip
def test_a_drafter_that_raises(verb: str, options: dict[str, str]) -> None:
    engine = tiny.engine(options | {"verify": "match"})
    decode = engine.parts.phases[0].decode
    decode.drafter = Faulty(decode.drafter, [verb], {"bad"})
    requests = crowd(engine, params=sampled(6))
    step_all(engine, requests)
    only_the_bad_one_failed(requests, f"Boom: {verb}")


def test_a_draft_model_whose_pass_fails_once_starts_again() -> None:
    engine = tiny.engine({"draft": "draft_model:model=tiny-draft", "verify": "match"})
    (companion,) = engine.recipes[""].companions
    layer, left = companion.model.layer, [1]

    def shaky(i: int, x: object, ctx: object, deltas: object) -> object:
        result = layer(i, x, ctx, deltas)
        if i == 1 and left[0]:
            left[0] -= 1
            raise Boom("passing")
        return result

    companion.model = copy.copy(companion.model)
    companion.model.layer = shaky
    requests = crowd(engine, bad=None, params=sampled(6))
    step_all(engine, requests)
    assert left == [0]
    only_the_bad_one_failed(requests, "")


def test_a_watch_that_raises() -> None:
    def watch(token: int) -> bool:
        raise Boom("watching")

    engine = tiny.engine()
    requests = crowd(engine, bad=None)
    spoilt = Request(PROMPTS[1], tiny.greedy(4), id="bad", watch=watch)
    engine.add(spoilt)
    step_all(engine, [*requests, spoilt])
    only_the_bad_one_failed([*requests, spoilt], "Boom: watching")


def test_a_store_that_cannot_open() -> None:
    engine = tiny.engine()
    open_ = engine.store.open

    def broken(request: Request, tokens: int) -> object:
        if request.id == "bad":
            raise MemoryError("no pages")
        return open_(request, tokens)

    engine.store.open = broken
    requests = crowd(engine)
    step_all(engine, requests)
    only_the_bad_one_failed(requests, "MemoryError: no pages")


def test_a_drawer_that_cannot_be_closed_gives_its_memory_back_all_the_same() -> None:
    class Stuck(Drawer):
        def close(self) -> None:
            raise Boom("stuck")

    engine = tiny.engine()
    requests = crowd(engine)
    engine.step()
    requests[2].state["stuck"] = Stuck()
    step_all(engine, requests)
    assert all(r.left.how == "finished" for r in requests)


@pytest.mark.parametrize(("times", "schedule"), zip([1, 2, 5], SCHEDULES))
def test_an_error_that_goes_away_costs_nobody_a_token(times: int, schedule: str) -> None:
    """Even a slice half-way through the layers is run again, whole, and gives the same tokens."""
    engine = tiny.engine({"schedule": schedule})
    decode = engine.parts.phases[0].decode
    accept, left = decode.accept, [times]

    def shaky(spans: list, hidden: object) -> list:
        if len(spans) > 1 and left[0]:
            left[0] -= 1
            raise Boom("passing")
        return accept(spans, hidden)

    decode.accept = shaky
    requests = crowd(engine, bad=None)
    step_all(engine, requests)
    assert left == [0]
    only_the_bad_one_failed(requests, "")


def test_a_sibling_that_cannot_draw_does_not_take_its_parent_along() -> None:
    engine = tiny.engine({"schedule": SCHEDULES[0]})
    parent = Request(PROMPTS[0], sampled(5), id="parent")
    family = [parent, *(parent.sibling(i) for i in (1, 2))]
    break_decode(engine, ["accept"], {"parent.1"})
    for request in family:
        engine.add(request)
    step_all(engine, family)
    assert [r.left.how for r in family] == ["finished", "failed", "finished"]
    assert [family[0].out, family[2].out] == [alone(family[0]), alone(family[2])]


def test_isolate_finds_every_culprit_with_few_tries() -> None:
    calls = []

    def call(items: list[int]) -> list[int]:
        calls.append(list(items))
        if {13, 40} & set(items):
            raise Boom(str(items))
        return [2 * item for item in items]

    undone: list[int] = []
    results = isolate(call, list(range(64)), undone.append)
    assert [i for i, r in enumerate(results) if isinstance(r, Boom)] == [13, 40]
    assert all(r == 2 * i for i, r in enumerate(results) if i not in (13, 40))
    assert len(calls) <= 4 * 6 + 1
    assert undone.count(0) == 3  # among 64, 32 and 16


def test_isolate_notices_a_missing_result() -> None:
    (result,) = isolate(lambda items: [], [1])
    assert isinstance(result, AssertionError)
