"""Methods bound to an engine: one runtime for equal methods, and a phase's four slots filled from what was chosen.

Three kinds of methods say more than their verb:

- A method with `slots = ("attend", "evict")`, its home verb first, fills all these slots with one runtime object. Where
  it binds to None, because it does nothing with these knobs, all of them go the plain way.
- A method with `phases = ("decode",)` leaves the other phases to the default of its verb (attend, evict and skip). One
  that evicts beside its own verb does so in all phases: it must hear of the rows that others have read.
- A decode method with `brings = ("attend", "skip")` has runtimes of its own for these verbs, in its phases:
  `runtime.bring(verb, chosen)` gives them. What the user chose for such a verb is refused, unless the method also says
  `composes = ("skip",)`: then it gets the user's runtime as `chosen`, which is None in all other cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.step.phase import Phase
from phasewise.verbs.host import Host

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.speculation.companion import Companion

SLOTS = ("decode", "attend", "evict", "skip")  # of a phase
SHARED = ("attend", "evict", "skip")  # those that a method of another verb may fill
HOLDS = {"prefill": attrgetter("prefilling")}  # which requests a phase holds; one that says nothing holds all others
Methods = Mapping[str, Any]  # a method per verb


def settle(methods: Methods, defaults: Methods) -> dict[str, Any]:
    """The methods with those that fill several slots put into all of them. Raises UserError, naming both, where a slot
    is claimed twice: by another method than the default, or by what a decode method brings and does not compose."""
    settled = dict(methods)
    owners: dict[str, str] = {}  # {slot: the verb whose method fills it}
    for home, method in methods.items():
        slots = tuple(getattr(method, "slots", ()))
        if slots and slots[0] != home and methods.get(slots[0]) is not method:
            raise UserError(f"{label(home, method)} says it is a method of {slots[0]}: choose it as --{slots[0]}")
        if not slots or slots[0] != home:
            continue  # the same object in another slot: settled before
        for slot in slots[1:]:
            if slot not in SHARED:
                raise UserError(f"{label(home, method)} cannot fill {slot}: only {', '.join(SHARED)} can be shared")
            other = methods.get(slot)
            if slot in owners:
                other_owner = label(owners[slot], methods[owners[slot]])
                raise UserError(f"{label(home, method)} and {other_owner} both fill {slot}: leave one of them out")
            if other is not None and other is not method and other != defaults[slot]:
                raise UserError(f"{label(home, method)} also fills {slot}: leave out --{slot} {name(slot, other)}")
            settled[slot], owners[slot] = method, home
    decode = settled.get("decode")
    for verb in getattr(decode, "brings", ()):
        chosen = settled.get(verb)
        if verb not in getattr(decode, "composes", ()) and chosen is not None and chosen != defaults[verb]:
            home = owners.get(verb, verb)
            raise UserError(f"{label('decode', decode)} brings its own {verb}: leave out --{home} {name(home, chosen)}")
    return settled


def in_phase(method: Any, phase: str, default: Any) -> Any:
    """The method, or the default of its verb in a phase that the method leaves alone."""
    return method if phase in getattr(method, "phases", (phase,)) else default


def label(verb: str, method: Any) -> str:
    return f"{verb} {name(verb, method)}"


def name(verb: str, method: Any) -> str:
    """What the user calls a method, for messages."""
    try:
        return catalog.name_of(verb, method) + str(getattr(method, "inner", ""))
    except UserError:
        return type(method).__name__


@dataclass(frozen=True)
class _Bound:
    """A method, its runtime, and the second models it asked for."""

    method: Any
    runtime: Any
    companions: tuple[Companion, ...]


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

        def companion(name: str, model: Model) -> Companion:
            self._asked.append(ask(name, model))
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
            before = len(self._asked)
            runtime = self.host.bind(method)
            self._bound[key] = _Bound(method, runtime, tuple(self._asked[before:]))
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
        beside = verb == "evict" and getattr(method, "slots", (verb,))[0] != verb
        return method if beside else in_phase(method, phase, self.defaults[verb])

    def _phase(self, methods: Methods, phase: str) -> Phase:
        decode = methods["decode"]
        runtime = self.bind(decode)
        slots = {verb: self.bind(self._acting(methods, verb, phase)) for verb in SHARED}
        if slots["attend"] is None:
            slots["attend"] = self.bind(self.defaults["attend"])
        brings = getattr(decode, "brings", ()) if phase in getattr(decode, "phases", (phase,)) else ()
        for verb in brings:
            assert verb in SHARED, f"a decode method brings {', '.join(SHARED)}, not {verb}"
            chosen = self._acting(methods, verb, phase)
            slots[verb] = runtime.bring(verb, None if chosen == self.defaults[verb] else slots[verb])
        if getattr(slots["attend"], "again", None) is not None:
            self._refuse_again(methods, slots, getattr(runtime, "unit", 1))
        self._refuse_pieces(methods, slots, runtime)
        self._refuse_deltas(methods, slots)
        if phase == "prefill" and hasattr(runtime, "given"):
            self._refuse_given(methods, slots)
        key = phase, id(runtime), id(slots["attend"]), id(slots["evict"]), id(slots["skip"])
        if key not in self._phases:
            made = Phase(phase, runtime, slots["attend"], slots["evict"], slots["skip"], HOLDS.get(phase))
            self._phases[key] = made
        return self._phases[key]

    @staticmethod
    def _refuse_pieces(methods: Methods, slots: Mapping[str, Any], runtime: Any) -> None:
        """Raise UserError where prompts have to come whole, or later rows one by one, and the decode method's don't."""
        decode = label("decode", methods["decode"])
        if getattr(slots["skip"], "late", None) is not None and not getattr(runtime, "singly", False):
            raise UserError(
                f"{label('skip', methods['skip'])} takes decoded tokens one at a time, and {decode} may bring several: "
                "choose one that decodes token by token, without drafts"
            )
        verb = next((verb for verb in SHARED if getattr(slots[verb], "whole", False)), None)
        if verb is not None and getattr(runtime, "unit", 1) > 1:
            home = getattr(methods[verb], "slots", (verb,))[0]
            raise UserError(
                f"{label(home, methods[verb])} takes prompts whole, and {decode} computes them in blocks: leave one of "
                "them out"
            )

    @staticmethod
    def _refuse_deltas(methods: Methods, slots: Mapping[str, Any]) -> None:
        """Raise UserError where rows would run with the low-rank weights of two methods."""
        homes: dict[int, str] = {}  # {weights: the verb whose method brings them}
        for verb in SHARED:
            if (delta := getattr(slots[verb], "delta", None)) is not None:
                homes.setdefault(id(delta), getattr(methods[verb], "slots", (verb,))[0])
        if len(homes) > 1:
            who = " and ".join(label(home, methods[home]) for home in homes.values())
            raise UserError(
                f"{who} both bring low-rank weights, and neither was trained with the other's: leave one of them out"
            )

    @staticmethod
    def _refuse_given(methods: Methods, slots: Mapping[str, Any]) -> None:
        """Raise UserError where a method has to see the rows of prompts as they are computed: some are not."""
        for verb in SHARED:
            idle = getattr(slots[verb], "everything", False) if verb == "attend" else slots[verb] is None
            if not idle and not getattr(methods[verb], "recalls", False):
                home = getattr(methods[verb], "slots", (verb,))[0]
                raise UserError(
                    f"{label('decode', methods['decode'])} takes rows of prompts from elsewhere, and "
                    f"{label(home, methods[verb])} is not shown them: leave one of them out"
                )

    @staticmethod
    def _refuse_again(methods: Methods, slots: Mapping[str, Any], unit: int) -> None:
        """Raise UserError where rows cannot be computed once more: they need all before them, one after another."""
        what = f"{label('attend', methods['attend'])} has decoded rows computed once more"
        keeps = "store" in getattr(methods["evict"], "slots", ())  # what comes with a store gives nothing up
        if slots["evict"] is not None and not keeps:
            evict = label("evict", methods["evict"])
            raise UserError(f"{what}, and {evict} gives up rows they need: choose one that is done with the prompt")
        if unit > 1:
            decode = label("decode", methods["decode"])
            raise UserError(f"{what}, and {decode} finishes tokens in blocks: choose another decode method")
