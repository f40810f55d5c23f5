"""Reasoning before an answer that follows a grammar: where it is told to be, and that an end token ends it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.sample import grammar
from phasewise.methods.sample._reasoning import AFTER, BEFORE, INSIDE, ReasoningTags
from phasewise.methods.sample._words import Words
from phasewise.serve.tools.final import around
from phasewise.serve.tools.reasoning import TAGS
from phasewise.serve.tools.spelling import Spelling
from phasewise.verbs.sample import Context
from tests import tiny
from tests.sample.structured import asking, engine, prompts, text
from tests.sample.vocabularies import END, byte_level

pytest.importorskip("llguidance")
PIECES = [b"<", b"think", b">", b"</", b"</think", b"</think>", b"a", b"\n", b">\n{", b"/", b"t"]
ASKED = {"open": "<think>", "close": "</think>"}


def words(pieces: Sequence[bytes] = PIECES) -> Words:
    return Words(byte_level(pieces), 3 + len(pieces), [END])


@given(st.lists(st.sampled_from(range(len(PIECES))), max_size=12), st.booleans(), st.data())
def test_where_a_text_is(ids: list[int], opened: bool, data: st.DataObject) -> None:
    """The same however its tokens come; told from the whole text."""
    tags = ReasoningTags({**ASKED, "opened": opened}, words())
    whole = b"".join(PIECES[i] for i in ids)
    inner = whole if opened else whole.lstrip().removeprefix(b"<think>")
    if not opened and not whole.lstrip().startswith(b"<think>"):
        phase = BEFORE if b"<think>".startswith(whole.lstrip()) else AFTER
    else:
        phase = AFTER if b"</think>" in inner else INSIDE
    at = data.draw(st.integers(0, len(ids)))
    tokens = [3 + i for i in ids]
    found = tags.read(tags.read(tags.start, tokens[:at]), tokens[at:])
    assert found.phase == phase
    closing = tags.closing(found)
    assert (closing is None) == (phase != INSIDE)
    for _ in range(9):  # the way out is the rest of the tag, however much of it has been said
        if closing is None:
            break
        found = tags.read(found, [closing])
        inner += PIECES[closing - 3]
        closing = tags.closing(found)
    assert found.phase != INSIDE and (phase != INSIDE or inner.endswith(b"</think>"))


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("draft", ["", "prompt_lookup:k=4,min_match=1"])
def test_a_model_that_would_end_within_reasoning_answers(
    opened: bool, how: dict[str, Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants nothing but to end, from its first token on."""
    real = grammar._Grammar._exclude

    def ending(self: Any, logits: Tensor, contexts: Sequence[Context]) -> None:
        logits.copy_(torch.zeros_like(logits))
        logits[:, END] = 30.0
        real(self, logits, contexts)

    monkeypatch.setattr(grammar._Grammar, "_exclude", ending)
    asked = around(TAGS["think"], opened, True, None, Spelling({}))
    if not opened:
        asked["around"]["start"] = asked["around"]["start"].replace(")? body", ") body")  # it reasons, for certain
    placed = engine({"draft": draft} if draft else {})
    (request,) = tiny.run(placed, prompts(12), asking(ask={"choice": ["yes"], **asked}, **how))
    assert request.left is not None and request.left.reason == "stop"
    said = text(request)
    assert said.endswith("yes") and "</think>" in said and len(said) < 40, said
    assert said.strip().startswith("</think>" if opened else "<think></think>")


def test_without_reasoning_nothing_is_shifted() -> None:
    tags = ReasoningTags({**ASKED, "opened": False}, words())
    assert tags.closing(tags.read(tags.start, [3 + PIECES.index(b"a")])) is None
