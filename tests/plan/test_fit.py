"""Latency models find the coefficients that made their samples, and say what they cannot tell."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.plan.cost import StepWork
from phasewise.plan.fit import PATHS, TERMS, Fitted, FittedLine, Path, Timed, errors, fit, path_of, term

OPT_13B = {  # DistServe's simulator on an A100, seconds; its t2 is 2 * pairs - rows
    "prefill": {"base": 18.10e-3, "prefill_rows": (0.10191 - 7.12e-6) * 1e-3, "pairs": 2 * 7.12e-9},
    "decode": {"base": 19.93e-3, "decode_rows": 0.0385e-3, "context": 6.27e-7},
}


def some(path: Path, n: int = 60, seed: int = 0, end: bool = False) -> list[StepWork]:
    """Steps of chance; prompts of every other one are done if they may `end`."""
    rng = Random(seed)
    steps = []
    for i in range(n):
        p = 0 if path == "decode" else rng.randint(1, 600)
        b = 0 if path == "prefill" else rng.randint(1, 64)
        before = rng.randint(0, 2000)
        steps.append(
            StepWork(p, before * p + p * (p + 1) / 2, before + p if p else 0, b, b * rng.randint(10, 2000), b + 1)
        )
        steps[-1].ended = before + p if end and p and i % 2 else 0
    return steps


def times(line: FittedLine, steps: list[StepWork], noise: float = 0.0) -> list[Timed]:
    rng = Random(1)
    return [Timed(step, line(step) * (1 + noise * rng.uniform(-1, 1))) for step in steps]


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_distserves_coefficients_come_back(path: Path) -> None:
    true = FittedLine(OPT_13B[path], 0.0)
    found = fit(times(true, some(path)), path)
    assert found.weights == pytest.approx(true.weights)
    assert max(errors(found, times(true, some(path, seed=5)))) < 1e-9


@given(st.tuples(*[st.floats(1e-6, 1e-2) for _ in range(6)]))
def test_any_mixed_line_comes_back(weights: tuple[float, ...]) -> None:
    true = FittedLine(dict(zip(TERMS["mixed"], weights)), 0.0)
    found = fit(times(true, some("mixed", end=True)), "mixed")
    assert max(errors(found, times(true, some("mixed", seed=2, end=True)))) < 1e-4


def test_noise_is_averaged_and_not_followed() -> None:
    true = FittedLine(OPT_13B["decode"], 0.0)
    found = fit(times(true, some("decode", 400), noise=0.1), "decode")
    assert max(errors(found, times(true, some("decode", seed=3)))) < 0.05


def test_a_price_that_changes_with_the_rows_is_found() -> None:
    """As of kernels for few rows and for many: two regimes of decode, as the paper fits them."""
    true = FittedLine({"base": 1e-3, "decode_rows": 1e-3, "rows>16": -0.9e-3, "context": 1e-7}, 0.0)
    found = fit(times(true, some("decode", 200)), "decode")
    assert "rows>16" in found.weights
    assert max(errors(found, times(true, some("decode", 200, seed=4)))) < 0.02


def test_nothing_makes_a_step_faster() -> None:
    """A fit would follow noise below zero, and then say that long contexts are free."""
    steps = some("decode", 30)
    falling = [Timed(step, 1.0 - 1e-6 * step.context) for step in steps]
    found = fit(falling, "decode")
    assert all(weight >= 0 for name, weight in found.weights.items() if ">" not in name)


def test_predictions_stay_above_nothing() -> None:
    line = FittedLine({"base": -5.0, "decode_rows": 0.1}, least=1e-3)
    assert line(StepWork(decode_rows=1)) == 1e-3


def test_steps_go_the_path_they_are_of() -> None:
    lines = {path: FittedLine({"base": float(i + 1)}, 0.0) for i, path in enumerate(PATHS)}
    one, two, both = StepWork(prefill_rows=3), StepWork(decode_rows=2), StepWork(prefill_rows=3, decode_rows=2)
    assert [path_of(step) for step in (one, two, both)] == ["prefill", "decode", "mixed"]
    assert [Fitted(lines).seconds(step) for step in (one, two, both)] == [1.0, 2.0, 3.0]
    assert Fitted({path: lines[path] for path in ("prefill", "decode")}).seconds(both) == 3.0  # one after the other
    assert Fitted({"mixed": lines["mixed"]}).price(one).seconds == 3.0
    assert Fitted(lines).seconds(StepWork(prefill_rows=3, share=0.25)) == 0.25


def test_what_cannot_be_fitted_is_said() -> None:
    with pytest.raises(UserError, match="2 decode steps were measured, and a latency model needs 3"):
        fit([Timed(StepWork(decode_rows=1), 1.0)] * 2, "decode")
    with pytest.raises(UserError, match="needs steps of all kinds"):
        Fitted({"decode": FittedLine({"base": 1.0}, 0.0)})
    with pytest.raises(UserError, match="unknown term 'rwos'"):
        term("rwos", StepWork())
