"""The catalogue of methods: the module name is the registry.

`methods/<verb>/<name>.py` holds one public frozen dataclass; its fields are the knobs. A field made by `part` holds
another such object, with knobs of its own: a method of a verb (`part("draft")`), or a file of a folder that a family of
methods shares (`part("decode.selector", ...)` is one of `methods/decode/selector/`). What names such a set of choices,
a verb or `<verb>.<folder>`, is called a kind. Third-party packages add to any kind through the entry-point group
`phasewise.methods`, entry names being `<kind>.<name>`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from phasewise.errors import UserError, near
from phasewise.spelling import Spelled, chained, parse_value, read, spell_value

VERBS = ("place", "schedule", "decode", "draft", "verify", "attend", "evict", "store", "skip", "sample")
CHAINED, THEN = ("sample",), "then"  # verbs whose methods may hand on to another one, and the field that holds it
QUESTIONS = {
    "place": "where does each phase run, and how does KV get there?",
    "schedule": "who runs in this step, with how many rows?",
    "decode": "which rows does a request bring, and what is made of the result?",
    "draft": "what might come next?",
    "verify": "which guesses stay?",
    "attend": "what may one query row read?",
    "evict": "which cached rows are given up?",
    "store": "in what form is KV kept, shared and shipped?",
    "skip": "which layers run for a row?",
    "sample": "logits to token",
}


@dataclass(frozen=True)
class PartField:
    """The content of a field made by `part`: a method of `kind`; `default` is the text of the one it holds unasked."""

    kind: str
    default: str | None = None


def part(kind: str, default: str | None = None) -> Any:
    """A dataclass field that holds a method of `kind`, chosen as `field=name` or `field=(name:knob=value)`; its knobs
    may also be written `field.knob=value`. Without a default it has to be chosen."""
    about = {"part": PartField(kind, default)}
    if default is None:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default_factory=lambda: build(kind, default), metadata=about)


@cache
def _installed() -> EntryPoints:
    """Methods of other packages. Reading what is installed takes some 7 ms, so it is read once."""
    return entry_points(group="phasewise.methods")


@cache
def names(kind: str) -> dict[str, str]:
    """{method name: 'module' or 'module:attribute'} of one kind, built-in ones first."""
    place = f"phasewise.methods.{kind}"
    try:
        paths = importlib.import_module(place).__path__
    except ModuleNotFoundError as error:
        if error.name != place or kind in VERBS:
            raise
        paths = []  # a folder of another package's family
    found = {m.name: f"{place}.{m.name}" for m in pkgutil.iter_modules(paths) if not m.ispkg}
    found = {name: where for name, where in found.items() if not name.startswith("_")}
    for entry in _installed():
        its, _, name = entry.name.rpartition(".")
        if its == kind:
            found.setdefault(name, entry.value)
    return dict(sorted(found.items()))


@cache
def folders(verb: str) -> list[str]:
    """The kinds `<verb>.<folder>` whose files are parts of the verb's methods; none for what is no verb."""
    if verb not in VERBS:
        return []
    inner = pkgutil.iter_modules(importlib.import_module(f"phasewise.methods.{verb}").__path__)
    found = {f"{verb}.{m.name}" for m in inner if m.ispkg and not m.name.startswith("_")}
    more = {entry.name.rpartition(".")[0] for entry in _installed()}
    return sorted(found | {kind for kind in more if kind.startswith(f"{verb}.")})


def method(kind: str, name: str) -> type[Any]:
    """The class of a method. Raises UserError with near matches for an unknown name."""
    verb, _, folder = kind.partition(".")
    if verb not in VERBS:
        raise UserError(f"unknown verb {verb!r}. {near(verb, VERBS)}")
    known = names(kind)
    if name not in known:
        others = [v for v in VERBS if v != kind and name in names(v)]
        elsewhere = f" It is a method of {others[0]}." if others else ""
        raise UserError(f"unknown {folder or f'{verb} method'} {name!r}.{elsewhere} {near(name, known)}")
    where, _, attribute = known[name].partition(":")
    module = importlib.import_module(where)
    if attribute:
        return typing.cast(type[Any], getattr(module, attribute))
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c)
        and c.__module__ == module.__name__
        and dataclasses.is_dataclass(c)
        and not c.__name__.startswith("_")
    ]
    assert len(own) == 1, f"{where} must hold exactly one public dataclass, found {[c.__name__ for c in own]}"
    return own[0]


