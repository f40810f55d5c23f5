"""attend.zero_tuning in whole native steps: as the open path reads, which asks it in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.methods.attend.zero_tuning import Tuned
from phasewise.methods.evict.rlkv import RLKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.skip.unified import Unified
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from tests import tiny
from tests.attend.test_zero_tuning import LIFT, bound
from tests.engine.test_native_sights import far
from tests.kv.harness import Uneven, Walk, cuts, sliding
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
SMALL = tiny.checkpoint(hidden=64)
PROMPT, TOKENS = 200, tiny.prompts(290)[0]
TREE, PARENTS = [5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 3]
ON = {"attend": "zero_tuning:gamma=20,weights=none"}
WHOLE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "int8": lambda: {"format": Int8().format()},
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "no sinks": lambda: {"evict": bound(Streaming(sinks=0, window=43))},
    "fewer layers": lambda: {"skip": bound(Unified(speedup=2.0, weights="none"))},
}
KEPT = [[range(171, PROMPT), [0, *range(172, PROMPT)]]] * 4  # as many, but one head has given position 0 up


class Left(Uneven):
    """Rows are given up once the prompt is there; nobody looks at tokens."""

    def looks(self, span: Any) -> bool:
        return bool(span.request.prefilling)


def models() -> tuple[Model, Model]:
    return Model.load(SMALL, dtype=torch.bfloat16), Model.load(SMALL, dtype=torch.float32)


def fed(model: Model, lift: Tensor | None, methods: dict[str, Any], natively: bool = True) -> tuple[Tensor, Walk]:
    """Logits of a prompt in slices, several rows at once, tokens, a tree."""
    stack = model.stack
    model.stack = stack if natively else None
    try:
        one = Walk(model, TOKENS[:PROMPT], attend=None if lift is None else Tuned(lift), **methods)
        one.plain = one.phase
        found = [one.feed(piece) for piece in cuts(TOKENS[:PROMPT], [130, 70])]
        found += [one.feed(piece) for piece in cuts(TOKENS[PROMPT:], [1, 1, 7])]
        found.append(one.try_(TREE, PARENTS))
    finally:
        model.stack = stack
    return torch.cat(found).float(), one


def near(model: Model, exact_model: Model, methods: Callable[[], dict[str, Any]]) -> list[Tensor]:
    """Natively, openly, exactly and without the method; the first is as near to the third as the second."""
    ours, opened = (fed(model, LIFT, methods(), natively)[0] for natively in (True, False))
    exact, dense = (fed(exact_model, lift, methods(), False)[0] for lift in (LIFT, None))
    assert far(ours, exact) < 1.25 * far(opened, exact) < 0.7 * far(dense, exact)
    return [ours, opened, exact, dense]


@pytest.mark.parametrize("case", WHOLE)
def test_whole_steps_read_as_the_open_path_reads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of prompts, rows, tokens and trees are native calls that nobody is asked in."""
    made = passes(monkeypatch)
    near(*models(), WHOLE[case])
    assert len(made) == 2 + 30 + 1 and all(each.whole for each in made)


def test_windows_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not see position 0 any more are left alone; trees are deeper than no window."""
    made = passes(monkeypatch)
    near(sliding(110, 4, torch.bfloat16, 64), sliding(110, 4, torch.float32, 64), dict)
    assert len(made) == 33 and all(each.whole for each in made)


def test_heads_that_gave_position_0_up_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are whole, and what a head has in its first slot is not scaled."""
    made = passes(monkeypatch)
    ours, _, exact, _ = (rows[PROMPT:] for rows in near(*models(), lambda: {"evict": Left(KEPT)}))
    assert len(made) == 33 and all(each.whole for each in made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phasewise.step.lower._bias_table", lambda bias, flat, walk: bias)
        wrong = fed(models()[0], LIFT, {"evict": Left(KEPT)})[0][PROMPT:]
    assert far(wrong, exact) > 1.5 * far(ours, exact), "it would matter"


@pytest.mark.parametrize(
    "evict",
    [lambda: Left([[range(0, PROMPT, 2), range(35, PROMPT)]] * 4),
     lambda: bound(RLKV(share=0.6, sinks=3, window=25, weights="random:1"))],
    ids=["unequal", "some heads"],
)  # fmt: skip
def test_where_it_cannot_be_told_by_slots_it_is_asked(
    evict: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(monkeypatch)
    near(*models(), lambda: {"evict": evict()})
    assert not any(each.whole for each in made[2:])
