"""The composition root: one method per verb, turned into phases and engines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise import catalog
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.inline import InlineLauncher
from phasewise.cluster.launcher import Launcher
from phasewise.cluster.shared_pool_policy import cores_here
from phasewise.engine.assembly import Assembly, kv_shapes
from phasewise.engine.engine import Engine
from phasewise.engine.runtime import Parts
from phasewise.errors import UserError, near
from phasewise.kv.buffer import Ledger
from phasewise.kv.tiers.folder import BlockFolder
from phasewise.kv.tiers.tiers import KVTiers
from phasewise.load import dtype_of, load_model
from phasewise.model.digest import weights_digest
from phasewise.model.model import Model
from phasewise.ops.native import library
from phasewise.options import CLUSTERS, defaults, parse, parse_recipes, refuse_lossy
from phasewise.request.counters import Counters
from phasewise.verbs.place import Placed
from phasewise.version import __version__

if TYPE_CHECKING:
    from phasewise.engine.limits import Limits

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Builder:
    """Recipes bound to a model: what placements make their engines from. `methods` are those of requests that name no
    recipe."""

    model: Model
    methods: Mapping[str, Any]
    limits: Limits
    _: KW_ONLY
    load: Callable[[str], Model]  # finds second models, each once
    clock: Callable[[], float] = time.monotonic
    spec: EngineSpec | None = None
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name, as `parse_recipes` gives them

    def __post_init__(self) -> None:
        self.load = cache(self.load)  # shared by all engines of a placement
        self._launches = False  # whether the placement has asked for workers

    def build(self) -> Placed:
        """The placement, ready for requests."""
        self._check_tiers()
        placed: Placed = self.methods["place"].build(self)
        if self._launches:
            return placed
        if self.limits.cluster not in ("auto", "inline"):
            raise UserError(
                f"cluster {self.limits.cluster} needs a placement with several workers; the chosen one runs in one "
                f"engine. {_workers()}"
            )
        for methods in (self.methods, *self.recipes.values()):
            store = methods["store"]
            if self.limits.kv_disk is None and store.wire(kv_shapes(self.model), 1) is not None:
                say_nothing_travels(type(store).__module__.rpartition(".")[2])
        return placed

    @property
    def budget(self) -> int:
        return self.limits.budget

    @property
    def cores(self) -> list[int]:
        return cores_here()

    def parsed(self, recipes: Mapping[str, Mapping[str, str | None]]) -> dict[str, dict[str, Any]]:
        """Further recipes, as `build` makes those of a spec. Raises UserError."""
        assert self.spec is not None
        found = parse_recipes(self.spec.verbs, recipes)
        if self.limits.exact:
            refuse_lossy({"": self.methods, **found})
        return found

    def engine(self, phases: tuple[str, ...], share: float, ledger: Ledger | None = None) -> Engine:
        """A new engine for these phases, with counters and companions of its own. It has `share` of the KV budget, or
        the part of a pool that `ledger` keeps account of. All recipes run in it."""
        counters = Counters()
        ledger = ledger or Ledger(int(self.budget * share))
        tiers, identity = self._tiers()
        caching, every = self.limits.prefix_cache, {"": self.methods, **self.recipes}
        alone = not self.methods["place"].traits.launches
        assembly = Assembly(self.model, ledger, counters, defaults(), self.load, caching, tiers, identity, alone)
        try:
            recipes = {name: assembly.runtime(methods, phases) for name, methods in every.items()}
        except Exception:
            assembly.prefixes.close()  # a folder that nobody uses is not locked
            raise
        schedule = assembly.bind(self.methods, "schedule")
        departs = "decode" not in phases
        bind = partial(assembly.runtime, names=phases)
        parts = Parts(
            self.model,
            recipes,
            schedule,
            counters,
            self.clock,
            self.limits.max_running,
            departs,
            assembly.taps,
            bind,
            assembly.keep,
        )
        return Engine(parts)

    def _tiers(self) -> tuple[KVTiers | None, str]:
        """What lies below the budget, and what names the model there. Raises UserError for a folder that cannot be
        used."""
        if not self.limits.tiered:
            return None, ""
        if self.limits.kv_disk is None:
            return KVTiers(self.limits.kv_host, None), ""
        folder = BlockFolder(Path(self.limits.kv_disk), self.limits.kv_disk_bytes)
        kernels = library()
        identity = (
            __version__, weights_digest(self.model.files, folder.path / "models.json"), self.model.int8,
            self.model.device.type, str(self.model.form or ""), "" if kernels is None else Path(kernels._name).stem,
        )  # fmt: skip
        return KVTiers(self.limits.kv_host, folder), repr(identity)

    def _check_tiers(self) -> None:
        """Raise UserError where prefix blocks have a place below the budget, and nothing would ever come there."""
        if not self.limits.tiered:
            return
        option = "--kv-host" if self.limits.kv_disk is None else "--kv-disk"
        if not self.limits.prefix_cache:
            raise UserError(f"{option} keeps what the prefix cache has: leave --no-prefix-cache out")
        if self.methods["place"].traits.launches:
            name = catalog.name_of("place", self.methods["place"])
            raise UserError(f"{option} is for one engine in one process: leave --place {name} out")
        for recipe, methods in {"": self.methods, **self.recipes}.items():
            for method in methods.values():
                verb = method.traits.verb
                if not method.traits.shares_prefix:
                    where = f" of recipe {recipe!r}" if recipe else ""
                    name = f"{verb} {catalog.name_of(verb, method)}{where}"
                    raise UserError(f"{option} keeps prompts that others may reuse, and those of {name} are not: leave "
                                    "one of them out")  # fmt: skip

    def launcher(self) -> Launcher:
        """The launcher of a placement's workers. Raises UserError for a `cluster` that is unknown or not installed."""
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


def _workers() -> str:
    """Which placements have any."""
    known = [name for name in catalog.names("place") if catalog.build("place", name).traits.launches]
    return f"Add --place with one of {', '.join(known)}"


@cache
def say_nothing_travels(store: str) -> None:
    """Warn, once a process, of a store method that has nothing to do and may cost something all the same."""
    log.warning(
        "store %s is for KV on its way between engines, and here nothing travels: what it rounds is rounded all the "
        "same, and no byte is saved on the way. %s, or leave the store out",
        store, _workers(),
    )  # fmt: skip


def build(spec: EngineSpec) -> Builder:
    """Load the model of a spec and bind its methods. Raises UserError naming what does not fit."""

    def load(name: str) -> Model:
        return load_model(name, dtype=model.dtype, device=spec.device)

    methods, recipes = parse(spec.verbs), parse_recipes(spec.verbs, spec.recipes)
    if spec.limits.exact:
        refuse_lossy({"": methods, **recipes})
    model = load_model(spec.model, dtype=dtype_of(spec.dtype), device=spec.device, weights=spec.weights)
    return Builder(model, methods, spec.limits.on(model.device), load=load, spec=spec, recipes=recipes)