def every() -> Iterator[tuple[str, str, type[Any]]]:
    """(verb, name, class) of every discovered method."""
    for verb in VERBS:
        for name in names(verb):
            yield verb, name, method(verb, name)


# ---- from text
def build(kind: str, text: str, **fixed: Any) -> Any:
    """The method written as `name` or `name:knob=value,knob=value`; `fixed` fills fields that hold other methods. Of a
    kind in CHAINED, `one+two` is `one:then=(two)`."""
    text, *others = links(kind, text)
    if others:
        name = split(text, kind)[0]
        if THEN not in parts_of(method(kind, name)):
            raise UserError(f"{kind} {text!r} must come last, as in {'+'.join([*others, text])}")
        fixed = {THEN: build(kind, "+".join(others)), **fixed}
    spelled = read(text, kind)
    return configure(method(kind, spelled.name), spelled.knobs, f"{kind} {spelled.name}", **fixed)


def known(kind: str, text: str) -> None:
    """Raise UserError if `text` names a method that there is not. Imports none that there is."""
    for link in links(kind, text):
        name = link.partition(":")[0].strip()
        if name not in names(kind):
            method(kind, name)


def links(kind: str, text: str) -> list[str]:
    """The methods that `text` chooses, one after the other; of most kinds that is one."""
    return chained(text) if kind in CHAINED else [text]


def split(text: str, what: str) -> tuple[str, Mapping[str, str | Spelled]]:
    """`name:knob=value,knob=value` as name and knobs. Raises UserError, beginning with `what`."""
    spelled = read(text, what)
    return spelled.name, spelled.knobs


def configure(cls: type[Any], knobs: Mapping[str, Any], what: str, **fixed: Any) -> Any:
    """An instance of a method from knobs given as text or values. Raises UserError naming knob, value and choices."""
    hints, parts = _hints(cls), parts_of(cls)
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}  # {part: its knobs, as far as they are written part.knob}
    for key, value in knobs.items():
        field, dot, rest = key.partition(".")
        if field in fixed:
            raise UserError(f"{what}: {field} is given twice, as --{field} and as a knob. Leave one of them out")
        if dot and field in parts:
            inner.setdefault(field, {})[rest] = value
        elif key not in hints:
            raise UserError(f"{what} has no knob {key!r}. {near(key, _vocabulary(cls))}")
        elif key not in parts and isinstance(value, Spelled):
            raise UserError(f"{what}: knob {key} holds no method: write {key}=VALUE, not {key}=({value})")
        elif key not in parts and isinstance(value, str):
            values[key] = parse_value(value, hints[key], f"{what}: knob {key}")
        else:
            values[key] = value
    for field, its in parts.items():
        if field in values or field in inner:
            values[field] = _held(its, values.get(field), inner.get(field, {}), f"{what}: {field}")
        elif its.default is None and field not in fixed:
            raise UserError(f"{what} needs a {field}: add {field}=(NAME). {near('', names(its.kind))}")
    return cls(**values, **fixed)


def _held(its: PartField, chosen: Any, inner: Mapping[str, Any], what: str) -> Any:
    """Returns the method that a part holds: the one `chosen`, else the default, with the knobs `inner` set in it."""
    if chosen is None and its.default is None:
        raise UserError(f"{what} is not chosen, but its {', '.join(inner)} is given. {near('', names(its.kind))}")
    if chosen is None:
        chosen, inner = _changed(read(its.default or "", what), inner), {}
    spelled = chosen
    if isinstance(spelled, str):
        if ":" in spelled:
            raise UserError(f"{what}={spelled}: a method with knobs stands in parentheses, ({spelled})")
        spelled = Spelled(str(spelled))
    if not isinstance(spelled, Spelled):
        if inner:
            raise UserError(f"{what} is an object: set {', '.join(inner)} in it")
        return spelled
    twice = set(inner) & set(spelled.knobs)
    if twice:
        raise UserError(f"{what}: {', '.join(sorted(twice))} is given twice. Leave one of them out")
    cls, knobs = method(its.kind, spelled.name), {**spelled.knobs, **inner}
    for key in knobs:
        if key.partition(".")[0] not in _hints(cls):
            others = [n for n in names(its.kind) if key.partition(".")[0] in _hints(method(its.kind, n))]
            owners = f"It is a knob of {', '.join(others)}. " if others else ""
            raise UserError(f"{what} {spelled.name} has no knob {key!r}. {owners}{near(key, _vocabulary(cls))}")
    return configure(cls, knobs, f"{what} {spelled.name}")


