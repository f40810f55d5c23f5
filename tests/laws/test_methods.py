"""The laws of DESIGN section 4, over every discovered method. A new method file is under them at once."""

from __future__ import annotations

import dataclasses

import pytest

from phasewise import catalog
from phasewise.cluster.inline import InlineConnection
from phasewise.cluster.router import Router
from phasewise.engine.engine import Engine
from phasewise.request.params import Params
from tests import oracle, tiny
from tests.laws.settings import discovered, guarantee, options

EVERY = discovered()
IDS = [f"{verb}.{name}" for verb, name in EVERY]
LENGTHS = (41, 7, 90, 1)
N = 14


def dense() -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(), tiny.prompts(*LENGTHS), tiny.greedy(N)))


def same_up_to_ties(got: list[int], want: list[int], prompt: list[int]) -> bool:
    """Equal, or parting at a position where the two best logits are closer than 1e-4."""
    if got == want:
        return True
    gaps = oracle.greedy(tiny.model(), prompt, len(want))[1]
    at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
    print(f"near tie at {at}: gap {gaps[at]:.2e}")
    return gaps[at] < 1e-4


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_declares_itself(verb: str, name: str) -> None:
    cls = catalog.method(verb, name)
    assert cls.__dataclass_params__.frozen
    assert cls.guarantee in ("exact", "distribution", "lossy")
    assert cls.needs in ("nothing", "calibration", "trained", "second model")
    assert isinstance(cls.paper, str)
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), "the docstring is the documentation"
    assert set(cls.neutral) <= set(catalog.knobs_of(cls)), "neutral names knobs that do not exist"
    for field in dataclasses.fields(cls):
        if field.name not in catalog.slots_of(cls):
            default = (field.default, field.default_factory)
            assert default != (dataclasses.MISSING, dataclasses.MISSING), f"knob {field.name} has no default"


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_neutral_equals_dense(verb: str, name: str) -> None:
    """Law 2."""
    neutral = catalog.method(verb, name).neutral
    requests = tiny.run(tiny.engine(options(verb, name, neutral)), tiny.prompts(*LENGTHS), tiny.greedy(N))
    for request, want in zip(requests, dense()):
        assert request.left is not None and request.left.how == "finished", request
        assert same_up_to_ties(request.out, want, request.prompt)


@pytest.mark.parametrize(("verb", "name"), [e for e in EVERY if guarantee(*e) != "lossy"],
                         ids=lambda v: str(v))  # fmt: skip
def test_exact_methods_give_greedys_tokens(verb: str, name: str) -> None:
    """Law 1, against full recomputation."""
    requests = tiny.run(tiny.engine(options(verb, name)), tiny.prompts(*LENGTHS), tiny.greedy(N))
    for request in requests:
        want = oracle.greedy(tiny.model(), request.prompt, N)[0]
        assert same_up_to_ties(request.out, want, request.prompt)


@pytest.mark.parametrize(("verb", "name"), [e for e in EVERY if guarantee(*e) == "lossy"],
                         ids=lambda v: str(v))  # fmt: skip
def test_lossy_methods_bite_where_they_are_tested(verb: str, name: str) -> None:
    """Otherwise the laws below would only test dense decoding. (Sixty tokens: quantisation alone changes few.)"""
    prompts = tiny.prompts(*LENGTHS)
    got = tiny.outs(tiny.run(tiny.engine(options(verb, name)), prompts, tiny.greedy(60)))
    assert got != tiny.outs(tiny.run(tiny.engine(), prompts, tiny.greedy(60)))


PARAMS = {
    "greedy": tiny.greedy(N),
    "sampled": Params(max_tokens=N, ignore_eos=True, temperature=0.8, top_p=0.95, seed=11),
}


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_independent_of_batch_mates(verb: str, name: str, how: str) -> None:
    """Law 4: alone or among others, in whole prompts or in chunks, a request's tokens are its own."""
    prompts, params = tiny.prompts(*LENGTHS), PARAMS[how]
    given = options(verb, name)
    alone = [tiny.outs(tiny.run(tiny.engine(given), [p], params))[0] for p in prompts]
    together = tiny.outs(tiny.run(tiny.engine(given), prompts, params))
    assert together == alone
    if verb != "schedule":
        chunked = tiny.outs(tiny.run(tiny.engine(given | {"schedule": "sarathi:budget=7"}), prompts, params))
        assert chunked == alone


