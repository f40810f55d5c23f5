"""Heads that ship for pocket: passes are saved on text that nobody learned, and answers stay the model's own."""

from __future__ import annotations

from functools import cache

import pytest

from phasewise.engine.limits import Limits
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.draft.test_by_name import SHIPPED

GREEDY, DRAWN = Params(max_tokens=32, ignore_eos=True), Params(max_tokens=32, ignore_eos=True, temperature=1.0, seed=1)
LEAST = {"medusa": 1.15, "hydra": 1.15, "kangaroo": 1.2, "dflash": 1.2}  # tokens a pass; the others: 1.3
CHARACTERS = 400


@cache
def heldout() -> list[str]:
    """Beginnings of library files that neither the model nor its heads have learned."""
    return [text[:CHARACTERS] for _, text in sorted(sources(held_out=True).items())[:6]]


@cache
def said(draft: str, drawn: bool) -> tuple[list[list[int]], float]:
    """What is said after these texts, and tokens per pass of the model, one request at a time."""
    llm = LLM("pocket", dtype="float32", limits=Limits(kv_bytes=256 << 20, max_running=1), draft=draft)
    outs = [output.tokens for output in llm.generate(heldout(), DRAWN if drawn else GREEDY)]
    return outs, llm.engine.counters.emitted / llm.engine.counters.forwards


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", SHIPPED)
def test_heads_save_passes_on_text_that_they_have_not_learned(name: str, drawn: bool) -> None:
    """With `match`, drawn answers are those of plain decoding as well."""
    outs, pace = said(name, drawn)
    assert outs == said("none", drawn)[0]
    assert said("none", drawn)[1] <= 1 and pace > (1.05 if drawn else LEAST.get(name, 1.3))
