"""Sarathi-Serve's capacity: what the attempt says of rates that are given to it, and of a short search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from phasewise.reproduce.lab import Lab
from phasewise.reproduce.systems import sarathi_serve
from phasewise.reproduce.systems.sarathi_serve import RELAXED, STRICT, capacities, carries

QUICK = cast(Lab, SimpleNamespace(scale=SimpleNamespace(quick=True, seed=0)))


@pytest.mark.parametrize(
    ("chats", "papers", "passed"),
    [((3.0, 1.0, 0.5), (1.1, 1.0, 1.0), True), ((3.0, 1.0, 0.5), (1.0, 0.9, 1.0), False),
     ((2.5, 1.0, 1.0), (1.1, 1.0, 1.0), False), ((3.0, 0.5, 2.0), (1.1, 1.0, 1.0), False),
     ((3.0, 0.0, 0.0), (1.1, 1.0, 1.0), True)],
)  # fmt: skip
def test_more_everywhere_and_many_times_as_much_somewhere(
    monkeypatch: pytest.MonkeyPatch, chats: tuple[float, ...], papers: tuple[float, ...], passed: bool
) -> None:
    monkeypatch.setattr(sarathi_serve, "capacities", lambda *a: {("chats", STRICT): chats, ("papers", RELAXED): papers})
    assert carries(QUICK).passed is passed


def test_chunks_carry_more_within_a_tight_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarathi_serve, "DATA", {"papers": "fixed:prompt=6000,new=60"})
    found: Any = capacities(60, 0)
    for own, first, beside in found.values():
        assert own > first > 0 and own > beside > 0
