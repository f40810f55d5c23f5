"""The engine's side of binding: what any method may ask for then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.model.artefacts import Artefact
from phasewise.model.artefacts import load as load_artefact
from phasewise.verbs.method import Method

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.speculation.companion import Companion
    from phasewise.verbs.sample import Sample


ENDLESS = (1 << 31) - 1  # positions


@dataclass(slots=True)
class Host:
    """The interface through which a method that is bound asks the engine for models, artefacts and memory."""

    model: Model
    sample: Sample
    counters: Counters
    load: Callable[[str], Model]  # a second model, by name or path
    companion: Callable[..., Companion]  # (name, model, class): a second model that follows requests, with its own KV
    taps: set[int] = field(default_factory=set)  # layers whose output the bound methods want to see
    artefacts: set[str] = field(default_factory=set)  # kinds of those that bound methods have loaded

    def artefact(self, wanted: Artefact, weights: str) -> dict[str, Tensor]:
        """Loads what was trained for a method and this model; `weights`: auto, a file or random:SEED. Raises
        UserError."""
        self.artefacts.add(wanted.kind)
        return load_artefact(self.model, wanted, weights)

    def bind(self, method: Method) -> Any:
        """The runtime of a method."""
        return method.bind(self)
