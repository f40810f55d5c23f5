"""Parameters out of range are refused by name, value and range."""

from __future__ import annotations

import math

import pytest

from phasewise.errors import UserError
from phasewise.request.params import Params

WRONG = [
    ("max_tokens", 0), ("max_tokens", -3), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
    ("presence_penalty", 11.0), ("presence_penalty", math.nan), ("frequency_penalty", -10.5),
    ("frequency_penalty", math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_out_of_range(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name) as caught:
        Params(**{name: value})
    assert repr(value) in str(caught.value), "the message shows the value"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5])
def test_a_bias_must_be_finite_and_in_range(value: float) -> None:
    with pytest.raises(UserError, match="logit_bias"):
        Params(logit_bias={3: value})


def test_the_ends_of_the_ranges_are_allowed() -> None:
    Params(max_tokens=1, temperature=100.0, top_k=0, top_p=1.0, min_p=1.0, repetition_penalty=1e-3)
    assert Params(temperature=0.0).greedy and not Params(temperature=1e-3).greedy


@pytest.mark.parametrize("params", [
    Params(repetition_penalty=1.1), Params(presence_penalty=0.1), Params(frequency_penalty=-0.1),
    Params(logit_bias={1: 1.0}),
])  # fmt: skip
def test_penalised(params: Params) -> None:
    assert params.penalised and not Params(temperature=0.5, top_p=0.5).penalised
