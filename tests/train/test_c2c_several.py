"""Fusers of decode.c2c that were trained apart: with two sharers, a model says what each of them knows."""

from __future__ import annotations

from pathlib import Path

from phasewise.reproduce.knowers import RECEIVER, SHARERS
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.systems import c2c


def by_knower(grades: list[float]) -> list[float]:
    """The share that is right of the facts of the receiver, of the first sharer and of the second."""
    n = len(grades) // 3
    return [sum(grades[i * n : (i + 1) * n]) / n for i in range(3)]


def test_with_two_sharers_a_model_says_what_each_of_them_knows(tmp_path: Path) -> None:
    """Served, in the models' own bfloat16. No fuser has met the other sharer."""
    lab = Lab(tmp_path, Scale(quick=True))
    both, alone = c2c.fused(lab), by_knower(c2c.said(lab, RECEIVER))
    found = {"both": by_knower(c2c.said(lab, RECEIVER, both)), "alone": alone}
    for name, one in zip(SHARERS, both.each):
        found[name] = by_knower(c2c.said(lab, RECEIVER, one))
    assert alone[0] > 0.9 and max(alone[1:]) < 0.4, found
    assert found[SHARERS[0]][1] > 0.9 > 0.4 > found[SHARERS[0]][2], found
    assert found[SHARERS[1]][2] > 0.9 > 0.4 > found[SHARERS[1]][1], found
    assert min(found["both"][1:]) > 0.7 and found["both"][0] > 0.9, found
    strangers = by_knower(c2c.said(lab, RECEIVER, c2c.Strangers(both)))
    assert max(strangers[1:]) < 0.4, strangers
