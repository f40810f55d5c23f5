"""The engine: one loop in which requests of any method share every step.

    add -> waiting -> (store.open) -> running -> ... -> finished | cancelled | failed
    step:  admit -> schedule.plan -> room (preempt if need be) -> decode.propose -> forward
           -> decode.accept (attempt.py) -> commit -> evict -> siblings fork -> emit

`tokens known` and `tokens computed` of a request are the only truth about its progress; its phase follows from them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from phasewise.engine.admission import Admission
from phasewise.engine.attempt import Settled, StepAttempt, isolate
from phasewise.engine.queues import Queues
from phasewise.engine.refusals import DEPTH, kept_within, longest, refuse
from phasewise.engine.runtime import Parts, Runtime
from phasewise.errors import BudgetError, NotFinite, Unanswerable, UserError, near
from phasewise.kv.buffer import stride
from phasewise.request.request import Departure, Request
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.schedule import Work

if TYPE_CHECKING:
    from phasewise.kv.buffer import Ledger
    from phasewise.kv.prefix import PrefixCache
    from phasewise.request.params import Params

log = logging.getLogger(__name__)
LOADS = 0.005  # seconds that a step with nothing to run waits for KV on its way from a tier


class Engine:
    """add / cancel / step. Single-threaded: one thread owns it; see serve/loop.py for the server's."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model, self.recipes, self.counters = parts.model, parts.recipes, parts.counters
        self.store = parts.store  # of the default recipe
        self.ledger: Ledger = self.store.ledger
        self.prefixes: PrefixCache = self.store.prefixes
        self.queues = Queues()
        self.waiting, self.running, self.departed = self.queues.waiting, self.queues.running, self.queues.departed
        self.room = Admission(parts.recipes, self.queues, parts.counters, self._no_room, parts.max_running)
        self._turn = StepAttempt(parts.model, parts.counters, parts.taps)
        self._departs, self._inference = parts.departs, torch.inference_mode()
        self._progressed: list[Request] = []
        self._unwanted: set[str] = set()  # recipes that go once their last request has left

    # ---- what users of an engine call
    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def kv_bytes(self) -> int:
        """KV bytes in use now, prefix cache and companions included."""
        return self.ledger.used - self.ledger.resident

    @property
    def prefix_bytes(self) -> int:
        """The part of these bytes that the prefix cache holds."""
        return self.prefixes.bytes

    @property
    def tiers(self) -> Mapping[str, float]:
        return {} if self.prefixes.tiers is None else self.prefixes.tiers.numbers()

    @property
    def lora_bytes(self) -> int:
        """The part of the KV budget that adapters take."""
        return self.ledger.resident

    @property
    def growth(self) -> int:
        """KV bytes that let every running request grow a bit."""
        return sum(stride(each.known) * self.runtime(each).store.row_room for each in self.running)

    @property
    def workers(self) -> dict[str, int]:
        return {}

    @property
    def by_role(self) -> dict[str, dict[str, int]]:
        return {}

    by_worker = by_role

    @property
    def by_recipe(self) -> dict[str, dict[str, int]]:
        return {name: runtime.counters.of_requests() for name, runtime in self.recipes.items()}

    def runtime(self, request: Request) -> Runtime:
        return self.recipes[request.recipe]

    def reach(self, recipe: str) -> int:
        """Positions that a text may have with a recipe: the model's context, or more where its methods carry that."""
        context, ropes = self.model.config.max_positions, self.model.config.ropes
        reach = self.recipes[recipe].reach(context)
        return reach if all(rope.fixed for rope in ropes) and not self._departs else min(reach, context)

    def prepare(self, params: Params, recipe: str) -> None:
        """See `Placed`."""
        self.recipes[recipe].check(params)

    def check(self, request: Request, reach: int | None = None) -> None:
        """Raise UserError if the request can never run here. A `max_tokens` beyond its `reach` means as many as fit, in
        that and in the KV budget: it is cut to them."""
        config, limit = self.model.config, self.ledger.limit - self.ledger.resident
        if request.left is not None:
            raise UserError(f"request {request.id!r} has already left: make a new Request to run it again")
        if request.recipe not in self.recipes:
            raise UserError(f"unknown recipe {request.recipe!r}. {near(request.recipe, filter(None, self.recipes))}")
        runtime = self.runtime(request)
        runtime.check(request.params)
        refuse(request, runtime, config.vocab, config.eos)
        reach = min(own := self.reach(request.recipe), reach or own)
        if request.prompt_len >= reach:
            raise UserError(
                f"the prompt has {request.prompt_len} tokens, but the model's context is {reach}: "
                f"shorten it to at most {reach - 1}{kept_within(runtime, config)}"
            )
        if request.limit > reach:
            most = reach if self._departs else longest(runtime, reach, config, limit)
            request.params = replace(request.params, max_tokens=max(1, most - request.prompt_len))
        tokens = (request.prompt_len if self._departs else request.limit) + runtime.margin
        if runtime.need(tokens) > limit:
            raise BudgetError(
                f"the request may need {runtime.need(tokens):,} bytes of KV ({tokens} tokens), but the budget is "
                f"{limit:,}: raise --kv-bytes or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Accept a request; from here on it leaves in exactly one way. Raises UserError if it can never run."""
        if self.queues.named(request.id):
            raise UserError(f"a request with id {request.id!r} is already running: give each request its own id")
        self.check(request)
        self._equip(request)
        request.trace.enter(self.parts.clock())
        self.queues.join(request, self.waiting)
        if request.parent is None:
            self.runtime(request).store.fetch(request)

    def resume(self, request: Request) -> None:
        """Take over a request whose KV is already loaded (hand-off), in the store of its recipe here."""
        assert request.kv is not None and request not in self.queues
        request.trace.enter(self.parts.clock())
        self._equip(request)
        if not request.prefilling:
            self._enter(request)
            request.kv.seal(self.runtime(request).phase(request).marks(request))
        self.queues.join(request, self.running)

    def cancel(self, request: Request) -> bool:
        """Drop a request wherever it is; False if it had already left."""
        if request.left is not None or request not in self.queues:
            return False
        self._leave(request, Departure("cancelled", "cancelled"))
        return True

    def step(self) -> list[Request]:
        """One step. Returns the requests that got tokens or left."""
        self._progressed = []
        if torch.is_inference_mode_enabled():  # for a loop of small steps it is worth entering it once
            self._step()
        else:
            with self._inference:  # all of it: buffers made in this mode may only be written in it
                self._step()
        return self._progressed

    def _step(self) -> None:
        self._admit()
        self._measure()
        works = self.parts.schedule.plan(self._stepping(), self.parts.clock())
        spans = self._propose(self.room.reserve(works))
        if spans:
            self.counters.steps += 1
            self._run(spans)
        elif self.prefixes.tiers is not None:
            self.prefixes.tiers.wait(LOADS)  # whoever asks for steps again and again leaves the cores to a load

    def learn(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Placed`."""
        assert self.parts.bind is not None
        try:
            made = {name: self.parts.bind(methods) for name, methods in recipes.items()}
        except BaseException:
            self._keep()
            raise
        self.recipes.update(made)
        self.room.follow()

    def forget(self, recipes: Collection[str]) -> None:
        """See `Placed`."""
        self._unwanted |= self.recipes.keys() & set(recipes)
        self._let_go()

    def _let_go(self) -> None:
        """Forget recipes that are no longer wanted, once no request has them."""
        queues = (self.waiting, self.running, self.departed)
        gone = self._unwanted.difference(request.recipe for queue in queues for request in queue)
        for name in gone:
            self.prefixes.retained.drop_of(self.recipes.pop(name).store)
        if gone:
            self._unwanted -= gone
            self.room.follow()
            self._keep()

    def _keep(self) -> None:
        if self.parts.keep is not None:
            self.parts.keep(self.recipes.values())

    def _equip(self, request: Request) -> None:
        """Fill in what a request is told by the engine that accepts it."""
        request.layers, request.ends = self.model.config.layers, self.model.config.eos
        lora = self.runtime(request).lora
        request.lora = None if lora is None else lora.delta

    def forget_prefixes(self) -> None:
        """Empty the prefix cache as far as no request holds it."""
        self.prefixes.clear()

    def close(self) -> None:
        """Whatever works for a decode method elsewhere ends, and KV is written down where a tier on disk keeps it; all
        else is in this process and goes with it."""
        for phase in (phase for runtime in self.recipes.values() for phase in runtime.phases):
            phase.decode.close()
        self.prefixes.close()

    # ---- one step
    def _goes(self, request: Request) -> bool:
        return request.departs or self._departs

    def _admit(self) -> None:
        """The most important first: open KV for what a request will hold of its prompt, stop at the first that finds no
        room."""
        for request in list(self.waiting):
            if request.parent is not None and self._may_fork(request.parent):
                continue
            if self.prefixes.tiers is not None and self.prefixes.tiers.loading(request.id):
                continue
            request.parent, request.computed = None, 0
            tokens, runtime = request.known_rows + 1, self.runtime(request)
            if request.params.background and self.running and not self.running[0].params.background:
                return
            with runtime.store.holding(request) as shared:
                fits = self.room.open(tokens, runtime, shared)
                if not (fits or self.room.displace(request, tokens, runtime, shared)):
                    return
                try:
                    runtime.open(request, tokens)
                except Exception as error:
                    self._fail(request, error)
                    continue
            self._start(request)

    def _stepping(self) -> list[Request]:
        """Those whose turn it is: requests in the background stand still while there are others. A slice that is under
        way goes on."""
        running = self.running
        if not running or running[0].params.background or not running[-1].params.background:
            return running
        return [each for each in running if not each.params.background or each.slice is not None]

    def _may_fork(self, parent: Request) -> bool:
        """True if siblings of `parent` should wait for its prompt: it is here, and has not completed it before."""
        return parent in self.queues and parent.high_water < parent.prompt_len

    def _start(self, request: Request) -> None:
        if request.trace.admitted is None:
            request.trace.admitted = self.parts.clock()
        self.queues.move(request, self.running)

    def _measure(self) -> None:
        """Ask every running request how many rows it would bring."""
        for request in list(self.running):
            try:
                under_way = request.slice
                if under_way is None:
                    runtime = self.recipes[request.recipe]
                    phase = runtime.phase(request)
                    request.until = runtime.until(request, phase)
                    request.rows = min(phase.decode.rows(request), runtime.bound(request))
                else:
                    request.rows = under_way.rows
            except Exception as error:
                self._fail(request, error)

    def _propose(self, works: Sequence[Work]) -> list[Span]:
        """Slices under way go on; everybody else is asked, phase by phase."""
        spans: list[Span] = []
        fresh: dict[int, tuple[Phase, list[Work]]] = {}
        for work in works:
            under_way = work.job.slice
            if under_way is not None:
                under_way.layers = work.layers
                spans.append(under_way)
            else:
                phase = self.recipes[work.job.recipe].phase(work.job)
                fresh.setdefault(id(phase), (phase, []))[1].append(work)
        for phase, group in fresh.values():
            still = [work for work in group if work.job.kv is not None] if spans else group
            self._ask(phase, still, spans)
        return [span for span in spans if span.request.kv is not None]  # unless preempted for another's unit

    def _ask(self, phase: Phase, works: list[Work], spans: list[Span]) -> None:
        """Adds to `spans` what a phase's requests propose."""

        def propose(some: list[Work]) -> list[Span]:
            return phase.decode.propose([work.job for work in some], [work.rows for work in some], phase)

        for work, span in zip(works, isolate(propose, works)):
            if isinstance(span, Exception):
                self._fail(work.job, span)
                continue
            begun = span.layers is not None or span.hidden is not span.given
            if not span.finishes or (begun and work.layers is not None):
                self._fail(work.job, UserError(DEPTH))
                continue
            if work.layers is not None:
                span.layers = work.layers
            if span.rows > work.rows:  # a method's smallest unit
                if work.job.kv is None or not self.room.make(work.job, span.rows):
                    continue
                span.kv.reserve(span.rows)
            spans.append(span)

    def _run(self, spans: list[Span]) -> None:
        """Forward, accept, commit, fork, emit. A request for which anything raises fails, and no other."""
        emissions: list[tuple[Request, Outcome]] = []
        for span, result in zip(spans, self._turn.run(spans, self.waiting)):
            request = span.request
            if result is None:
                continue  # under way
            try:
                if isinstance(result, Exception):
                    raise result
                self._commit(span, result.outcome)
            except Exception as error:
                self._fail(request, error)
                continue
            emissions.append((request, result.outcome))
            if result.forks:
                emissions.extend(self._fork(result))
        now = self.parts.clock()
        for request, outcome in emissions:
            self._emit(request, outcome, now)

    def _fork(self, settled: Settled) -> Iterator[tuple[Request, Outcome]]:
        """Siblings go on from the KV of a prompt just completed, each with the tokens drawn for it."""
        for sibling, outcome in settled.forks:
            sibling.parent = None
            if len(self.running) >= self.parts.max_running or not self.prefixes.room(settled.span.kv.drawn):
                sibling.release()  # it will draw the same tokens when its turn comes
                continue
            try:
                sibling.adopt(settled.span.request)
            except Exception as error:
                self._fail(sibling, error)
                continue
            sibling.scores.update(outcome.scores)
            self._start(sibling)
            yield sibling, outcome

    def _emit(self, request: Request, outcome: Outcome, now: float) -> None:
        try:
            if outcome.tokens:
                self.counters.emitted += (taken := request.emit(outcome.tokens, self.model.config.eos, now))
                self._progressed.append(request)
                if outcome.joined:
                    request.groups.append(taken)
        except Exception as error:  # raised by the request's own watch
            self._fail(request, error)
        else:
            if request.left is not None:
                self._leave(request, request.left)
            elif self._goes(request) and not request.prefilling:
                self.queues.move(request, self.departed)

    def _commit(self, span: Span, outcome: Outcome) -> None:
        request = span.request
        counters, was_prefilling, before = self.counters, request.prefilling, request.computed
        own = self.recipes[request.recipe].counters
        own.rows += span.rows
        span.kv.commit(outcome.keep)
        span.phase.tell(span, outcome.keep)
        request.slice, request.depth = None, 0
        request.scores.update(outcome.scores)
        request.pool = outcome.pool or request.pool
        moved = span.joins or (was_prefilling and span.beyond)  # its rows are not as many as its tokens
        request.computed = span.end if moved and outcome.kept else before + outcome.kept
        if before < request.high_water:
            again = min(request.computed, request.high_water) - before
            if span.joins:
                again = sum(at < request.high_water for at in span.positions)
            own.recomputed += again
            counters.recomputed += again
        self.recipes[request.recipe].bring(request)
        request.high_water = max(request.high_water, request.computed)
        if back := span.phase.back(span, outcome):
            request.step_back(back)
        for each in (counters, own):
            each.drafted += outcome.drafted
            each.accepted += outcome.accepted
            each.forced += len(span.sure)
        if was_prefilling and before < (store := self.runtime(request).store).shareable(request) <= request.computed:
            store.remember(request)
        if (evict := span.phase.evict) is not None and evict.due(request):
            for layer in range(len(span.kv.layers)):
                index = evict.keep(request, layer)
                if index is not None:
                    span.kv.keep(layer, index)
        if was_prefilling and not request.prefilling:
            self._enter(request)
            if not self._goes(request):
                span.kv.settle(span.phase.marks(request))
        elif span.kv.has_blocks:
            span.kv.seal(span.phase.marks(request))

    def _enter(self, request: Request) -> None:
        """A request goes on here after its prompt: KV that no row will read again is freed."""
        if self._goes(request) or request.kv is None:
            return
        skip = self.runtime(request).phase(request).skip
        for layer in () if skip is None else skip.unused(len(request.kv.layers)):
            request.kv.free(layer)
        request.kv.complete()

    # ---- the ways out
    def _fail(self, request: Request, error: Exception) -> None:
        asked, told = isinstance(error, Unanswerable), isinstance(error, (Unanswerable, NotFinite))
        log.log(logging.INFO if asked else logging.ERROR, "request %s failed", request.id, exc_info=error)
        self._leave(request, Departure("failed", str(error) if told else f"{type(error).__name__}: {error}", asked))

    def _no_room(self, request: Request) -> None:
        self._leave(request, Departure("failed", "the KV budget is exhausted: raise --kv-bytes"))

    def _leave(self, request: Request, left: Departure) -> None:
        """The one exit. Memory goes back here and nowhere else."""
        request.left = left
        request.trace.left = self.parts.clock()
        self.queues.drop(request)
        self.runtime(request).leave(request)
        request.release()
        if self.prefixes.tiers is not None:
            self.prefixes.tiers.forget(request.id)
        if request not in self._progressed:
            self._progressed.append(request)
        if self._unwanted:
            self._let_go()

    def keep_local(self, request: Request) -> None:
        """Nobody will take over `request`: it goes on here, if this engine can."""
        request.departs = False
        if request in self.departed and not self._departs:
            self._enter(request)
            if request.kv is not None:
                request.kv.settle(self.runtime(request).phase(request).marks(request))
            self.queues.move(request, self.running)

    def depart(self, request: Request) -> None:
        """A placement has taken over `request`: forget it here and free its memory."""
        self.queues.drop(request)
        request.release()
        if self._unwanted:
            self._let_go()
