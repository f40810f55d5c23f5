"""attend.quest in bfloat16: a step that chooses pages is one native call, and what it gives is what half steps give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.kv.pages import PageKeys
from phasewise.methods.attend.quest import Quest
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.skip.unified import Unified
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.step import lower
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
KNOBS = {"page": 4, "budget": 20, "dense_layers": 1}
PROMPT, TOKENS = 70, tiny.prompts(100)[0]
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
    patch.setattr(lower, "_top_k", lambda *_: "a test asks by layer")


def kept(walk: Walk) -> list[Tensor]:
    """The bounds of every layer that has some."""
    every = [layer.derived.get(PageKeys.key("bounds", KNOBS["page"])) for layer in walk.kv.layers]
    return [keys.known for keys in every if isinstance(keys, PageKeys)]


METHODS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "plain": lambda model: {},
    "int8": lambda model: {"format": Int8().format()},
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
    assert len(made) == 31 and all(each.whole for each in made)
    with monkeypatch.context() as patch:
        halved(patch)
        halves = started(model, **METHODS[name](model))
        want = [halves.feed([token]) for token in TOKENS[PROMPT:]]
    assert not any(each.whole for each in made[32:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert whole.counters == halves.counters
    assert len(kept(whole)) and all(torch.equal(a, b) for a, b in zip(kept(whole), kept(halves), strict=True))


def test_several_rows_and_single_ones_take_turns(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and replays go in halves over the same bounds; whoever adds a page, the other knows it."""
    pieces = [1, 1, 5, 1, 1, 1, 3, 1, 9, 1, 1, 1, 1]

    def fed(walk: Walk) -> list[Tensor]:
        out, at = [], PROMPT
        for size in pieces:
            out.append(walk.feed(TOKENS[at : at + size]))
            at += size
        return out

    made, mixed = passes(monkeypatch), started(model)
    got = fed(mixed)
    assert [each.whole for each in made[1:]] == [size == 1 for size in pieces]
    with monkeypatch.context() as patch:
        halved(patch)
        halves = started(model)
        want = fed(halves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert mixed.counters == halves.counters
    assert all(torch.equal(a, b) for a, b in zip(kept(mixed), kept(halves), strict=True))


def test_forks_and_rollbacks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins write into bounds of their own; rows that were dropped leave none behind."""

    def grown() -> tuple[list[Tensor], list[Walk]]:
        one = started(model)
        out = [one.feed([token]) for token in TOKENS[PROMPT:90]]
        twin = one.fork()
        for mine, others in zip(TOKENS[90:120], OTHER[:30]):
            out += [one.feed([mine]), twin.feed([others])]
        with torch.inference_mode():
            one.kv.drop_last(85)
        del one.request.tokens[85:]
        one.request.computed = 85
        out += [one.feed([token]) for token in OTHER]
        return out, [one, twin]

    made = passes(monkeypatch)
    got, walks = grown()
    assert all(each.whole for each in made)
    with monkeypatch.context() as patch:
        halved(patch)
        want, others = grown()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for walk, other in zip(walks, others):
        assert len(kept(walk)) and all(torch.equal(a, b) for a, b in zip(kept(walk), kept(other), strict=True))
    ends = [keys[0, :, -1] for walk in walks for keys in kept(walk)[-1:]]
    assert not torch.equal(*ends)


def test_what_is_not_as_simple_is_asked_in_each_layer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with gaps, sinks and a window at work: in halves. A neutral budget is a plain step, with nothing kept."""
    for methods, whole in (
        ({"evict": bound(SnapKV(keep=0.5, window=5), model)}, False),
        ({"evict": bound(Streaming(sinks=6, window=43), model)}, False),
        ({"attend": Quest(page=4, budget=1 << 30, dense_layers=0)}, True),
    ):
        walk = started(model, **methods)
        made = passes(monkeypatch)
        for token in TOKENS[PROMPT:100]:
            walk.feed([token])
        assert len(made) == 30 and all(each.whole is whole for each in made)
        assert whole is not any(layer.derived for layer in walk.kv.layers)


def test_without_room_for_bounds_steps_go_in_halves(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made, logits = passes(monkeypatch), []
    for spent in (False, True):
        walk = started(model)
        walk.kv.reserve(64)
        if spent:
            walk.ledger.limit = walk.ledger.used
        before = len(made)
        logits.append(torch.cat([walk.feed([token]) for token in TOKENS[PROMPT:100]]))
        assert all(each.whole is not spent for each in made[before:])
        assert spent is not any(layer.derived for layer in walk.kv.layers)
    assert torch.equal(*logits)


# ---- in an engine
