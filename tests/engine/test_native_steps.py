"""Which methods leave the native step, as docs/methods.md says: those that evict, skip, select, or split the depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import DEFAULTS
from phasewise.verbs.sample import Context, Dist
from tests import tiny
from tests.laws import settings as laws

VERBS = ("schedule", "attend", "evict", "store", "skip")


def native_steps(options: dict[str, str]) -> tuple[int, int]:
    """Steps that were one native call, and all steps, for one prompt in bfloat16."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    engine: Any = tiny.engine(options, of=model, prefix_cache=False)
    stack, calls = model.stack, []
    assert stack is not None

    def spy(*given: Any) -> None:
        calls.append(1)
        stack(*given)

    spy.windowed, spy.hidden = stack.windowed, stack.hidden  # type: ignore[attr-defined]
    some = model.stack_of

    def stack_of(walk: tuple[int, ...] | None) -> Any:
        if walk is not None:
            calls.append(1)
        return some(walk)

    model.stack, model.stack_of = spy, stack_of  # type: ignore[assignment, method-assign]
    tiny.run(engine, tiny.prompts(40), tiny.greedy(12))
    return len(calls), engine.counters.forwards


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize(("verb", "name"), [(v, n) for v, n in laws.discovered() if v in VERBS])
def test_savers_leave_the_native_step_and_no_one_else(verb: str, name: str) -> None:
    knobs = {"rows_per_group": 8} if name == "layered" else None
    calls, steps = native_steps(laws.options(verb, name, knobs))
    method = catalog.method(verb, name)
    acts = set(getattr(method, "phases", ("prefill", "decode")))
    leaves = (verb in ("evict", "skip") and name != DEFAULTS[verb]) or (
        verb == "attend" and not getattr(method, "everything", False)
    )
    engine: Any = tiny.engine(laws.options(verb, name, knobs))
    last = engine.parts.phases[-1]
    leaves = leaves and not (last.walk is not None and last.delta is None)  # which layers run is known beforehand
    if name == "layered":  # its prompt crosses in several steps, and then tokens are native again
        assert 0 < calls < steps
    elif not leaves:
        assert calls == steps > 0
    elif acts == {"decode"}:
        assert calls < steps / 2  # prompts only
    elif acts == {"prefill"}:
        assert calls == steps - 1  # all but the prompt's
    else:
        assert calls == 0


class Follows:
    """A `sample` that writes a given text, and keeps the logits."""

    guarantee, needs = "lossy", "nothing"

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.seen = text, list[Tensor]()

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        self.seen.append(logits.float().clone())
        return Dist([self.text[context.position] for context in contexts], logits.shape[-1])


def written(model: Model, verbs: dict[str, str | None], text: Sequence[int]) -> tuple[Tensor, int]:
    """Logits of 50 tokens of a text after a prompt of 100, and the bytes of KV that were read."""
    follows = Follows(text)
    engine = Bench(model).engine({"schedule": "prefill_first"} | verbs, Limits(prefix_cache=False), sample=follows)
    tiny.run(engine, [list(text[:100])], tiny.greedy(50))
    return torch.cat(follows.seen), engine.counters.kv_bytes_read


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize("store", ["slab", "int8"])
def test_rows_with_gaps_are_read_as_the_open_path_reads_them(store: str) -> None:
    """After an eviction, slots are no positions, and layers and heads hold other rows."""
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    stack = model.stack

    def logits(natively: bool, evict: str) -> tuple[Tensor, int]:
        model.stack = stack if natively else None
        return written(model, {"evict": evict, "store": store}, text)

    (whole, read), (opened, same), (dense, all_of_it) = (
        logits(natively, evict)
        for natively, evict in ((True, "snapkv:keep=8,window=4"), (False, "snapkv:keep=8,window=4"), (True, "none"))
    )
    assert read == same < all_of_it / 2
    assert (whole - opened).abs().mean() < 0.05 * (whole - dense).abs().mean(), "more than bfloat16's rounding"


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize("speedup", [1.5, 2.0])
def test_a_walk_known_beforehand_is_walked_as_the_open_path_does(speedup: float) -> None:
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    stack, skip = model.stack, f"unified:speedup={speedup},weights=none"
    whole, read = written(model, {"skip": skip}, text)
    assert model._walks, "it was no native step"
    dense, all_of_it = written(model, {}, text)
    model.stack = None
    opened, same = written(model, {"skip": skip}, text)
    assert stack is not None and read == same < all_of_it
    assert (whole - opened).abs().mean() < 0.05 * (whole - dense).abs().mean(), "more than bfloat16's rounding"
