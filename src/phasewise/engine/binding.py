"""Methods bound to an engine: one runtime for equal methods, and a phase's four slots filled from what was chosen.

Three traits of a method reach beyond its verb (verbs/traits.py):

- `fills`: one runtime object fills these slots as well. Where it binds to None, because it does nothing with these
  knobs, all of them go the plain way.
- `phases`: other phases are left to the default of the verb (attend, evict and skip). A method that evicts beside its
  own verb does so in all phases: it must hear of the rows that others have read.
- `brings`: a decode method has runtimes of its own for these slots, which `bring` gives. Of the slots that it also
  `composes`, it is given the user's runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from phasewise import catalog
from phasewise.engine.lora import Lora
from phasewise.errors import UserError
from phasewise.step.phase import Phase
from phasewise.verbs.conflict import conflict
from phasewise.verbs.host import Host
from phasewise.verbs.traits import SHARED, Traits

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.speculation.companion import Companion

HOLDS = {"prefill": attrgetter("prefilling")}  # which requests a phase holds; one that says nothing holds all others
Methods = Mapping[str, Any]  # a method per verb


def settle(methods: Methods, defaults: Methods) -> dict[str, Any]:
    """The methods, with those that fill several slots put into all of them. Raises UserError for two that cannot work
    together (verbs/conflict.py)."""
    traits: dict[int, Traits] = {id(method): method.traits for method in methods.values()}  # most make it when asked
    for home, method in methods.items():
        verb = traits[id(method)].verb
        if verb != home and methods.get(verb) is not method:
            raise UserError(f"{label(home, method)} says it is a method of {verb}: choose it as --{verb}")
    acting = [method for method in _each(methods) if method != defaults.get(traits[id(method)].verb)]
    for method in acting:
        slot = next((slot for slot in traits[id(method)].fills if slot not in SHARED), None)
        if slot is not None:
            raise UserError(f"{named(method).label} cannot fill {slot}: only {', '.join(SHARED)} can be shared")
    for one, other in combinations(acting, 2):
        if conflict(traits[id(one)], traits[id(other)]) is not None:
            raise UserError(conflict(named(one), named(other)))
    settled = dict(methods)
    for method in acting:
        settled |= dict.fromkeys(traits[id(method)].fills, method)
    return settled


def chosen(methods: Methods, defaults: Methods) -> list[Any]:
    """Each method that is not its verb's default, once."""
    return [method for method in _each(methods) if method != defaults.get(method.traits.verb)]


def _each(methods: Methods) -> list[Any]:
    """The methods, one that takes the place of several verbs once."""
    return list({id(method): method for method in methods.values()}.values())


def named(method: Any) -> Traits:
    """The traits of a method, with its name for messages."""
    traits: Traits = method.traits
    return replace(traits, name=name(traits.verb, method))


def in_phase(method: Any, phase: str, default: Any) -> Any:
    """The method, or the default of its verb in a phase that the method leaves alone."""
    return method if method.traits.acts(phase) else default


def label(verb: str, method: Any) -> str:
    return f"{verb} {name(verb, method)}{method.traits.inner}"


def name(verb: str, method: Any) -> str:
    """Returns the name by which the user knows a method, for messages."""
    if isinstance(method, Lora):
        return method.name
    try:
        return catalog.name_of(verb, method)
    except UserError:
        return type(method).__name__


@dataclass(frozen=True)
class _Bound:
    """A method, its runtime, the second models it asked for, and the layers whose output it wants to see."""

    method: Any
    runtime: Any
    companions: tuple[Companion, ...]
    taps: frozenset[int]


class Bindings:
    """The runtimes of one engine, and the phases made of them. `defaults` holds a method per verb.

    Equal methods are bound once, so recipes that share a method share its runtime, and rows of both go through it
    together. That is safe because a runtime may remember only what does not depend on who asks: what it knows of a
    request lies in the request's drawer, under a name. A method that another one holds (a drafter, a part) is bound by
    its holder and shared only together with it. Methods that cannot be hashed are told apart by identity. Another host
    (another sample method, say) needs bindings of its own.
    """

    def __init__(self, host: Host, defaults: Methods) -> None:
        self.host, self.defaults = host, defaults
        self._bound: dict[Any, _Bound] = {}
        self._phases: dict[tuple[str, int, int, int, int], Phase] = {}
        self._asked: list[Companion] = []  # every second model, in order
        ask = host.companion

        def companion(name: str, model: Model, *kind: type[Companion]) -> Companion:
            self._asked.append(ask(name, model, *kind))
            return self._asked[-1]

        host.companion = companion

    def bind(self, method: Any) -> Any:
        """The runtime of a method; the same one for an equal method."""
        return self._find(method).runtime

    def _find(self, method: Any) -> _Bound:
        try:
            hash(method)
            key: Any = (type(method), method)
        except TypeError:
            key = id(method)  # which stays its own: the method is kept
        if key not in self._bound:
            before, every, self.host.taps = len(self._asked), self.host.taps, set()
            try:
                runtime = self.host.bind(method)
            finally:
                taps, self.host.taps = frozenset(self.host.taps), every
            every |= taps
            self._bound[key] = _Bound(method, runtime, tuple(self._asked[before:]), taps)
        return self._bound[key]

    def companions(self, methods: Methods, names: Sequence[str]) -> list[Companion]:
        """The second models that follow the requests of a recipe with these phases."""
        methods = settle(methods, self.defaults)
        used = [methods["decode"]]
        used += [self._acting(methods, verb, name) for verb in SHARED for name in names]
        return list(dict.fromkeys(companion for method in used for companion in self._find(method).companions))

    def phases(self, methods: Methods, names: Sequence[str]) -> list[Phase]:
        """One recipe's phases of these names; the same objects for equal ones. Raises UserError where methods do not go
        together (see `settle`)."""
        methods = settle(methods, self.defaults)
        return [self._phase(methods, name) for name in names]

    def _acting(self, methods: Methods, verb: str, phase: str) -> Any:
        """The method that fills a slot of a phase."""
        method = methods[verb]
        beside = verb == "evict" and method.traits.verb != verb
        return method if beside else in_phase(method, phase, self.defaults[verb])

    def _phase(self, methods: Methods, phase: str) -> Phase:
        decode = methods["decode"]
        runtime = self.bind(decode)
        slots = {verb: self.bind(self._acting(methods, verb, phase)) for verb in SHARED}
        if slots["attend"] is None:
            slots["attend"] = self.bind(self.defaults["attend"])
        traits: Traits = decode.traits
        for verb in traits.brings if traits.acts(phase) else ():
            assert verb in SHARED, f"a decode method brings {', '.join(SHARED)}, not {verb}"
            chosen = self._acting(methods, verb, phase)
            slots[verb] = runtime.bring(verb, None if chosen == self.defaults[verb] else slots[verb])
        key = phase, id(runtime), id(slots["attend"]), id(slots["evict"]), id(slots["skip"])
        if key not in self._phases:
            whole = any(self._acting(methods, verb, phase).traits.whole_prompts for verb in SHARED)
            taps = self._find(decode).taps
            made = Phase(
                phase, runtime, slots["attend"], slots["evict"], slots["skip"], HOLDS.get(phase), whole, taps=taps
            )
            self._phases[key] = made
        return self._phases[key]
