"""Which methods leave the native step, as docs/methods.md says: those that evict, skip, select, or split the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import DEFAULTS
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
    model.stack = spy  # type: ignore[assignment]
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
