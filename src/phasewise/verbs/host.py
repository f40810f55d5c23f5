"""What any method may ask for when it is bound to an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.speculation.companion import Companion
    from phasewise.verbs.sample import Sample


@dataclass(slots=True)
class Host:
    """What a method may ask for when it is bound to an engine."""

    model: Model
    sample: Sample
    counters: Counters
    load: Callable[[str], Model]  # a second model, by name or path
    companion: Callable[[str, Model], Companion]  # a second model that follows requests with KV of its own
    taps: set[int] = field(default_factory=set)  # layers whose output the bound methods want to see

    def bind(self, method: Any) -> Any:
        """The runtime of a method: `method.bind(host)` if it has one, else the method itself."""
        return method.bind(self) if hasattr(method, "bind") else method
