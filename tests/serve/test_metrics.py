"""What /metrics makes of a request that has left."""

from __future__ import annotations

import pytest

from phasewise.request.request import Departure, Request
from phasewise.request.trace import Trace
from phasewise.serve.loop import OutputStream, Snapshot
from phasewise.serve.notifier import Notifier
from phasewise.serve.watch.metrics import Metrics


def feed(**stamps: float) -> OutputStream:
    left = OutputStream(Request([3]), Notifier(), arrived=1.0)
    left.left, left.trace = Departure("finished", "length"), Trace(1.0, admitted=1.0, left=9.0, **stamps)
    return left


def test_the_time_of_a_hand_off_is_shown_and_that_of_none_is_not_zero() -> None:
    metrics = Metrics(1 << 20)
    metrics.left(feed())
    metrics.left(feed(sent=4.0))  # on its way to the end
    metrics.left(feed(sent=4.0, owned=3.0))  # arrived once, then set out again and was lost
    assert b"phasewise_handoff_seconds_count 0.0" in metrics.render(Snapshot())
    metrics.left(feed(sent=4.0, owned=4.5))
    text = metrics.render(Snapshot()).decode()
    assert "phasewise_handoff_seconds_count 1.0" in text and "phasewise_handoff_seconds_sum 0.5" in text


def test_a_hand_off_is_between_setting_out_and_arriving() -> None:
    assert Trace(0.0, sent=2.0, owned=2.25).handoff == pytest.approx(0.25)
    assert Trace(0.0).handoff is None and Trace(0.0, sent=2.0, owned=1.0).handoff is None
