"""The laws for the parts of methods: every discovered part, inside every method that can hold it."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest

from phasewise import catalog
from phasewise.request.params import Params
from tests import tiny
from tests.laws import axes, scenario
from tests.laws.settings import options

Case = tuple[str, str, str, str]  # verb, method, field, part
CASES: list[Case] = [
    (verb, name, field, choice)
    for verb, name, cls in catalog.every()
    for field, part in catalog.parts_of(cls).items()
    if part.kind not in catalog.VERBS
    for choice in catalog.names(part.kind)
]
KINDS = [kind for verb in catalog.VERBS for kind in catalog.folders(verb)]
LENGTHS, N = (41, 7, 66, 1), 14


def setting(case: Case) -> dict[str, str]:
    """The options that put a part to work inside its host, at knobs at which it bites."""
    verb, name, field, choice = case
    kind = catalog.parts_of(catalog.method(verb, name))[field].kind
    tight = getattr(catalog.method(kind, choice), "tight", {})
    return options(verb, name, {field: choice, **{f"{field}.{knob}": value for knob, value in tight.items()}})


def tokens(given: dict[str, str], prompts: list[list[int]], params: Params) -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(given), prompts, params))


def test_every_kind_of_part_has_a_host() -> None:
    assert KINDS and {case[3] for case in CASES} == {name for kind in KINDS for name in catalog.names(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_declares_itself(kind: str) -> None:
    for name in catalog.names(kind):
        cls = catalog.method(kind, name)
        assert cls.__dataclass_params__.frozen
        assert isinstance(cls.paper, str)
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), "the docstring is the documentation"
        made = catalog.build(kind, name)
        for field in dataclasses.fields(cls):
            assert hasattr(made, field.name)
        assert catalog.build(kind, catalog.spell(kind, made)) == made and hash(made) == hash(cls())
        assert repr(made) == repr(cls()) and " at 0x" not in repr(made)
        assert set(getattr(cls, "tight", {})) <= set(catalog.knobs_of(cls))


def test_parts_differ_where_they_are_tested() -> None:
    """Otherwise the laws below would test one of them several times."""
    prompts = tiny.prompts(*LENGTHS)
    for a, b in combinations(CASES, 2):
        if a[:3] == b[:3]:
            assert tokens(setting(a), prompts, tiny.greedy(N)) != tokens(setting(b), prompts, tiny.greedy(N)), (a, b)


@pytest.mark.parametrize("case", CASES, ids=".".join)
def test_tokens_are_a_requests_own(case: Case) -> None:
    scenario.check(setting(case), axes.schedulers()[CASES.index(case) % len(axes.schedulers())])
