"""Choices said as data: by the means of pages, from a method that exists in this test alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phasewise.kv.pages import PageKeys
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native import listed
from phasewise.ops.native.listed import Pages
from phasewise.step.choice import PageChoice
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed
from phasewise.step.span import Span
from tests import tiny
from tests.kv.harness import Walk, sliding
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
PROMPT, TOKENS = 70, tiny.prompts(130)[0]


CHOICE = PageChoice(page=5, most=23, dense_layers=2, by="means")


class Asked:
    """Single rows read the pages whose means score best; every layer has to ask."""

    choice: PageChoice | None = None

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self, self.choice)) if span.last >= CHOICE.most else EVERYTHING

    def __call__(self, reads: Sequence[Read]) -> list[Tensor | None]:
        return [None if read.layer < CHOICE.dense_layers else self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        part, size = read.part, CHOICE.page
        n, pages = part.size[1], part.n // size
        keys = PageKeys.none("means", size, part.keys(0, 0)).roomy(pages)
        keys.fill(part, pages)
        fit = (CHOICE.most - n + pages * size) // size
        [slots] = listed.choose([Pages(read.q, keys.known[0], None, size, fit, pages * size, n)])
        [out] = attend_listed([read], [slots])
        return out


class Says(Asked):
    """The same, said as data."""

    choice = CHOICE


def fed(model: Model, attend: Asked) -> list[Tensor]:
    walk = Walk(model, TOKENS[:PROMPT], attend=attend)
    walk.feed(TOKENS[:PROMPT])
    return [walk.feed([token]) for token in TOKENS[PROMPT:]]


def test_who_says_it_as_data_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), passes(monkeypatch)
    said, asked = fed(model, Says()), fed(model, Asked())
    assert all(torch.equal(a, b) for a, b in zip(said, asked, strict=True))
    assert [each.whole for each in made] == [True] * 62 + [False] * 60


def test_a_models_windows_that_hide_something_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hides nothing yet does not matter."""
    made = passes(monkeypatch)
    fed(Model.load(sliding(100, 3).files.path, dtype=torch.bfloat16), Says())
    assert [each.whole for each in made[1:]] == [position < 100 for position in range(PROMPT, 130)]
