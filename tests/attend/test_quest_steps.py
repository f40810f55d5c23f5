"""attend.quest in bfloat16: a step that chooses pages is one native call, and what it gives is what half steps give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.kv.pages import PageKeys
from phasewise.methods.attend.quest import Quest
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.skip.unified import Unified
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.step.choice import PageChoice
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
KNOBS = {"page": 4, "budget": 20, "dense_layers": 1}
PROMPT, TOKENS = 70, tiny.prompts(130)[0]
OTHER = tiny.prompts(40, seed=9)[0]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def bound(method: Any, model: Model) -> Any:
    return method.bind(Host(model, None, None, None, None))  # type: ignore[arg-type]


def started(model: Model, attend: Any = None, **methods: Any) -> Walk:
    one = Walk(model, TOKENS[:PROMPT], attend=attend or Quest(**KNOBS), **methods)
    one.feed(TOKENS[:PROMPT])
    return one


def halved(patch: pytest.MonkeyPatch) -> None:
    """Nobody's choice is made natively."""
    patch.setattr(PageChoice, "natively", lambda *_: None)


def kept(walk: Walk) -> list[Tensor]:
    """The bounds of every layer that has some."""
    every = [layer.derived.get(PageKeys.key("bounds", KNOBS["page"])) for layer in walk.kv.layers]
    return [keys.known for keys in every if isinstance(keys, PageKeys)]


METHODS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "plain": lambda model: {},
    "int8": lambda model: {"codec": Int8().codec()},
    "streaming that hides nothing yet": lambda model: {"evict": bound(Streaming(sinks=6, window=200), model)},
    "layers passed by": lambda model: {"skip": bound(Unified(weights="none"), model)},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_one_call_and_gives_what_halves_give(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with the same bounds beside the rows and the same counters."""
    made = passes(monkeypatch)
    whole = started(model, **METHODS[name](model))
    got = [whole.feed([token]) for token in TOKENS[PROMPT:]]
    assert len(made) == 61 and all(each.whole for each in made)
    with monkeypatch.context() as patch:
        halved(patch)
        halves = started(model, **METHODS[name](model))
        want = [halves.feed([token]) for token in TOKENS[PROMPT:]]
    assert not any(each.whole for each in made[62:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert whole.counters == halves.counters
    assert len(kept(whole)) and all(torch.equal(a, b) for a, b in zip(kept(whole), kept(halves), strict=True))
