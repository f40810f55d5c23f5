"""DistServe's search: what the attempt says of placements that are given to it, and of a short search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from phasewise.plan.layout import Layout
from phasewise.plan.search import Choice, Tried
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.systems import distserve

QUICK = cast(Lab, SimpleNamespace(scale=SimpleNamespace(quick=True, seed=0)))


@pytest.mark.parametrize(("apart", "together", "passed"), [(2.0, 1.0, True), (1.9, 1.0, False), (0.1, 0.0, True)])
def test_twice_as_much_per_device(monkeypatch: pytest.MonkeyPatch, apart: float, together: float, passed: bool) -> None:
    choice = Choice("disaggregated", "prefill_first", roles=(Layout("prefill", 2, 1), Layout("decode", 1, 1)))
    found = Tried(choice, 3, 3 * apart, apart), Tried(Choice("colocated", "prefill_first"), 1, together, together)
    monkeypatch.setattr(distserve, "placements", lambda *given: found)
    outcome = distserve.carries(QUICK)
    assert outcome.passed is passed and "prefill on 2x1, decode on 1x1" in outcome.measured


def test_the_search_runs_over_degrees_per_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distserve, "PAIRS", distserve.PAIRS[:1])
    monkeypatch.setattr(distserve, "CHATS", "fixed:prompt=500,new=20")
    apart, together = distserve.placements(60, 0)
    assert {one.role for one in apart.choice.roles} == {"prefill", "decode"} and apart.worth > 0
    assert together.choice.place == "colocated" and together.worth > 0
