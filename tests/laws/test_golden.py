"""Every method gives the tokens, counters and KV bytes that were recorded of it (`tests/laws/golden.py`)."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest

from phasewise import catalog
from tests.laws import golden

CASES = golden.cases()
# Parts, and wrappers over what they hold, are thorough in float32: in bfloat16 they cost a quarter.
TRACES = [
    pytest.param(name, dtype, marks=[pytest.mark.thorough] * (":" in name and dtype == "float32"))
    for name in CASES for dtype in ("float32", "bfloat16")
]  # fmt: skip
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