def _changed(default: Spelled, changes: Mapping[str, Any]) -> Spelled:
    """A default with knobs replaced, those of what it holds too: all else in it stays."""
    knobs: dict[str, Any] = {k: v for k, v in default.knobs.items() if k.partition(".")[0] not in changes}
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        held = knobs.get(head) if rest and head not in changes else None
        if isinstance(held, str):
            held = Spelled(held)
        if isinstance(held, Spelled):
            knobs[head] = _changed(held, {rest: value})
        else:
            knobs[key] = value
    return Spelled(default.name, knobs)


_HINTS: dict[type[Any], dict[str, Any]] = {}  # read once of each class


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        own = [base for base in reversed(cls.__mro__) if "__dataclass_fields__" in vars(base)]
        hints = {name: hint for base in own for name, hint in typing.get_type_hints(_fields_alone(base)).items()}
        _HINTS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _HINTS[cls]


def _fields_alone(cls: type[Any]) -> type[Any]:
    """A class with the annotations of this one and none that it inherits: those of a verb's base need not resolve."""
    return type(
        cls.__name__, (), {"__module__": cls.__module__, "__annotations__": vars(cls).get("__annotations__", {})}
    )


def _vocabulary(cls: type[Any]) -> list[str]:
    """The names that may stand before a `=`: the knobs, and those of all parts that come from a folder."""
    words = list(_hints(cls))
    for field, its in parts_of(cls).items():
        if its.kind not in VERBS:
            words += [f"{field}.{knob}" for name in names(its.kind) for knob in _hints(method(its.kind, name))]
    return list(dict.fromkeys(words))


def knobs_of(cls: type[Any]) -> dict[str, Any]:
    """{knob: type} of a method: its fields but for those that options of other verbs fill."""
    return {name: kind for name, kind in _hints(cls).items() if name not in slots_of(cls)}


def parts_of(cls: type[Any]) -> dict[str, PartField]:
    """{field: what it holds} of the fields made by `part`."""
    return {f.name: f.metadata["part"] for f in dataclasses.fields(cls) if "part" in f.metadata}


def slots_of(cls: type[Any]) -> list[str]:
    """Verbs whose options fill a field of this method: `draft: Any = part("draft")` is what --draft chooses."""
    return [field for field, its in parts_of(cls).items() if field == its.kind and field in VERBS]


def chain_of(held: Any) -> list[Any]:
    """A method and those it hands on to, in order."""
    found = [held]
    while THEN in parts_of(type(found[-1])):
        found.append(getattr(found[-1], THEN))
    return found


def filled(held: Any) -> dict[str, Any]:
    """{verb: method} of the slots of a method and of those it hands on to."""
    return {verb: getattr(link, verb) for link in chain_of(held) for verb in slots_of(type(link))}


# ---- back to text
def name_of(kind: str, held: Any) -> str:
    """The name under which the class of a method is found. Raises UserError if it is none of this kind."""
    cls, known = type(held), names(kind)
    likely = [name for name, where in known.items() if where.partition(":")[0] == cls.__module__]
    for name in (*likely, *(name for name in known if name not in likely)):
        if method(kind, name) is cls:
            return name
    raise UserError(f"{cls.__name__} is no {kind} method that can be named. {near(cls.__name__, known)}")


def spell(kind: str, held: Any) -> str:
    """The text of a method: `build(kind, spell(kind, m)) == m`. Only what is not as by default is written. Raises
    UserError for a method, or a value of a knob, that has no text."""
    return str(_spelled(kind, held))


def _spelled(kind: str, held: Any) -> Spelled:
    name, cls = name_of(kind, held), type(held)
    hints, parts = _hints(cls), parts_of(cls)
    knobs: dict[str, str | Spelled] = {}
    for field in dataclasses.fields(cls):
        value = getattr(held, field.name)
        if field.name in parts:
            its = parts[field.name]
            if its.default is None or value != build(its.kind, its.default):
                knobs[field.name] = _spelled(its.kind, value)
        elif field.default is dataclasses.MISSING or value != field.default:
            knobs[field.name] = spell_value(value, hints[field.name], f"{kind} {name}: knob {field.name}")
    return Spelled(name, knobs)
