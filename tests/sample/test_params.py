"""Parameters that are out of range, or no numbers at all, are refused by name and value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phasewise.errors import UserError
from phasewise.request.params import Params

WRONG = [
    ("max_tokens", 0), ("max_tokens", -3), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
    ("presence_penalty", 11.0), ("presence_penalty", math.nan), ("frequency_penalty", -10.5),
    ("frequency_penalty", math.inf),
    ("max_tokens", "64"), ("max_tokens", 64.0), ("max_tokens", None), ("temperature", "0.7"),
    ("temperature", [0.1, 0.7]), ("top_k", 2.5), ("top_p", None), ("seed", 0.5), ("seed", "lucky"),
    ("stop_tokens", 2), ("stop_tokens", "2"), ("stop_tokens", ["2"]), ("stop_tokens", None),
    ("logit_bias", None), ("logit_bias", [5]), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_no_value_of_this_parameter(name: str, value: Any) -> None:
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


def test_numbers_may_be_of_any_library_and_stop_tokens_any_collection() -> None:
    assert Params(max_tokens=np.int64(3), top_p=np.float32(0.5), temperature=1).max_tokens == 3
    assert Params(stop_tokens=[2, 7]).stop_tokens == (2, 7)


@pytest.mark.parametrize("params", [
    Params(repetition_penalty=1.1), Params(presence_penalty=0.1), Params(frequency_penalty=-0.1),
    Params(logit_bias={1: 1.0}),
])  # fmt: skip
def test_penalised(params: Params) -> None:
    assert params.penalised and not Params(temperature=0.5, top_p=0.5).penalised
