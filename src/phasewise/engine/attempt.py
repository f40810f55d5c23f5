"""From spans to outcomes: one forward, then the verdict of each decode method. Nothing is committed here.

A try that raises is undone and repeated on ever smaller groups, so that only the culprit fails (DESIGN law 13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from phasewise.engine.finite import FiniteCheck
from phasewise.engine.scores import score
from phasewise.errors import NotFinite
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.fused import Scratch
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Settled:
    """A span that reached the last layer: what became of it, and of the siblings that may fork from it."""

    span: Span
    outcome: Outcome
    forks: list[tuple[Request, Outcome]]


def isolate(
    call: Callable[[list[T]], Sequence[R]], items: list[T], undo: Callable[[T], None] | None = None
) -> list[R | Exception]:
    """One result per item of `call(items)`. If it raises, every item is undone and the halves are tried by themselves,
    so that in the end only the culprits' results are exceptions."""
    try:
        results = list(call(items))
        assert len(results) == len(items), f"{len(results)} results for {len(items)} items"
        return results  # type: ignore[return-value]
    except Exception as error:
        for item in items if undo else ():
            undo(item)  # type: ignore[misc]
        if len(items) == 1:
            return [error]
        half = len(items) // 2
        return isolate(call, items[:half], undo) + isolate(call, items[half:], undo)


def restart(span: Span) -> None:
    """Forget a step's uncommitted rows. A slice that was under way starts again, and then runs its whole depth."""
    span.kv.commit(0)
    if span.layers is not None:
        span.layers, span.hidden = None, span.given
        span.taps.clear()


class StepAttempt:
    """Runs spans through the model and lets their decode methods judge; the KV is left uncommitted."""

    def __init__(self, model: Model, counters: Counters, taps: set[int]) -> None:
        """`taps`: layers whose output some phase wants to see (`Phase.taps`)."""
        self.model, self.counters, self.taps = model, counters, taps
        self._room = Scratch()
        self._finite = FiniteCheck(model)

    def run(self, spans: list[Span], waiting: Sequence[Request]) -> list[Settled | Exception | None]:
        """Per span: its outcome, why it failed, or None where it has not reached the last layer yet.

        A span that completes a prompt also draws for the siblings among `waiting`; should that fail, it is tried
        once more by itself.
        """

        results = isolate(partial(self._attempt, waiting=waiting) if waiting else self._attempt, spans, restart)
        for i, result in enumerate(results):
            if waiting and isinstance(result, Exception) and any(True for _ in _siblings(spans[i], waiting)):
                results[i] = isolate(partial(self._attempt, waiting=()), [spans[i]], restart)[0]
            if isinstance(results[i], NotFinite):
                results[i] = self._trace(spans[i])
        return results

    def _trace(self, span: Span) -> Exception:
        """Why this span, which has failed and been undone, ends in NaN."""
        try:
            return self._finite.trace(span)
        except Exception as error:
            return error
        finally:
            restart(span)

    def _attempt(self, spans: list[Span], waiting: Sequence[Request] = ()) -> list[Settled | None]:
        if not self.model.head_finite:
            raise NotFinite("the output head has weights that are not finite")
        taps = set[int]().union(*(span.phase.taps for span in spans)) if self.taps else None
        hidden = forward(self.model, spans, self.counters, taps, self._room)
        decode = spans[0].phase.decode
        for span in spans:
            if span.layers is not None or span.phase.decode is not decode:
                return self._judge_groups(spans, hidden, waiting)
        settled: list[Settled | None] = [*self._judge(decode, spans, hidden, waiting)]
        return settled

    def _judge_groups(self, spans: list[Span], hidden: Hidden, waiting: Sequence[Request]) -> list[Settled | None]:
        """Judges group by group where some spans do not finish, or decode methods differ."""
        groups: dict[int, tuple[Decode, list[int]]] = {}
        under_way: list[Span] = []
        for i, span in enumerate(spans):
            if span.finishes:
                groups.setdefault(id(span.phase.decode), (span.phase.decode, []))[1].append(i)
            else:
                under_way.append(span)
        results: list[Settled | None] = [None] * len(spans)
        for decode, index in groups.values():
            for i, settled in zip(index, self._judge(decode, [spans[i] for i in index], hidden, waiting)):
                results[i] = settled
        for span in under_way:
            assert span.layers is not None
            span.request.slice, span.request.depth = span, span.layers[1]
        return results

    def _judge(self, decode: Decode, group: list[Span], hidden: Hidden, waiting: Sequence[Request]) -> list[Settled]:
        twins = [(i, twin) for i, span in enumerate(group) for twin in _twins(span, waiting)] if waiting else []
        try:
            every = group + [twin for _, twin in twins] if twins else group
            outcomes = decode.accept(every, hidden)
            self._finite(every, outcomes, hidden)
            if any(span.request.params.scored for span in every):
                score(self.model, self.counters, every, outcomes, hidden)
        finally:
            for _, twin in twins:
                twin.request.computed = 0  # its own only once it has forked
        assert len(outcomes) == len(group) + len(twins), "accept gives one outcome per span"
        settled = [Settled(span, outcome, []) for span, outcome in zip(group, outcomes)]
        if twins:
            for (i, twin), outcome in zip(twins, outcomes[len(group) :]):
                settled[i].forks.append((twin.request, outcome))
        return settled


def _siblings(span: Span, waiting: Iterable[Request]) -> Iterable[Request]:
    """Those that wait for the prompt which `span` completes."""
    request = span.request
    if not request.prefilling or span.end < request.prompt_len:
        return ()
    return (sibling for sibling in waiting if sibling.parent is request)


def _twins(span: Span, waiting: Iterable[Request]) -> Iterable[Span]:
    """The same rows once more for every such sibling."""
    for sibling in _siblings(span, waiting):
        sibling.computed = span.request.computed
        twin = replace(span, request=sibling)
        twin.start = span.start
        yield twin
