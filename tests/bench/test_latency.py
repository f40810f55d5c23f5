from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.bench.latency import ServedRequest, percentile, summary
from phasewise.request.params import SLO
from phasewise.request.trace import Trace


def served(
    arrived: float, stamps: list[float], counts: list[int] | None = None, error: str | None = None
) -> ServedRequest:
    trace = Trace(arrived)
    for at, n in zip(stamps, counts or [1] * len(stamps)):
        trace.emitted(at, n)
    return ServedRequest(trace, 10, error)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_are_numpy_s(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q * 100)), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_nothing() -> None:
    assert percentile([], 0.5) is None


def test_the_summary_is_the_definitions() -> None:
    one = served(1.0, [1.5, 1.7, 2.1])  # TTFT 0.5, gaps 0.2 and 0.4, TPOT 0.3
    two = served(2.0, [2.1, 2.5], [1, 3])  # TTFT 0.1, one gap of 0.4 that held three tokens: TPOT 0.4 / 3
    numbers = summary([one, two], 2.0)
    assert numbers["requests"] == 2 and numbers["failed"] == 0
    assert numbers["output_tokens"] == 7 and numbers["prompt_tokens"] == 20
    assert numbers["output_tokens_per_s"] == pytest.approx(3.5)
    assert numbers["total_tokens_per_s"] == pytest.approx(13.5)
    assert numbers["ttft_p50_s"] == pytest.approx(0.3)
    assert numbers["tpot_p50_s"] == pytest.approx((0.3 + 0.4 / 3) / 2)
    assert numbers["itl_p50_s"] == pytest.approx(0.4)
    assert "goodput_per_s" not in numbers


def test_a_single_token_has_no_tpot() -> None:
    numbers = summary([served(0.0, [0.25])], 1.0)
    assert numbers["tpot_p50_s"] is None and numbers["ttft_p50_s"] == 0.25


def test_failures_count_nowhere_but_as_failures() -> None:
    numbers = summary([served(0.0, [1.0, 2.0]), served(0.0, [9.0], error="lost")], 2.0)
    assert numbers["failed"] == 1 and numbers["output_tokens"] == 2 and numbers["ttft_p99_s"] == 1.0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(ttft=0.5), 2),
        (SLO(ttft=0.49), 1),
        (SLO(tpot=0.31), 2),
        (SLO(tpot=0.2), 1),
        (SLO(ttft=0.5, tpot=0.01), 0),
        (SLO(tbt=0.31), 2),
        (SLO(tbt=0.2), 1),
        (SLO(tbt=0.01), 0),
    ],
)
def test_goodput_counts_requests_within_both_targets(slo: SLO, met: int) -> None:
    requests = [served(1.0, [1.5, 1.8]), served(1.0, [1.2, 1.3]), served(1.0, [1.01, 1.02], error="lost")]
    numbers = summary(requests, 4.0, slo)
    assert numbers["goodput_per_s"] == pytest.approx(met / 4)
    assert numbers["good_share"] == pytest.approx(met / 3)
