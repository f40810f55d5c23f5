"""The base of all methods: the facts that each says about itself, whatever its verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.verbs.host import Host


class Method:
    """Any verb: a frozen dataclass whose fields are its knobs. Its class attributes say what it promises and needs.

    What a method remembers of a request lies in the request's drawer `request.state[name]`: emptied when the request
    is preempted or leaves, copied when it is forked (an object there of the class `Drawer`, by its `fork`).
    """

    paper: ClassVar[str]  # "arXiv 2404.14469", or ""
    guarantee: ClassVar[str]  # exact | distribution | lossy
    needs: ClassVar[str]  # nothing | calibration | trained | second model
    neutral: ClassVar[dict[str, object]]  # knob values at which it equals the plain way: all is read, a token a step

    # for benches and laws: knob values, of a method that needs training, at which it works without, at the same price;
    # at which it bites within a few dozen tokens; and of its ladder, from what saves least to what saves most
    untrained: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ()

    @property
    def traits(self) -> Traits:
        """Facts for the engine: each method has a value of its own, a class attribute or a property of its knobs."""
        raise NotImplementedError(f"{type(self).__name__} declares no traits")

    def bind(self, host: Host) -> Any:
        """Returns the object that works in its place in one engine. None, of evict and skip methods: nothing has to be
        done."""
        return self
