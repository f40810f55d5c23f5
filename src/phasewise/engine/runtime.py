"""The parts of an engine: for each recipe phases, a store and companions, under one ledger; and what all share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phasewise.errors import UserError, near
from phasewise.request.counters import Counters
from phasewise.verbs.host import ENDLESS
from phasewise.verbs.traits import MARGIN, Traits

if TYPE_CHECKING:
    from phasewise.engine.lora import LoadedLora
    from phasewise.kv.store import Store
    from phasewise.model.model import Model
    from phasewise.request.params import Params
    from phasewise.request.request import Request
    from phasewise.speculation.companion import Companion
    from phasewise.step.phase import Phase
    from phasewise.verbs.schedule import Scheduler
    from phasewise.verbs.slot import SlotRuntime


PIECE = 512  # rows
PLAIN = Traits("decode")
LATE = 32  # rows past its prompt that a request may bring where each may read sealed rows in a form of its own


@dataclass(slots=True, eq=False)
class Runtime:
    """`phases` in the order in which a request goes through them: it is in the first that holds it. Runtimes of one
    engine may share phases and companions, and their stores prefix trees, where their methods are equal."""

    phases: Sequence[Phase]
    store: Store
    companions: Sequence[Companion] = ()
    sample: Any = None
    traits: Traits = PLAIN  # of its decode method
    asks: Sequence[tuple[tuple[str, ...], Any]] = ()  # names in `Params.ask`, and the runtime that takes them
    counters: Counters = field(default_factory=Counters)  # of its requests alone: see `OF_REQUESTS`
    lora: LoadedLora | None = None  # the adapter that its requests run with

    def check(self, params: Params) -> None:
        """Raise UserError unless all that a request asks for (`Params.ask`) can be honoured."""
        if params.ask is None:
            return
        known = {name for names, _ in self.asks for name in names}
        sampled = {name for names, runtime in self.asks if runtime is self.sample for name in names}
        for name in params.ask:
            if name not in known:
                raise UserError(f"no method of this engine takes {name}. {near(name, known)}")
            if self.traits.unordered and name in sampled:
                raise UserError(f"{name} cannot be kept where tokens are drawn before those in front of them are "
                                "known: choose another decode method, or leave it out")  # fmt: skip
        for names, runtime in self.asks:
            if not params.ask.keys().isdisjoint(names):
                runtime.check(params)

    def open(self, request: Request, tokens: int) -> None:
        """Give a request the KV that it needs for so many tokens, with all that is there of its prompt."""
        request.kv = self.store.open(request, self.held(tokens))
        self.counters.prefix_hits += request.computed
        self.bring(request)

    def bring(self, request: Request) -> None:
        """Give it rows that come next and that its decode method need not have computed."""
        if not self.traits.injects_kv or not request.prefilling or request.kv is None:
            return
        while (rows := self.phases[0].decode.given(request, self.store.left)) is not None:
            if rows.start is not None:  # what is there is what computing gives, and may be of use to others
                self.store.remember(request)
            start, count = request.kv.inject(rows, request.computed)
            request.computed = start + count
            request.kv.approximate |= not self.phases[0].dense  # as are those to come
            self.store.counters.recalled += count

    def leave(self, request: Request) -> None:
        """If it has finished, and requests may come that have a use for its KV, keep that."""
        if request.kv is None or request.left is None or request.left.how != "finished":
            return
        if self.phases[0].name == "prefill" and self.traits.retains_kv:
            self.store.leave(request, all(phase.dense for phase in self.phases))

    def phase(self, request: Request) -> Phase:
        """The phase that the request is in. There must be one: who is past the last phase has departed."""
        for phase in self.phases:
            if phase.holds is None or phase.holds(request):
                return phase
        raise AssertionError(f"{request} is in no phase of this engine")

    @property
    def most(self) -> int | None:
        """Rows that a request may bring to a step, where that decides what it ever holds; None: as many as it likes."""
        return PIECE if len(self._leave_at_most) == len(self.phases) else None

    @property
    def _leave_at_most(self) -> list[Callable[[int], int]]:
        """`Evict.most` of the phases that have it."""
        evicts = [phase.evict for phase in self.phases if phase.evict is not None]
        return [evict.most for evict in evicts if evict.most is not None]

    def bound(self, request: Request) -> int:
        """Rows that a request may bring to the next step."""
        most, kv = self.most or ENDLESS, request.kv
        if not request.prefilling and any(phase.late is not None for phase in self.phases):
            return 1  # what else has to run with a row, it says itself
        if kv is None or not kv.packs_blocks or request.prefilling:
            return most
        boundary = kv.boundary(request.computed)
        return min(most, LATE) if boundary is None else min(most, LATE, boundary - request.computed)

    @staticmethod
    def until(request: Request, phase: Phase) -> int | None:
        """The position that drafts of the next step must not reach."""
        until, kv = phase.until(request), request.kv
        if kv is None or not kv.packs_blocks or request.prefilling:
            return until
        ends = (until, kv.boundary(request.known - 1))
        return min((end for end in ends if end is not None), default=None)

    def held(self, tokens: int) -> int:
        """Rows of KV that a request of `tokens` tokens holds at most."""
        if self.most is None:
            return tokens
        return min(tokens, self.most + max(most(tokens) for most in self._leave_at_most))

    @property
    def margin(self) -> int:
        """Rows beyond its limit that a request may hold for a while: of a draft, or of a block."""
        return max(MARGIN, self.traits.margin)

    def reach(self, context: int) -> int:
        """Positions that a text may have, where the model's context is `context`."""
        found = context if self.companions else ENDLESS  # theirs are those of their own models
        for phase in self.phases:
            acting: list[SlotRuntime] = [phase.decode, *(one for one in (phase.evict, phase.skip) if one is not None)]
            if phase.evict is None or not phase.dense:  # the KV is for the context
                acting.append(phase.attend)
            found = min([found, *(method.reach(context) for method in acting)])
        return found

    def need(self, tokens: int, shared: int = 0) -> int:
        """Bytes of KV for `tokens` tokens of one request, companions included, `shared` rows being there already."""
        own = self.store.cost(self.held(tokens), shared)
        return own + sum(companion.store.cost(tokens) for companion in self.companions)


@dataclass
class Parts:
    """The parts of an engine. `recipes`: a runtime by the name that requests give, "" being the default; all their
    stores share one ledger and one prefix cache. `departs`: all requests leave for another engine when their prompt is
    done (a prefill engine of a placement). `bind` makes the runtime of a recipe that comes later; `keep` is told of all
    that there are when some have gone."""

    model: Model
    recipes: dict[str, Runtime]
    schedule: Scheduler
    counters: Counters
    clock: Callable[[], float]
    max_running: int = 64
    departs: bool = False
    taps: set[int] = field(default_factory=set)
    bind: Callable[[Mapping[str, Any]], Runtime] | None = None
    keep: Callable[[Collection[Runtime]], None] | None = None

    @property
    def phases(self) -> Sequence[Phase]:
        """The default recipe's."""
        return self.recipes[""].phases

    @property
    def store(self) -> Store:
        """The default recipe's."""
        return self.recipes[""].store

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers, in the recipe where it takes most."""
        return max(runtime.store.row_room for runtime in self.recipes.values())
