"""The composition root: one method per verb, turned into phases and engines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from phasewise import catalog
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.inline import InlineLauncher
from phasewise.cluster.launcher import Launcher
from phasewise.engine.binding import Bindings, in_phase
from phasewise.engine.engine import Engine, Parts
from phasewise.errors import UserError, near
from phasewise.kv.buffer import KVShape, Ledger, Raw
from phasewise.kv.store import Sharing, Store
from phasewise.kv.wire import Wire
from phasewise.load import dtype_of, load_model
from phasewise.model.model import Model
from phasewise.options import CLUSTERS, DEFAULTS, defaults, parse
from phasewise.request.counters import Counters
from phasewise.speculation.companion import Companion
from phasewise.step.phase import Phase
from phasewise.verbs.host import Host
from phasewise.verbs.place import Placed

if TYPE_CHECKING:
    from phasewise.engine.limits import Limits

log = logging.getLogger(__name__)


class Builder:
    """A recipe bound to a model: what placements make their engines from."""

    def __init__(
        self,
        model: Model,
        methods: Mapping[str, Any],
        limits: Limits,
        *,
        load: Callable[[str], Model],
        clock: Callable[[], float] = time.monotonic,
        spec: EngineSpec | None = None,
    ) -> None:
        self.model, self.methods, self.limits, self.clock, self.spec = model, methods, limits, clock, spec
        self._load = load
        self._launches = False  # whether the placement has asked for workers
        self._loaded: dict[str, Model] = {}  # companions' models, shared by all engines of a placement

    def build(self) -> Placed:
        """The placement, ready for requests."""
        placed: Placed = self.methods["place"].build(self)
        if self._launches:
            return placed
        if self.limits.cluster not in ("auto", "inline"):
            raise UserError(f"cluster {self.limits.cluster} has nobody to place: all runs in one engine. {_workers()}")
        if self._wire(1) is not None:
            say_nothing_travels(type(self.methods["store"]).__module__.rpartition(".")[2])
        return placed

    def load(self, name: str) -> Model:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    @property
    def budget(self) -> int:
        return self.limits.budget

    def engine(self, phases: tuple[str, ...], share: float, ledger: Ledger | None = None) -> Engine:
        """A new engine for these phases, with counters and companions of its own. It has `share` of the KV budget, or
        the part of a pool that `ledger` keeps account of."""
        counters = Counters()
        ledger = ledger or Ledger(int(self.budget * share))
        companions: list[Companion] = []

        def companion(name: str, model: Model) -> Companion:
            store = Store(kv_shapes(model), Raw(), ledger=ledger, counters=counters)
            plain = Phase(name, decode=self.methods["decode"], attend=catalog.build("attend", DEFAULTS["attend"]))
            companions.append(Companion(name, model, store, plain, counters))
            return companions[-1]

        host = Host(self.model, self.methods["sample"], counters, self.load, companion)
        bindings = Bindings(host, defaults())
        host.sample = bindings.bind(self.methods["sample"])
        made = bindings.phases(self.methods, phases)
        decode, evict = made[0].decode, made[0].evict
        key, unit = self._prefix_key() if self.limits.prefix_cache else None, getattr(decode, "unit", 1)
        store = Store(
            kv_shapes(self.model),
            self.methods["store"].codec(),
            ledger=ledger,
            counters=counters,
            sharing=Sharing(key, 1 if evict is None else max(1, evict.observes), unit),
            wire=self._wire(unit),
        )
        schedule = host.bind(self.methods["schedule"])
        parts = Parts(
            self.model, made, schedule, store, counters, self.clock, self.limits.max_running, companions, host.taps
        )
        return Engine(parts)

    def launcher(self) -> Launcher:
        """Who starts the workers of a placement. Raises UserError for a `cluster` that is unknown or not installed."""
        self._launches = True
        name, knobs = catalog.split(self.limits.cluster, "cluster")
        if name not in CLUSTERS:
            raise UserError(f"unknown cluster {name!r}. {near(name, CLUSTERS)}")
        if knobs and name != "ray":
            raise UserError(f"cluster {name} has no knobs, but was given {', '.join(knobs)}")
        if name == "auto":
            local = self.spec is not None and self.spec.device == "cpu" and hasattr(os, "pidfd_open")
            name = "processes" if local else "inline"
        if name == "inline":
            return InlineLauncher(self)
        if self.spec is None:
            raise UserError(f"cluster {name} needs a model by name: use LLM(...) or the command line")
        if name == "processes":
            from phasewise.cluster.process import ProcessLauncher

            return ProcessLauncher(self.spec, build)
        try:
            from phasewise.cluster.ray_backend import RayLauncher, RayPlacement
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UserError("cluster ray needs Ray, which is not installed: pip install phasewise[cluster]") from error
        return RayLauncher(self.spec, build, catalog.configure(RayPlacement, knobs, "cluster ray"))

    def _for(self, verb: str, phase: str) -> Any:
        """The method of a verb in one phase: a method that leaves a phase alone is replaced by the default there."""
        return in_phase(self.methods[verb], phase, catalog.build(verb, DEFAULTS[verb]))

    def _wire(self, unit: int) -> Wire | None:
        """In what form rows travel, if the store method has a say in it."""
        store = self.methods["store"]
        return store.wire(kv_shapes(self.model), unit) if hasattr(store, "wire") else None

    def _prefix_key(self) -> str | None:
        """Everything that shapes a prompt's KV besides its tokens (DESIGN law 10); None if a method says that what it
        makes of a prompt is of no use to others (`shares_prefix = False`)."""
        if not all(getattr(method, "shares_prefix", True) for method in self.methods.values()):
            return None
        shaping = [self.methods[verb] for verb in ("store", "evict", "decode")]
        shaping += [self._for("attend", "prefill"), self._for("skip", "prefill")]
        return repr((self.model.config, self.model.dtype, shaping))


def _workers() -> str:
    """Which placements have any."""
    known = [name for name in catalog.names("place") if getattr(catalog.method("place", name), "launches", False)]
    return f"Add --place with one of {', '.join(known)}"


@cache
def say_nothing_travels(store: str) -> None:
    """Warn, once a process, of a store method that has nothing to do and may cost something all the same."""
    log.warning(
        "store %s is for KV on its way between engines, and here nothing travels: what it rounds is rounded all the "
        "same, and not a byte is saved. %s, or leave the store out",
        store, _workers(),
    )  # fmt: skip


def build(spec: EngineSpec) -> Builder:
    """Load the model of a spec and bind its methods. Raises UserError naming what does not fit."""

    def load(name: str) -> Model:
        return load_model(name, dtype=model.dtype, device=spec.device)

    methods = parse(spec.verbs)
    model = load_model(spec.model, dtype=dtype_of(spec.dtype), device=spec.device)
    return Builder(model, methods, spec.limits, load=load, spec=spec)


def kv_shapes(model: Model) -> list[KVShape]:
    config = model.config
    shape = KVShape(config.kv_heads, config.head_dim, model.dtype, str(model.device))
    return [shape] * config.layers
