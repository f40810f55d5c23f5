"""What a decode method gives besides tokens is used or refused, never left out in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from tests import tiny, uncached
from tests.watched import passes

here = pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")


@pytest.fixture
def model() -> Model:
    """In the type of the native step."""
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


@torch.inference_mode()
def rows(model: Model, tokens: Sequence[int], hidden: Tensor | None = None) -> Tensor:
    """A prompt's rows after all layers."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(64 << 20), counters=Counters())
    request = Request(tokens)
    kv = store.open(request, len(tokens))
    span = Span(request, kv, uncached.PLAIN, tokens, range(len(tokens)), hidden=hidden)
    return forward(model, [span], Counters()).x.clone()


@here
def test_rows_that_bring_their_state_do_not_run_from_their_tokens(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(monkeypatch)
    written, meant = tiny.prompts(9, 9)
    with torch.inference_mode():
        state = model.embed(torch.tensor(meant))
    given, want = rows(model, written, state), rows(model, meant)
    assert torch.equal(given, want) and not torch.equal(given, rows(model, written))
    assert [each.whole for each in made] == [True] * 3


class Gives:
    """A decode method whose spans get something besides their tokens."""

    def __init__(self, inner: Any, give: Callable[[Span], None]) -> None:
        self._inner, self._give = inner, give

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans: list[Span] = self._inner.propose(requests, budgets, phase)
        for span in spans:
            self._give(span)
        return spans


def run(model: Model, give: Callable[[Span], None], schedule: str = "sarathi") -> Request:
    engine = tiny.engine({"schedule": schedule}, of=model, prefix_cache=False)
    for phase in engine.parts.recipes[""].phases:  # type: ignore[attr-defined]
        object.__setattr__(phase, "decode", Gives(phase.decode, give))
    [request] = tiny.run(engine, tiny.prompts(9), tiny.greedy(6))
    return request


def embedded(model: Model) -> Callable[[Span], None]:
    """Every row's state is that of the token 5."""

    def give(span: Span) -> None:
        span.hidden = model.embed(torch.full((span.rows,), 5))

    return give


def fives(span: Span) -> None:
    """Every row is of the token 5."""
    span.tokens = [5] * span.rows


@here
def test_an_engine_goes_on_from_given_states(model: Model) -> None:
    request = run(model, embedded(model))
    assert request.n_out == 6 and run(model, lambda span: None).out != request.out
    want = run(model, fives)
    assert request.out == want.out


def partly(span: Span) -> None:
    span.layers = (0, 2)


def test_a_depth_that_a_method_sets_is_refused(model: Model) -> None:
    request = run(model, partly)
    assert request.left is not None and request.left.how == "failed" and "which layers run" in request.left.reason


def test_given_states_are_refused_where_the_schedule_splits_the_depth(model: Model) -> None:
    request = run(model, embedded(model), "layered:rows_per_group=4")
    assert request.left is not None and request.left.how == "failed" and "which layers run" in request.left.reason
