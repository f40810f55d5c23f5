"""Every method gives the tokens, counters and KV bytes that were recorded of it (`tests/laws/golden.py`)."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest

from phasewise import catalog
from tests import seeds
from tests.laws import golden

CASES = golden.cases()
TRACES = [
    pytest.param(name, dtype, marks=[] if now else [pytest.mark.thorough])
    for name, dtype, now in golden.traces(CASES, seeds.turn())
]
LOSSY = [f"{verb}.{name}" for verb, name, cls in catalog.every() if cls.guarantee == "lossy"]


@cache
def record() -> dict[str, Any]:
    return golden.read()


def test_all_cases_are_recorded_and_no_others() -> None:
    missing, stale = sorted(CASES.keys() - record().keys()), sorted(record().keys() - CASES.keys())
    assert not missing, f"run scripts/golden.py --add {' '.join(missing)}"
    assert not stale, f"run scripts/golden.py --drop {' '.join(stale)}"


@pytest.mark.parametrize(("name", "dtype"), TRACES)
def test_a_method_gives_what_it_gave(name: str, dtype: str) -> None:
    """In bfloat16 only with kernels of a recorded instruction set: others may round differently."""
    assert name in record(), f"run scripts/golden.py --add {name}"
    wrong, parted, why = golden.check(record()[name], CASES[name], dtype)
    for each in parted:
        warnings.warn(f"{name} in {dtype} parts from the record at a near tie: {each}", stacklevel=1)
    if why:
        pytest.skip(why)
    assert not wrong, "\n".join(wrong)


def test_in_three_days_the_quick_tier_compares_all_but_what_methods_hold_in_float32() -> None:
    names = [f"method{i}" for i in range(7)] + [f"method{i}:part=other" for i in range(8)]
    days = [[(name, dtype) for name, dtype, now in golden.traces(names, day, ()) if now] for day in (5, 6, 7)]
    every = {(name, dtype) for name in names for dtype in ("float32", "bfloat16")}
    assert set().union(*days) == {(name, dtype) for name, dtype in every if ":" not in name or dtype == "bfloat16"}
    for day in days:
        assert {name for name, dtype in day if dtype == "bfloat16"} >= set(names[:7]), "every method, every day"
        assert len(day) <= 7 + 3 + 3
    bare = [(name, dtype) for name, dtype, now in golden.traces(names, 5, names) if now]
    assert set(names[:7]) == {name for name, dtype in bare if dtype == "float32" and ":" not in name}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_methods_bite_where_they_are_tested(name: str) -> None:
    """Otherwise the laws would test plain decoding alone, or the verifier that keeps the distribution."""
    plain = "verify.rejection" if name.startswith("verify.") else "decode.autoregressive"
    assert record()[name]["float32"]["tokens"] != record()[plain]["float32"]["tokens"]


def test_differences_are_told() -> None:
    """Near ties excuse other tokens; nothing excuses other ends, counters or bytes under the same tokens."""
    want = {"tokens": {"a": [1, 2, 3]}, "left": {"a": "finished: length"}, "counters": {"rows": 3}, "kv_bytes": [1, 0]}
    assert golden.differences(want, want, {}) == ([], [])
    other = want | {"tokens": {"a": [1, 9, 9]}, "counters": {"rows": 4}}
    assert golden.differences(other, want, {"a": {"1": 1e-6}})[0] == []
    for ties in ({}, {"a": {"1": 1e-3}}, {"a": {"2": 1e-6}}):
        assert golden.differences(other, want, ties) == (["a: token 1: [1, 9, 9] instead of [1, 2, 3]"], [])
    for change in ({"counters": {"rows": 4}}, {"kv_bytes": [1, 1]}, {"left": {"a": "failed: no"}}, {"refused": True}):
        assert golden.differences(want | change, want, {"a": {"1": 1e-6}})[0]
