"""The engine: one loop in which requests of any method share every step.

    add -> waiting -> (store.open) -> running -> ... -> finished | cancelled | failed
    step:  admit -> schedule.plan -> decode.propose -> room (preempt if need be) -> forward -> decode.accept
           -> commit -> evict -> siblings fork -> emit

`tokens known` and `tokens computed` of a request are the only truth about its progress; its phase follows from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from phasewise.batch import Span
from phasewise.companion import Companion
from phasewise.errors import UserError
from phasewise.forward import forward
from phasewise.kv.store import Store
from phasewise.phase import Decode, Hidden, Outcome, Phase
from phasewise.request import Left, Request
from phasewise.schedule import Scheduler, Work
from phasewise.trace import Counters

if TYPE_CHECKING:
    from phasewise.model.model import Model

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """What an engine is made of. `phases`: the first computes prompts, the second everything after them; with one
    phase only, requests depart when their prompt is done (a prefill engine of a placement)."""

    model: Model
    phases: Sequence[Phase]
    schedule: Scheduler
    store: Store
    counters: Counters
    clock: Callable[[], float]
    max_running: int = 64
    companions: list[Companion] = field(default_factory=list)
    taps: set[int] = field(default_factory=set)


class Engine:
    """add / cancel / step. Single-threaded: one thread owns it; see serve/loop.py for the server's."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model, self.store, self.counters = parts.model, parts.store, parts.counters
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.departed: list[Request] = []  # prompts done, for a placement to carry on
        self._partial: dict[str, Span] = {}  # slices that have not reached the last layer
        self._order = 0
        self._rank: dict[str, int] = {}  # order of arrival = priority
        self._progressed: list[Request] = []

    # ---- what users of an engine call
    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def kv_bytes(self) -> int:
        """KV bytes in use now, prefix cache and companions included."""
        return self.store.ledger.used

    @property
    def prefix_bytes(self) -> int:
        """Of these, the bytes of the prefix cache."""
        return 0 if self.store.tree is None else self.store.tree.bytes

    def add(self, request: Request) -> None:
        """Accept a request; from here on it leaves in exactly one way. Raises UserError if it can never run."""
        config, limit = self.model.config, self.store.ledger.limit
        if request.id in self._rank:
            raise UserError(f"a request with id {request.id!r} is already running: give each request its own id")
        if not request.prompt_len:
            raise UserError("the prompt is empty: give at least one token")
        bad = next((t for t in request.tokens if not 0 <= t < config.vocab), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary: ids must lie in [0, {config.vocab})")
        if request.prompt_len >= config.max_positions:
            raise UserError(
                f"the prompt has {request.prompt_len} tokens, but the model's context is {config.max_positions}: "
                f"shorten it to at most {config.max_positions - 1}"
            )
        if request.limit > config.max_positions:
            request.params = replace(request.params, max_tokens=config.max_positions - request.prompt_len)
        need = self._need(request.limit + 64)
        if need > limit:
            raise UserError(
                f"the request may need {need:,} bytes of KV ({request.limit} tokens), but the budget is {limit:,}: "
                f"raise --kv-bytes or lower max_tokens"
            )
        self._rank[request.id] = self._order
        self._order += 1
        request.trace.arrived = self.parts.clock()
        self.waiting.append(request)

    def resume(self, request: Request) -> None:
        """Take over a request whose KV is already loaded (hand-off). Its KV must come from this engine's store."""
        assert request.kv is not None
        self._rank[request.id] = self._order
        self._order += 1
        self._enter(request)
        self.running.append(request)

    def cancel(self, request: Request) -> bool:
        """Drop a request wherever it is; False if it had already left."""
        if request.left is not None or request.id not in self._rank:
            return False
        self._leave(request, Left("cancelled", "cancelled"))
        return True

    def step(self) -> list[Request]:
        """One step. Returns the requests that got tokens or left."""
        self._progressed = []
        self._admit()
        for request in self.running:
            request.rows = self._rows(request)
        works = self.parts.schedule.plan(self.running, self.parts.clock())
        spans = self._propose(self._with_room(works))
        if spans:
            self.counters.steps += 1
            self._run(spans)
        elif self.running:
            self._unblock()
        return self._progressed

    def forget_prefixes(self) -> None:
        """Empty the prefix cache as far as no request holds it."""
        if self.store.tree is not None:
            self.store.tree.clear()

    # ---- admission and memory
    def _need(self, tokens: int) -> int:
        """Bytes of KV for `tokens` tokens of one request, companions included."""
        return self.store.cost(tokens) + sum(c.store.cost(tokens) for c in self.parts.companions)

    def _admit(self) -> None:
        """First come first served: open KV for the whole prompt, stop at the first request that finds no room."""
        for request in list(self.waiting):
            if request.parent is not None and request.parent.left is None:
                continue  # waits for its parent's prefill
            request.parent = None
            tokens = request.known + 1
            if len(self.running) >= self.parts.max_running or not self.store.room(self._need(tokens)):
                return
            request.computed = 0  # a sibling may have been prepared to fork
            request.kv = self.store.open(request, tokens)
            self.counters.recomputed -= min(request.computed, request.high_water)  # those need no computing
            if request.trace.admitted is None:
                request.trace.admitted = self.parts.clock()
            self.waiting.remove(request)
            self.running.append(request)
            self.running.sort(key=lambda r: self._rank[r.id])

    def _with_room(self, works: list[Work]) -> list[Work]:
        """Reserve KV for every piece of work, most important first, preempting the least important requests."""
        kept: list[Work] = []
        promised = 0  # bytes that companions will take while proposing
        for work in sorted(works, key=lambda w: self._rank[w.job.id]):
            request: Request = work.job
            if request.kv is None:
                continue  # preempted for a request before it
            if request.depth == 0:
                extra = sum(c.growth(request, request.known + work.rows) for c in self.parts.companions)
                if not self._make_room(request, work.rows, promised + extra):
                    continue
                promised += extra
                request.kv.reserve(work.rows)
            kept.append(work)
        return [work for work in kept if work.job.kv is not None]

    def _make_room(self, request: Request, rows: int, extra: int) -> bool:
        assert request.kv is not None
        while True:
            need = request.kv.growth(rows) + extra
            if need == 0 or self.store.room(need):
                return True
            victim = self.running[-1]
            if len(self.running) == 1:
                if request.kv.nodes:  # its own prefix blocks hold the last bytes
                    for node in request.kv.nodes:
                        node.release()
                    request.kv.nodes = []
                    continue
                self._leave(request, Left("failed", "the KV budget is exhausted: raise --kv-bytes"))
                return False
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        """Free everything a request holds; it will be recomputed from its tokens."""
        log.info("preempting %s after %d computed rows", request.id, request.computed)
        self._partial.pop(request.id, None)
        request.release()
        self.counters.preemptions += 1
        self.counters.recomputed += request.high_water  # as opposed to what is computed for the first time
        request.computed = request.depth = 0
        self.running.remove(request)
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: self._rank[r.id])

    def _unblock(self) -> None:
        """Nothing could be scheduled although requests hold KV: free the least important (no deadlock)."""
        if len(self.running) > 1:
            self._preempt(self.running[-1])

    # ---- one step
    def _phase(self, request: Request) -> Phase:
        return self.parts.phases[0 if request.prefilling else -1]

    def _rows(self, request: Request) -> int:
        if request.depth:
            return self._partial[request.id].rows
        return self._phase(request).decode.rows(request)

    def _propose(self, works: Sequence[Work]) -> list[Span]:
        spans: list[Span] = []
        fresh: dict[int, tuple[Phase, list[Work]]] = {}
        for work in works:
            if work.job.depth:
                span = self._partial.pop(work.job.id)
                span.layers = work.layers
                spans.append(span)
            else:
                phase = self._phase(work.job)
                fresh.setdefault(id(phase), (phase, []))[1].append(work)
        for phase, group in fresh.values():
            proposed = phase.decode.propose([w.job for w in group], [w.rows for w in group], phase)
            for span, work in zip(proposed, group):
                span.layers = work.layers
                if span.rows > work.rows:  # a method's smallest unit
                    if work.job.kv is None or not self._make_room(work.job, span.rows, 0):
                        continue
                    span.kv.reserve(span.rows)
                spans.append(span)
        return [span for span in spans if span.request.kv is not None]  # unless preempted for another's unit

    def _run(self, spans: list[Span]) -> None:
        """Forward and accept. If anything raises, every span is tried alone, so that only the culprit fails."""
        try:
            with torch.inference_mode():
                hidden = forward(self.model, spans, self.counters, self.parts.taps)
                outcomes = self._outcomes(spans, hidden)
        except Exception as error:
            for span in spans:
                span.kv.commit(0)
            if len(spans) == 1:
                log.exception("request %s failed", spans[0].request.id)
                self._leave(spans[0].request, Left("failed", f"{type(error).__name__}: {error}"))
                return
            for span in spans:
                if span.layers is not None:  # a half-run slice starts again
                    self._preempt(span.request)
                else:
                    self._run([span])
            return
        self._settle(outcomes)

    def _outcomes(self, spans: list[Span], hidden: Hidden) -> list[tuple[Span, Outcome, list[tuple[Request, Outcome]]]]:
        """Outcomes of the spans that reached the last layer, with those of siblings that fork there."""
        groups: dict[int, tuple[Decode, list[Span]]] = {}
        for span in spans:
            if not span.finishes:
                assert span.layers is not None
                span.hidden = hidden.x[span.slice]
                span.request.depth = span.layers[1]
                self._partial[span.request.id] = span
                continue
            decode = span.phase.decode
            groups.setdefault(id(decode), (decode, []))[1].append(span)
        settled = []
        for decode, group in groups.values():
            twins = [(i, twin) for i, span in enumerate(group) for twin in self._twins(span)]
            outcomes = decode.accept(group + [twin for _, twin in twins], hidden)
            forks: list[list[tuple[Request, Outcome]]] = [[] for _ in group]
            for (i, twin), outcome in zip(twins, outcomes[len(group) :]):
                forks[i].append((twin.request, outcome))
            settled.extend(zip(group, outcomes, forks))
        return settled

    def _twins(self, span: Span) -> list[Span]:
        """The same rows once more for every sibling that waits for this prompt to be complete."""
        request = span.request
        if not request.prefilling or span.positions[-1] + 1 < request.prompt_len:
            return []
        twins = []
        for sibling in self.waiting:
            if sibling.parent is request:
                sibling.computed = request.computed
                twin = replace(span, request=sibling)
                twin.start = span.start
                twins.append(twin)
        return twins

    def _settle(self, settled: list[tuple[Span, Outcome, list[tuple[Request, Outcome]]]]) -> None:
        emissions: list[tuple[Request, list[int]]] = []
        for span, outcome, forks in settled:
            request = span.request
            self._commit(span, outcome)
            emissions.append((request, outcome.tokens))
            for sibling, its in forks:
                self.waiting.remove(sibling)
                sibling.parent = None
                sibling.trace.admitted = self.parts.clock()
                sibling.adopt(request)
                self.running.append(sibling)
                emissions.append((sibling, its.tokens))
        self.running.sort(key=lambda r: self._rank[r.id])
        now = self.parts.clock()
        for request, tokens in emissions:
            if tokens:
                self.counters.emitted += request.emit(tokens, self.model.config.eos, now)
                self._progressed.append(request)
            if request.left is not None:
                self._leave(request, request.left)
            elif not request.prefilling and len(self.parts.phases) == 1:
                self.running.remove(request)
                self.departed.append(request)

    def _commit(self, span: Span, outcome: Outcome) -> None:
        request = span.request
        was_prefilling = request.prefilling
        span.kv.commit(outcome.keep)
        request.computed += outcome.kept
        request.depth = 0
        request.high_water = max(request.high_water, request.computed)
        self.counters.drafted += outcome.drafted
        self.counters.accepted += outcome.accepted
        if was_prefilling and not request.prefilling:
            self.store.remember(request)
        evict = span.phase.evict
        if evict is not None and evict.due(request):
            for layer in range(len(span.kv.layers)):
                index = evict.keep(request, layer)
                if index is not None:
                    span.kv.keep(layer, index)
        if was_prefilling and not request.prefilling:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        """A request begins its second phase: KV that no row will read again is freed."""
        skip = self._phase(request).skip
        if skip is not None and request.kv is not None and len(self.parts.phases) > 1:
            for layer in skip.unused(len(request.kv.layers)):
                request.kv.keep(layer, torch.empty(0, dtype=torch.int64), room=1)

    def _leave(self, request: Request, left: Left) -> None:
        """The one exit. Memory goes back here and nowhere else."""
        request.left = left
        request.trace.left = self.parts.clock()
        for queue in (self.waiting, self.running, self.departed):
            if request in queue:
                queue.remove(request)
        self._partial.pop(request.id, None)
        self._rank.pop(request.id, None)
        request.release()
        self._progressed.append(request) if request not in self._progressed else None

    def depart(self, request: Request) -> None:
        """A placement has taken `request` out of `departed`: forget it here and free its memory."""
        self.departed.remove(request)
        self._rank.pop(request.id, None)
        request.release()
