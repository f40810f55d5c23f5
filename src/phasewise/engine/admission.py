"""Room for KV within the budget: what a step takes, and who makes way for whom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.engine.queues import Queues
    from phasewise.engine.runtime import Runtime
    from phasewise.request.counters import Counters
    from phasewise.request.request import Request
    from phasewise.verbs.schedule import Work

log = logging.getLogger(__name__)


class Admission:
    """Reserves KV for work, preempting the least important requests (they are recomputed from their tokens).

    `give_up` is told of a request that finds no room although nobody else holds any.
    """

    def __init__(
        self,
        recipes: Mapping[str, Runtime],
        queues: Queues,
        counters: Counters,
        give_up: Callable[[Request], None],
        max_running: int,
    ) -> None:
        self.recipes, self.queues, self.counters = recipes, queues, counters
        self.store = recipes[""].store  # all stores share its ledger and its prefix cache
        self.promised = 0  # bytes set aside for requests on their way here
        self._give_up, self.max_running = give_up, max_running
        self.follow()

    def follow(self) -> None:
        """Note whether any recipe has companions."""
        self._followed = any(runtime.companions for runtime in self.recipes.values())

    def open(self, tokens: int, runtime: Runtime, shared: int = 0) -> bool:
        """True if a request of so many tokens may be admitted now, for which so many rows are there already. No request
        is preempted for it."""
        return len(self.queues.running) < self.max_running and self.store.room(runtime.need(tokens, shared))

    def displace(self, request: Request, tokens: int, runtime: Runtime, shared: int) -> bool:
        """True if such a request may be admitted now that requests in the background have made way."""
        running = self.queues.running
        while not request.params.background and running and running[-1].params.background:
            self.preempt(running[-1])
            if self.open(tokens, runtime, shared):
                return True
        return False

    def promise(self, n_bytes: int) -> bool:
        """Set bytes aside for a request on its way here; False if there is no room. `promise(-n)` takes it back."""
        if n_bytes > 0 and not self.store.room(n_bytes):
            return False
        self.promised += n_bytes
        self.store.ledger.add(n_bytes)
        return True

    def reserve(self, works: Sequence[Work]) -> list[Work]:
        """The work that has room now, most important first."""
        ordered = self.queues.ordered(works)
        if not (self._followed and self._any_followed(ordered)) and _spared(ordered):
            return ordered
        kept: list[Work] = []
        owed = wished = 0  # bytes that companions will take while proposing, and that optional ones would
        for work in ordered:
            request: Request = work.job
            if request.kv is None:
                continue  # preempted for a request before it
            extra, optional = self._companion_growth(request, work.rows)
            if not self.make(request, work.rows, owed + extra):
                continue
            owed += extra
            wished += optional
            request.kv.reserve(work.rows)
            kept.append(work)
        if wished:
            self.store.room(owed + wished)  # unused prefixes make way for drafts; nobody is preempted for them
        return kept

    def make(self, request: Request, rows: int, extra: int = 0) -> bool:
        """Room for `rows` more rows and `extra` bytes, at the price of less important requests; False = not now."""
        assert request.kv is not None
        while True:
            need = request.kv.growth(rows) + extra
            if need == 0 or self.store.room(need):
                return True
            if not self.free_for(request):
                return False

    def free_for(self, request: Request) -> bool:
        """Preempt the least important request, or let go of a lone one's prefix. False if `request` gains nothing by
        it: it was itself preempted, waits for memory that will come back, or was given up."""
        running = self.queues.running
        if len(running) > 1:
            victim = running[-1]
            self.preempt(victim)
            return victim is not request
        if request.kv is not None and request.kv.nodes and not request.kv.refers:  # these blocks hold the last bytes
            for node in request.kv.nodes:
                node.release()
            request.kv.nodes = []
            return True
        ledger = self.store.ledger
        if ledger.others:
            if ledger.yields:
                self.preempt(request)  # it may hold what the others wait for
        elif not self.queues.departed and not self.promised:
            self._give_up(request)
        return False

    def preempt(self, request: Request) -> None:
        """Free everything a request holds; it waits to be recomputed from its tokens."""
        log.info("preempting %s after %d computed rows", request.id, request.computed)
        request.release()
        request.computed = 0
        self.counters.preemptions += 1
        self.recipes[request.recipe].counters.preemptions += 1
        self.queues.move(request, self.queues.waiting)

    def _any_followed(self, works: Sequence[Work]) -> bool:
        """True if a companion may take memory for some of them."""
        return any(self.recipes[work.job.recipe].companions for work in works)

    def _companion_growth(self, request: Request, rows: int) -> tuple[int, int]:
        """Bytes that companions may take in a step that brings `rows` rows, siblings that fork in it included: those
        that must have them, and optional ones."""
        companions = self.recipes[request.recipe].companions
        if not companions:
            return 0, 0
        copies = 1
        if request.prefilling and request.computed + rows >= request.prompt_len:
            copies += sum(sibling.parent is request for sibling in self.queues.waiting)
        must = optional = 0
        for companion in companions:
            spared = companion.optional(request)
            brought = rows if spared or request.prefilling else request.rows  # what must be is not cut by a scheduler
            growth = companion.growth(request, max(request.known, request.computed + brought)) * copies
            if spared:
                optional += growth
            else:
                must += growth
        return must, optional


def _spared(works: Sequence[Work]) -> bool:
    """True if all of it fits into what the requests have."""
    for work in works:
        kv = work.job.kv
        if kv is None or work.rows > kv.spare:
            return False
    return True
