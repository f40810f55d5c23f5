"""The laws over every discovered method. A new method file is under them at once.

A method declares itself, is dense decoding at its neutral setting, and its requests' tokens are their own whatever
happens to them and beside them (`tests/laws/scenario.py`). Each method has one scheduler in the quick tier, in turn;
the others are thorough. That lossy methods bite where they are tested is seen from the golden record.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.options import parse
from tests import tiny
from tests.laws import axes, golden, scenario
from tests.laws.axes import Single
from tests.laws.compare import Reference, build, reference
from tests.laws.settings import discovered, guarantee, options, slow

EVERY = discovered()
IDS = [f"{verb}.{name}" for verb, name in EVERY]
N = 8


def named(case: Single) -> str:
    verb, name, schedule = case
    return f"{verb}.{name}" + ("" if verb == "schedule" else f" {schedule.partition(':')[0]}")


@cache
def dense() -> Reference:
    return reference({}, tiny.prompts(41, 7), tiny.greedy(N))


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_declares_itself(verb: str, name: str) -> None:
    cls = catalog.method(verb, name)
    assert cls.__dataclass_params__.frozen
    assert cls.guarantee in ("exact", "distribution", "lossy")
    assert cls.needs in ("nothing", "calibration", "trained", "second model")
    assert isinstance(cls.paper, str)
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), "the docstring is the documentation"
    for settings in ("neutral", "tight", "reference"):
        known = set(catalog.knobs_of(cls))
        assert set(getattr(cls, settings, {})) <= known, f"{settings} names knobs that do not exist"
    for field in dataclasses.fields(cls):
        if field.name not in catalog.slots_of(cls):
            default = (field.default, field.default_factory)
            assert default != (dataclasses.MISSING, dataclasses.MISSING), f"knob {field.name} has no default"


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_neutral_equals_dense(verb: str, name: str) -> None:
    """Law 2. Whatever may work in a process of its own works in this one: a test of its own has the process."""
    cls = catalog.method(verb, name)
    here = {"where": "inline"} if "where" in catalog.knobs_of(cls) else {}
    requests = tiny.run(tiny.engine(options(verb, name, here | cls.neutral)), dense().prompts, tiny.greedy(N))
    dense().check(tiny.outs(requests))


@axes.over(lambda full: axes.singles(), named)
def test_tokens_are_a_requests_own(case: Single) -> None:
    """Laws 1, 4, 10 and 13: nothing that happens changes a token, and exact methods give greedy decoding's."""
    holds(case)


@axes.over(lambda full: axes.singles(others=True), named, most=48)
def test_tokens_are_a_requests_own_under_other_schedulers(case: Single) -> None:
    holds(case)


@axes.over(lambda full: [name for name in golden.cases() if ":" in name], str, most=24)
def test_tokens_are_a_requests_own_in_what_a_method_holds(case: str) -> None:
    """Parts in their hosts, drafters in other drafters, decode methods after those for prompts."""
    try:
        build(golden.cases()[case])
    except UserError:
        pytest.skip("refused")
    scenario.check(golden.cases()[case], axes.schedulers()[len(case) % len(axes.schedulers())])


def holds(case: Single) -> None:
    verb, name, schedule = case
    trace = scenario.check(options(verb, name), schedule)
    if guarantee(verb, name) != "lossy":
        equals_its_reference(verb, name)
    shares = parse(dict(options(verb, name)))[verb].traits.shares_prefix
    hits = trace.prefix_hits or (shares and scenario.run(options(verb, name), schedule, ["prefix"]).prefix_hits)
    assert bool(hits) == shares, "prefixes are shared by those that say so, at least where prompts are computed whole"


def equals_its_reference(verb: str, name: str) -> None:
    """Law 1, against full recomputation, or the method's own slow reference if it names one."""
    twin = slow(verb, name)
    want = reference(twin, scenario.PROMPTS[:1], scenario.GREEDY) if twin else scenario.recomputed()
    want.check([scenario.alone(options(verb, name), scenario.mine(scenario.PROMPTS[0], scenario.GREEDY))])


def test_every_scheduler_is_met_and_by_every_method_in_the_end() -> None:
    schedulers, quick, others = set(axes.schedulers()), axes.singles(), axes.singles(others=True)
    assert [(verb, name) for verb, name, _ in quick] == EVERY
    assert {schedule for _, _, schedule in quick} == schedulers
    met = [case for case in (*quick, *others) if case[0] != "schedule"]
    assert len(set(met)) == len(met) == len(schedulers) * sum(verb != "schedule" for verb, _ in EVERY)


@pytest.mark.parametrize("most", [1, 3, 7, 20])
def test_samples_are_small_and_take_turns(most: int) -> None:
    samples = [axes.sampled(range(17), most, seed) for seed in range(100, 100 + -(-17 // most))]
    assert sorted(each for sample in samples for each in sample) == list(range(17))
    assert max(map(len, samples)) <= most


@pytest.mark.parametrize("each", [1, 2, 3])
def test_in_turn_all_of_the_others_are_met(each: int) -> None:
    others = "abcde"
    some, every = axes.turns(range(7), others, False, each), axes.turns(range(7), others, True, each)
    assert {other for _, other in some} == set(others) and len(set(some)) == len(some) == 7 * each
    assert set(every) == {(one, other) for one in range(7) for other in others} and len(every) == 35
