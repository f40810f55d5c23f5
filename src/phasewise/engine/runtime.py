"""What an engine is made of: for each recipe phases, a store and companions, under one ledger; and what all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.kv.store import Store
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.request.request import Request
    from phasewise.speculation.companion import Companion
    from phasewise.step.phase import Phase
    from phasewise.verbs.schedule import Scheduler


@dataclass(slots=True, eq=False)
class Runtime:
    """`phases` in the order in which a request goes through them: it is in the first that holds it. Runtimes of one
    engine may share phases and companions, and their stores prefix trees, where their methods are equal."""

    phases: Sequence[Phase]
    store: Store
    companions: Sequence[Companion] = ()

    def phase(self, request: Request) -> Phase:
        """The phase that the request is in. There must be one: who is past the last phase has departed."""
        for phase in self.phases:
            if phase.holds is None or phase.holds(request):
                return phase
        raise AssertionError(f"{request} is in no phase of this engine")

    def need(self, tokens: int) -> int:
        """Bytes of KV for `tokens` tokens of one request, companions included."""
        return self.store.cost(tokens) + sum(companion.store.cost(tokens) for companion in self.companions)


@dataclass
class Parts:
    """What an engine is made of. `recipes`: a runtime by the name that requests give, "" being the default; all their
    stores share one ledger and one prefix cache. `departs`: all requests leave for another engine when their prompt is
    done (a prefill engine of a placement)."""

    model: Model
    recipes: Mapping[str, Runtime]
    schedule: Scheduler
    counters: Counters
    clock: Callable[[], float]
    max_running: int = 64
    departs: bool = False
    taps: set[int] = field(default_factory=set)

    @property
    def phases(self) -> Sequence[Phase]:
        """Of the default recipe."""
        return self.recipes[""].phases

    @property
    def store(self) -> Store:
        """Of the default recipe."""
        return self.recipes[""].store

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers, in the recipe where it takes most."""
        return max(runtime.store.row_bytes for runtime in self.recipes.values())
