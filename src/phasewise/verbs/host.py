"""What any method may ask for when it is bound to an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from phasewise.model.artefacts import Artefact
from phasewise.model.artefacts import load as load_artefact

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.speculation.companion import Companion
    from phasewise.verbs.sample import Sample


ENDLESS = (1 << 31) - 1  # positions
MARGIN = 64  # rows of a draft or block beyond those of its text, where a decode method says nothing else


class Method(Protocol):
    """Any verb: a frozen dataclass whose fields are its knobs. Its class attributes say what it promises and needs.

    What a method remembers of a request lives in the request's drawer `request.state[name]`: emptied when the request
    is preempted or leaves, copied when it is forked.

    Optional:
        bind(host: Host) -> runtime  -- what works in its place in one engine; without it the method works itself
        phases: tuple  -- the phases it acts in, "prefill", "decode" or both; its verb's default acts in others
        shares_prefix: bool  -- False: its prompts' rows are of no use to others, and no prefix is shared
        slots: tuple  -- of a method that fills several of attend, evict and skip with one runtime: these verbs, its own
            first (engine/binding.py)
        untrained: dict  -- of a method that needs training: knob values at which it works without, at the same price
        tight: dict  -- knob values at which it bites within a few dozen tokens: the laws are tested there
        budgets: tuple  -- knob values of its ladder, from what saves least to what saves most, each a dict: who
            compares methods measures them all; without it, the method as its knobs are by default (decode: none)
        drawer(layer: int, shape: KVShape, room: Room) -> int  -- of a runtime of attend, evict or decode: bytes at most
            that lie in drawers from step to step for a layer with such room, booked with its rows (`kv/drawers.py`)
        fork() -> drawer  -- of an object in a drawer: its copy for a fork of the request, else a deep copy
        reach(context: int) -> int  -- of a runtime of decode, draft, attend, evict or skip: how many positions a text
            may have with it, where that may be more than the model's context; ENDLESS where it sets no bound itself.
            Texts go beyond the context where a recipe's evict method carries them and no other sets a bound
        asks: tuple  -- the names in `Params.ask` that it takes, of the method and of its runtime; a name that nobody
            takes is refused. The runtime has `check(params)`, which raises UserError naming what cannot be honoured
            before such a request is admitted; it is called from any thread
        close() -> None  -- of an object in a drawer: told when the request gives the drawer up; of a runtime of decode
            or draft: when the engine is closed
    """

    paper: ClassVar[str]  # "arXiv 2404.14469", or ""
    guarantee: ClassVar[str]  # exact | distribution | lossy
    needs: ClassVar[str]  # nothing | calibration | trained | second model
    neutral: ClassVar[dict[str, object]]  # knob values at which it equals the plain way: all is read, a token a step


@dataclass(slots=True)
class Host:
    """What a method may ask for when it is bound to an engine."""

    model: Model
    sample: Sample
    counters: Counters
    load: Callable[[str], Model]  # a second model, by name or path
    companion: Callable[[str, Model], Companion]  # a second model that follows requests with KV of its own
    taps: set[int] = field(default_factory=set)  # layers whose output the bound methods want to see

    def artefact(self, wanted: Artefact, weights: str) -> dict[str, Tensor]:
        """What was trained for a method and this model; `weights`: auto, a file or random:SEED. Raises UserError."""
        return load_artefact(self.model, wanted, weights)

    def bind(self, method: Any) -> Any:
        """The runtime of a method: `method.bind(host)` if it has one, else the method itself."""
        return method.bind(self) if hasattr(method, "bind") else method
