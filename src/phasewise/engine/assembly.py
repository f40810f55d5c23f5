"""From recipes to the runtimes of one engine. Methods that are equal are bound once, whoever names them, so that steps
of mixed recipes group well and second models follow a request once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from phasewise.engine.binding import Bindings, Methods, in_phase
from phasewise.engine.lora import LORA, Loras
from phasewise.engine.refusals import refuse_blocks, refuse_sinks, refuse_tiers
from phasewise.engine.runtime import Runtime
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw, RowFormat, block_format
from phasewise.kv.prefix import PrefixCache
from phasewise.kv.store import Sharing, Store
from phasewise.kv.tiers.tiers import KVTiers
from phasewise.kv.wire import Wire
from phasewise.speculation.companion import Companion
from phasewise.step.phase import Phase
from phasewise.verbs.host import Host
from phasewise.verbs.slot import SlotRuntime
from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters


class Assembly:
    """Puts the runtimes of one engine together. `defaults`: what phases have where nothing is chosen, by verb; `load`
    finds second models; `caching`: whether prompts share prefixes; `tiers`: what lies below their budget."""

    def __init__(
        self, model: Model, ledger: Ledger, counters: Counters, defaults: Methods, load: Callable[[str], Model],
        caching: bool, tiers: KVTiers | None = None, identity: str = "", alone: bool = True,
    ) -> None:  # fmt: skip
        """`identity`: what else shapes rows that outlive this process (the weights, above all). `alone`: no request
        leaves for another engine, or comes from one."""
        self.model, self.ledger, self.counters, self.defaults, self.caching = model, ledger, counters, defaults, caching
        self.taps: set[int] = set()
        self.prefixes = PrefixCache(ledger, tiers)
        self._identity, self._alone = identity, alone
        self.loras = Loras(model, self.prefixes)
        self._load = load
        self._bindings: list[tuple[Any, Bindings]] = []  # by sample method: a host has one
        self._forms: list[tuple[Any, int, RowFormat, Wire | None]] = []

    def bind(self, methods: Methods, verb: str) -> Any:
        """The runtime of a recipe's method, bound for its sample method."""
        return self._of(methods["sample"]).bind(methods[verb])

    def runtime(self, methods: Methods, names: Sequence[str]) -> Runtime:
        """Returns what a recipe's requests run with in the phases of these names."""
        bindings = self._of(methods["sample"])
        phases = bindings.phases(methods, names)
        lora = self.loras.load(methods[LORA]) if LORA in methods else None
        evict = phases[0].evict
        traits: Traits = methods["decode"].traits
        unit = traits.block
        format, wire = self._form(methods["store"], unit)
        refuse_blocks(format, methods["store"], kv_shapes(self.model))
        refuse_sinks(self.model.config, methods["attend"], self.defaults["attend"])
        key = self._prefix_key(methods, names[0]) if self.caching else None
        shapes, counters = kv_shapes(self.model), self.counters
        private = 1 if evict is None else max(1, evict.observes)
        slots: list[SlotRuntime | None] = []
        for own in phases:
            slots += own.attend, own.evict, own.skip, own.decode
        several = {id(one): one for one in slots if one is not None}.values()
        keeps = [each.beside for each in several if each.beside is not None]
        drawers = [each.drawer for each in several if each.drawer is not None]
        shared = Sharing(
            key, private, unit, self.prefixes, partial(methods["store"].blocks, bindings.host, shapes),
            by_reference=self._by_reference(methods, phases, format, [*keeps, *drawers, wire]),
            beside=phases[0].decode.token_rows,
        )  # fmt: skip
        store = Store(shapes, format, ledger=self.ledger, counters=counters, sharing=shared, wire=wire)
        store.book(keeps, drawers)
        places = [own.evict.places for own in phases if own.evict is not None]
        if traits.joins_tokens:
            places.append(lambda layer, shape: 1)  # of all heads alike
        store.expect(places, any(own.late is not None for own in phases))
        takers = {id(method): method for method in methods.values() if method.traits.asks}.values()
        asks = [(method.traits.asks, bindings.bind(method)) for method in takers]
        return Runtime(
            phases, store, bindings.companions(methods, names), bindings.host.sample, traits, asks, lora=lora
        )

    def _by_reference(
        self, methods: Methods, phases: Sequence[Phase], format: RowFormat, also: Sequence[object]
    ) -> bool:  # fmt: skip
        """True if requests read cached prefixes where they lie: for a method that reads them once for all. Others copy
        them into contiguous rows of their own. So does a request whose rows may be evicted or skipped, given, left for
        others or travel, or whose rows no native kernel reads as they lie. `also`: what methods keep beside rows and in
        drawers, and the wire; anything but None speaks against it."""
        if any(each is not None for each in also) or any(own.evict or own.skip for own in phases):
            return False
        decode: Traits = methods["decode"].traits
        attend: Traits = methods["attend"].traits
        moves = decode.injects_kv or decode.retains_kv or bool(decode.brings) or not self._alone
        lie = (isinstance(format, Raw) or format.scaled) and block_format(format) is None
        return attend.shared_reads and not moves and lie and self.model.device.type == "cpu"

    def keep(self, runtimes: Collection[Runtime]) -> None:
        """These are all that there are: free cached prompts and adapters of others."""
        trees = {id(tree) for runtime in runtimes for tree in runtime.store.trees}
        self.prefixes.keep(lambda tree: id(tree) in trees)
        self.loras.keep(runtime.lora for runtime in runtimes)

    def _of(self, sample: Any) -> Bindings:
        for known, bindings in self._bindings:
            if _same(known, sample):
                return bindings
        host = Host(self.model, sample, self.counters, self._load, self._companion, self.taps)
        bindings = Bindings(host, self.defaults)
        host.sample = bindings.bind(sample)
        self._bindings.append((sample, bindings))
        return bindings

    def _companion(self, name: str, model: Model, kind: type[Companion] = Companion) -> Companion:
        store = Store(kv_shapes(model), Raw(), ledger=self.ledger, counters=self.counters)
        # nobody decodes with it
        phase = Phase(name, decode=None, attend=self.defaults["attend"], adapted=False)  # type: ignore[arg-type]
        return kind(name, model, store, phase, self.counters)

    def _form(self, method: Any, unit: int) -> tuple[RowFormat, Wire | None]:
        """In what form a store method keeps rows, and in what form they travel, if it has a say in that."""
        for known, of_unit, format, wire in self._forms:
            if _same(known, method) and of_unit == unit:
                return format, wire
        wire = method.wire(kv_shapes(self.model), unit)
        self._forms.append((method, unit, format := method.format(), wire))
        return format, wire

    def _prefix_key(self, methods: Methods, first: str) -> str | None:
        """Everything that shapes a prompt's KV besides its tokens (DESIGN law 10), `first` being the phase of prompts;
        None if a method says that what it makes of a prompt is of no use to others (`Traits.shares_prefix`)."""
        if not all(method.traits.shares_prefix for method in methods.values()):
            return None
        shaping = [methods[verb] for verb in ("store", "evict")]
        shaping += [in_phase(methods[verb], first, self.defaults[verb]) for verb in ("attend", "skip")]
        if not methods["decode"].traits.plain_prompts:
            shaping.append(methods["decode"])
        if self.prefixes.tiers is not None and self.prefixes.tiers.folder is not None:
            refuse_tiers(shaping[1:], self._of(methods["sample"]).host.artefacts)
        if LORA in methods:
            shaping.append((LORA, methods[LORA].digest))
        return f"{self._identity}{(self.model.config, self.model.dtype, shaping)!r}"


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def kv_shapes(model: Model) -> list[KVShape]:
    """Returns the shape of what each layer of a model caches for one token."""
    config = model.config
    shape = KVShape(config.kv_heads, config.head_dim, model.dtype, str(model.device))
    return [shape] * config.layers
