"""Goodput on numbers: interpolation, what counts, when a sweep gives up, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

from phasewise.bench.goodput import FAR, GoodputPoint, Target, bisect, draw, goodput, sweep, table
from phasewise.bench.latency import ServedRequest
from phasewise.errors import UserError
from phasewise.request.params import SLO
from phasewise.request.trace import Trace


def served(ttft: float, tpot: float = 0.01, error: str | None = None) -> ServedRequest:
    trace = Trace(0.0)
    for i in range(3):
        trace.emitted(ttft + i * tpot, 1)
    return ServedRequest(trace, 10, error)


def test_goodput_lies_where_the_share_crosses_ninety_percent() -> None:
    assert goodput([(1, 1.0), (2, 1.0), (4, 0.8)]) == (3.0, False)
    assert goodput([(1, 0.95), (2, 0.85)]) == (pytest.approx(1.5), False)
    assert goodput([(1, 0.45)]) == (pytest.approx(1 / 5.5), False)  # on the line from "everybody at no load"
    assert goodput([(1, 0.9), (2, 0.9)]) == (2, True)
    assert goodput([(1, 1.0), (2, 0.0), (3, 1.0)]) == (pytest.approx(1.1), False)  # a later recovery does not count
    assert goodput([]) == (0.0, False)


def test_failures_are_missed_targets() -> None:
    slo = SLO(1.0, 0.1)
    many = [served(0.5)] * 6 + [served(2.0), served(0.5, 0.2), served(0.5, error="HTTP 503"), served(0.9)]
    point = GoodputPoint("a", 1.0, many)
    assert point.share(slo) == 0.7
    row = point.row([Target("t", slo)])
    assert (row["share_t"], row["failed"], row["requests"], row["ttft_p50_s"]) == (0.7, 1, 10, 0.5)


def test_a_sweep_stops_when_it_is_hopeless() -> None:
    tried: list[float] = []

    def measure(rate: float) -> Sequence[ServedRequest]:
        tried.append(rate)
        return [served(0.1 if i * rate < 10 else 5.0) for i in range(20)]

    targets = [Target("tight", SLO(0.2, 0.1)), Target("loose", SLO(1.0, 0.1))]
    points = list(sweep("a", [4, 1, 0.5, 8, 16], targets, measure))
    assert tried == [0.5, 1, 4] and [point.rate for point in points] == tried
    header, rows = table(points, targets)
    assert len(header) == 3 and rows[0][0] == "a"
    assert float(rows[0][1]) == pytest.approx(0.5 + 0.5 * 0.1 / 0.5)


class Machine:
    """Serves each target up to a rate of its own, and remembers what it was asked for."""

    def __init__(self, **most: float) -> None:
        self.most, self.tried = most, list[float]()

    def __call__(self, rate: float) -> Sequence[ServedRequest]:
        self.tried.append(rate)
        return [served(0.1 if rate <= self.most["tight"] else 0.5 if rate <= self.most["loose"] else 5.0)] * 20


@pytest.mark.parametrize("between", [(1.0, 4.0), (0.1, 0.2), (40.0, 80.0)])
@pytest.mark.parametrize("precision", [0.02, 0.1])
def test_bisection_pins_every_target_down(between: tuple[float, float], precision: float) -> None:
    """Wherever one begins; no rate is tried twice, and as many as halving takes."""
    targets, machine = [Target("tight", SLO(0.2, 0.1)), Target("loose", SLO(1.0, 0.1))], Machine(tight=1.7, loose=2.9)
    points = list(bisect("a", between, targets, machine, precision))
    assert len(set(machine.tried)) == len(machine.tried) == len(points) < 30
    for target, most in zip(targets, (1.7, 2.9)):
        shares = sorted((point.rate, point.share(target.slo)) for point in points)
        held, missed = max(r for r, s in shares if s >= 0.9), min(r for r, s in shares if s < 0.9)
        assert held <= most < missed <= (1 + precision) * held
        assert goodput(shares)[0] == pytest.approx(most, rel=precision)
    row = table(points[::-1], targets)[1][0]
    assert [float(cell) for cell in row[1:]] == pytest.approx([1.7, 2.9], rel=precision + 0.01)


def test_bisection_ends_where_nothing_or_everything_holds() -> None:
    targets, machine = [Target("tight", SLO(0.2, 0.1))], Machine(tight=0.0, loose=0.0)
    points = list(bisect("a", (1.0, 2.0), targets, machine, 0.1))
    assert min(machine.tried) == 1 / FAR and table(points, targets)[1] == [["a", "0.00"]]
    machine = Machine(tight=1e9, loose=1e9)
    points = list(bisect("a", (1.0, 2.0), targets, machine, 0.1))
    assert max(machine.tried) == 2.0 * FAR and table(points, targets)[1] == [["a", f"at least {2 * FAR:.2f}"]]


@pytest.mark.parametrize(
    "text", ["tight", "tight=5", "tight=a/b", "=5/6", "x=0/5", "x=5/-1", "x=nan/1", "x=//", "x=1/2/3/4", "x=inf/1"]
)
def test_bad_targets_are_named(text: str) -> None:
    with pytest.raises(UserError, match="is not a target"):
        Target.parse(text)


def test_targets_are_milliseconds() -> None:
    assert Target.parse("tight=500/60") == Target("tight", SLO(0.5, 0.06))
    assert str(Target.parse("tight=500/60")) == "tight (TTFT 500 ms, TPOT 60 ms)"
    assert Target.parse("smooth=500//120") == Target("smooth", SLO(0.5, None, 0.12))
    assert str(Target.parse("all=1/2/3")) == "all (TTFT 1 ms, TPOT 2 ms, P99 TBT 3 ms)"


def test_the_tail_of_a_stream_is_a_target_of_its_own() -> None:
    """One long gap among many leaves the mean where it was; of several tokens at once, all but one come after 0 s."""
    trace = Trace(0.0)
    for i in range(100):
        trace.emitted(0.1 + 0.01 * i + (0.5 if i >= 50 else 0.0), 1)
    stalled = ServedRequest(trace, 10)
    assert stalled.meets(SLO(0.2, 0.02)) and not stalled.meets(SLO(0.2, 0.02, 0.015))
    steps = [0.01] * 98 + [0.51]
    assert stalled.meets(SLO(tbt=float(numpy.quantile(steps, 0.99)) + 1e-9))
    assert not stalled.meets(SLO(tbt=float(numpy.quantile(steps, 0.99)) - 1e-3))
    trace.emitted(2.0, 200)
    assert sorted(trace.tbt) == pytest.approx(sorted([*steps, 2.0 - trace.tokens[-2], *[0.0] * 199]))
    assert ServedRequest(trace, 10).meets(SLO(tbt=0.02)), "two long gaps are less than a hundredth of 299"


@pytest.mark.thorough
def test_every_workload_and_target_has_its_image(tmp_path: Path) -> None:
    targets = [Target.parse("tight=500/60"), Target.parse("loose=900/90")]
    rows = []
    for workload in ("lognormal", "trace:path=a.csv"):
        for name in ("a", "b"):
            for rate in (1.0, 2.0):
                about = {"workload": workload, "targets": {t.name: str(t) for t in targets}}
                rows.append(GoodputPoint(name, rate, [served(0.3 * rate)]).row(targets) | about)
    draw(tmp_path / "new" / "plot.png", rows)
    written = sorted((tmp_path / "new").iterdir())
    assert [path.stem for path in written] == [
        f"plot-{kind}-{t}" for kind in ("lognormal", "trace") for t in ("loose", "tight")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
