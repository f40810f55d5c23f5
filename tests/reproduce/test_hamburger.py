"""What the reproduction of HAMburger looks at can fail, and its control differs in how groups are read alone."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.decode.hamburger import Hamburger
from phasewise.options import parse
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting
from phasewise.reproduce.systems import hamburger
from tests import tiny


def test_the_control_reads_groups_untrained() -> None:
    """It has the modules that write groups; what reads them, and the low-rank weights, change nothing."""
    (prompt,) = tiny.prompts(20)

    def decoder(method: Any) -> Any:
        methods = {**parse({}), "decode": method}
        return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()

    mine = Hamburger(confidence=0.45, weights="random:0")
    ours, theirs = decoder(mine), decoder(hamburger.Unread(mine))
    a, b = (each.parts.phases[-1].decode.modules for each in (ours, theirs))
    assert (b.embedder.out.weight == 0).all() and (a.embedder.out.weight != 0).any()
    assert all((x == y).all() for x, y in zip(a.micro.parameters(), b.micro.parameters()))
    (one,), (other,), (alone,) = (
        tiny.outs(tiny.run(placed, [prompt], tiny.greedy(12)))
        for placed in (ours, theirs, tiny.engine({"decode": "hamburger:most=1"}))
    )
    assert one != other
    assert other[0] == alone[0], "a prompt is read as by the model alone"


@pytest.mark.parametrize("confidence", [1.0, 0.3])
def test_counting_by_groups_is_told_from_counting_by_tokens(monkeypatch: pytest.MonkeyPatch, confidence: float) -> None:
    """With groups of one, rows are as many as tokens, and the check fails."""
    monkeypatch.setattr(hamburger, "ON", Setting({"decode": f"hamburger:confidence={confidence}"}))
    with Lab.open(Scale(quick=True, time=False)) as lab:
        assert hamburger.not_tokens(lab).passed is (confidence < 1)


def test_tokens_at_a_confidence_of_one_are_plain_decodings_and_that_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab.open(Scale(quick=True, time=False)) as lab:
        assert hamburger.plain(lab).passed
        monkeypatch.setattr(hamburger, "SINGLE", Setting())
        assert not hamburger.plain(lab).passed, "the model's own weights say other tokens"
