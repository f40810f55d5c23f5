"""Stored contexts over a simulated medium: it takes as long as it says, and smaller forms take less."""

from __future__ import annotations

from phasewise.reproduce import stored
from phasewise.reproduce.lab import Lab, Scale


def test_a_slow_medium_takes_as_long_as_its_bytes() -> None:
    with Lab.open(Scale(quick=True)) as lab:
        prompt = lab.asked("pocket").code(200)
        coded = f"cachegen:level=4,weights={stored.profiled(lab, 'pocket')}"
        found = stored.times(lab, "pocket", prompt, {"raw": "slab", "coded": coded}, 1e6)
    assert found["computed"][1] == 0 < found["coded"][1] < found["raw"][1] / 2
    assert all(seconds >= size / 1e6 for seconds, size in found.values())