def engines(placed: object) -> list[Engine]:
    """The engines a placement is made of."""
    if isinstance(placed, Engine):
        return [placed]
    if isinstance(placed, Router):
        return [
            handle.connection.worker.engine
            for handle in placed.handles
            if isinstance(handle.connection, InlineConnection)
        ]
    parts = [part for value in vars(placed).values() for part in (value if isinstance(value, list) else [value])]
    return [part for part in parts if isinstance(part, Engine)]


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_preemption_changes_nothing(verb: str, name: str) -> None:
    """Laws 4 and 13: freed and recomputed at any moment, a request goes on with the same tokens."""
    prompts, given = tiny.prompts(41, 50, 60), options(verb, name)
    given |= {"schedule": "sarathi:budget=40"} if verb != "schedule" else {}
    want = tiny.outs(tiny.run(tiny.engine(given), prompts, tiny.greedy(24)))
    preempted = 0
    for moment in (1, 2, 3, 5, 8, 13):
        placed = tiny.engine(given)
        requests = [tiny.Request(p, tiny.greedy(24)) for p in prompts]
        for request in requests:
            placed.add(request)
        for step in range(2 * moment):
            if step % moment == moment - 1:
                for engine in engines(placed):
                    for request in engine.running[1:]:
                        engine.room.preempt(request)
                        preempted += 1
            placed.step()
        tiny.finish(placed, requests)
        assert tiny.outs(requests) == want
    assert preempted >= 6


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_prefix_reuse_changes_nothing(verb: str, name: str) -> None:
    """Law 10: a prompt met before gives the same tokens from the cache."""
    prompts = tiny.prompts(100, 70)
    prompts.append(prompts[0][:80] + prompts[1][:30])
    given = options(verb, name)
    cold = [tiny.outs(tiny.run(tiny.engine(given, prefix_cache=False), [p], tiny.greedy(N)))[0] for p in prompts]
    placed = tiny.engine(given)
    for _ in range(2):
        for prompt, want in zip(prompts, cold):
            request = tiny.Request(prompt, tiny.greedy(N))
            placed.add(request)
            while request.left is None:
                placed.step()
            assert request.out == want
    assert placed.counters.prefix_hits > 0
    placed.forget_prefixes()
    assert placed.kv_bytes == 0


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_siblings_equal_requests_of_their_own(verb: str, name: str) -> None:
    """A forked sample (n > 1) draws what a separate request with its seed would draw."""
    prompt, params, given = tiny.prompts(50)[0], PARAMS["sampled"], options(verb, name)
    placed = tiny.engine(given)
    first = tiny.Request(prompt, params)
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    tiny.finish(placed, family)
    for request in family:
        assert request.out == tiny.outs(tiny.run(tiny.engine(given), [prompt], request.params))[0]


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_cancelled_at_any_moment_leaves_nothing(verb: str, name: str) -> None:
    """Law 13: memory goes back whenever a request is dropped, and its mates do not notice."""
    prompts, given = tiny.prompts(41, 70, 30), options(verb, name)
    want = tiny.outs(tiny.run(tiny.engine(given), prompts, tiny.greedy(N)))
    for moment in range(0, 12, 2):
        placed = tiny.engine(given | ({"schedule": "sarathi:budget=16"} if verb != "schedule" else {}))
        requests = [tiny.Request(p, tiny.greedy(N)) for p in prompts]
        for request in requests:
            placed.add(request)
        for _ in range(moment):
            placed.step()
        placed.cancel(requests[1])
        assert requests[1].left is not None
        tiny.finish(placed, requests)
        assert [r.out for r in (requests[0], requests[2])] == [want[0], want[2]]
