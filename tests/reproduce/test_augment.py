"""What the reproduction of cache augmentation examines besides counters: losses after latents of four kinds."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.systems import augment


def test_every_kind_is_judged_on_the_same_tokens() -> None:
    with Lab.open(Scale(quick=True, time=False)) as lab:
        found = augment.losses(lab, "random:0")
    assert list(found) == ["own", "none", "random", "another"]
    assert len({len(each) for each in found.values()}) == 1 and len(found["own"]) > 100
    assert len({sum(each) for each in found.values()}) == 4, "all differ"
    assert all(loss >= 0 for each in found.values() for loss in each)


@pytest.mark.parametrize("other", ["none", "random", "another"])
@pytest.mark.parametrize(("own", "passes"), [(1.0, True), (2.0, False), (3.0, False)])
def test_a_check_fails_where_own_latents_are_no_better(
    monkeypatch: pytest.MonkeyPatch, other: str, own: float, passes: bool
) -> None:
    """Of losses that differ from token to token."""
    noise = [0.1 * (i % 7) for i in range(100)]
    found: dict[str, Any] = {who: [2.0 + each for each in noise] for who in ("none", "random", "another")}
    found["own"] = [own + each for each in reversed(noise)]
    monkeypatch.setattr(augment, "losses", lambda lab: found)
    assert augment.lead(other)(None).passed is passes  # type: ignore[arg-type]
