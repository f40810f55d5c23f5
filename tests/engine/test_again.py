"""Rows computed once more (`Outcome.again`): over dense attention they change nothing but counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from phasewise.builder import Builder
from phasewise.engine.invariants import check
from phasewise.engine.limits import Limits
from phasewise.methods.decode.autoregressive import Autoregressive
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome
from phasewise.verbs.host import Host
from phasewise.verbs.place import Placed
from tests import tiny

PROMPTS, N, EVERY, BACK = tiny.prompts(41, 7, 90), 24, 5, 3


@dataclass(frozen=True)
class Twice(Autoregressive):
    """Whenever a token more makes a multiple of `every`, the last `back` rows are to come again."""

    every: int = EVERY
    back: int = BACK

    def bind(self, host: Host) -> Any:
        return _Twice(self, super().bind(host))


class _Twice(Decode):
    def __init__(self, knobs: Twice, inner: Any) -> None:
        self.knobs, self.inner = knobs, inner

    def rows(self, request: Request) -> int:
        return int(self.inner.rows(request))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans: list[Span] = self.inner.propose(requests, budgets, phase)
        return spans

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        outcomes: list[Outcome] = self.inner.accept(spans, hidden)
        for span, outcome in zip(spans, outcomes):
            decoded = span.request.computed + outcome.kept - span.request.prompt_len
            if outcome.tokens and decoded >= self.knobs.back and decoded % self.knobs.every == 0:
                outcome.again = self.knobs.back
        return outcomes


def engine(schedule: str = "sarathi", **verbs: str) -> Placed:
    methods = {**parse({"schedule": schedule, **verbs}), "decode": Twice()}
    return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20, prefix_cache=False), load=tiny.load).build()


@pytest.mark.parametrize("schedule", ["sarathi:budget=3", "layered"])
def test_rows_computed_again_change_no_token(schedule: str) -> None:
    placed = engine(schedule)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    times = (N - 1) // EVERY
    assert placed.counters.recomputed == len(PROMPTS) * times * BACK
    assert placed.counters.rows == sum(map(len, PROMPTS)) + len(PROMPTS) * (N - 1 + times * BACK)


def test_between_steps_all_is_in_order() -> None:
    placed = engine()
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    back = 0
    while any(request.left is None for request in requests):
        placed.step()
        check(placed)  # type: ignore[arg-type]
        back += any(request.known - request.computed > 1 for request in requests if request.n_out and not request.left)
    assert back > 0


def test_rows_of_the_prompt_stay() -> None:
    methods = {**parse({}), "decode": Twice(every=2, back=50)}

    class Eager(_Twice):
        def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
            outcomes: list[Outcome] = self.inner.accept(spans, hidden)
            for outcome in outcomes:
                outcome.again = 50
            return outcomes

    class Bad(Twice):
        def bind(self, host: Host) -> Any:
            return Eager(self, Autoregressive.bind(self, host))

    methods["decode"] = Bad()
    placed = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    (request,) = tiny.run(placed, [PROMPTS[0]], tiny.greedy(4))
    assert (
        request.left is not None and request.left.how == "failed" and "rows of the prompt stay" in request.left.reason
    )
