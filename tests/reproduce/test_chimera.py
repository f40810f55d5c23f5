"""Chimera's rivals learn as it did and are as large; controls differ in what they are said to."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.chimera import Chimera
from phasewise.methods.verify.match import Match
from phasewise.options import parse
from phasewise.reproduce.controls import Control
from phasewise.reproduce.systems.chimera import WithoutTrigram
from phasewise.reproduce.trigram_heads import LEARNED, RIVALS, job
from phasewise.request.counters import Counters
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.train.heads.target import FrozenTarget
from tests import tiny
from tests.draft import trained
from tests.draft.fitted import PROMPTS, N


def answered(method: Control | Chimera) -> Counters:
    """The work of a drafter, whose answers are those of plain decoding."""
    methods = parse({"schedule": "prefill_first"}) | {"decode": Speculative(method, Match())}
    placed = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    return placed.counters


def test_rivals_are_as_large_and_learn_by_the_job_of_the_shipped_heads() -> None:
    target = FrozenTarget("pocket")
    ours, _ = feature_heads(target.model, ("chimera",), "auto")
    size = sum(each.numel() for each in ours.parameters())
    for kind in RIVALS.values():
        rival = sum(each.numel() for each in kind.build(target, 4).parameters())
        assert size <= rival <= 1.003 * size
    stored = folder.read_config(folder.locate(target.model, ("chimera",), "auto"))
    assert stored[folder.OWN]["command"] == job("chimera", Path(), LEARNED).command


@pytest.mark.parametrize("depth", [1, 4])
def test_without_trigrams_guesses_are_right_less_often(depth: int) -> None:
    method = Chimera(str(trained.CHIMERA.heads()), depth=depth, width=1)
    whole, blind = answered(method), answered(WithoutTrigram(method))
    assert blind.accepted < 0.9 * whole.accepted and blind.forwards > whole.forwards
