"""The catalogue of methods: the module name is the registry.

`methods/<verb>/<name>.py` holds one public frozen dataclass; its fields are the knobs. Third-party packages add methods
through the entry-point group `phasewise.methods`, entry names being `<verb>.<name>`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from phasewise.errors import UserError, near

VERBS = ("place", "schedule", "decode", "draft", "verify", "attend", "evict", "store", "skip", "sample")
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


@cache
def names(verb: str) -> dict[str, str]:
    """{method name: 'module' or 'module:attribute'} of one verb, built-in ones first."""
    package = importlib.import_module(f"phasewise.methods.{verb}")
    found = {m.name: f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)}
    found = {name: where for name, where in found.items() if not name.startswith("_")}
    for entry in entry_points(group="phasewise.methods"):
        if entry.name.startswith(f"{verb}."):
            found.setdefault(entry.name.removeprefix(f"{verb}."), entry.value)
    return dict(sorted(found.items()))


def method(verb: str, name: str) -> type[Any]:
    """The class of a method. Raises UserError with near matches for an unknown name."""
    if verb not in VERBS:
        raise UserError(f"unknown verb {verb!r}. {near(verb, VERBS)}")
    known = names(verb)
    if name not in known:
        raise UserError(f"unknown {verb} method {name!r}. {near(name, known)}")
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


def build(verb: str, text: str, **fixed: Any) -> Any:
    """The method written as `name` or `name:knob=value,knob=value`; `fixed` fills fields that hold other methods."""
    name, knobs = split(text, verb)
    return configure(method(verb, name), knobs, f"{verb} {name}", **fixed)


def split(text: str, what: str) -> tuple[str, dict[str, str]]:
    """`name:knob=value,knob=value` as name and knobs. Raises UserError, beginning with `what`."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    knobs = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"{what} {name}: {item!r} is not of the form knob=value")
        knobs[key.strip()] = value.strip()
    return name, knobs


def configure(cls: type[Any], knobs: dict[str, Any], what: str, **fixed: Any) -> Any:
    """An instance of a method from knobs given as text or values. Raises UserError naming knob, value and choices."""
    known = knobs_of(cls)
    values: dict[str, Any] = {}
    for key, value in knobs.items():
        if key not in known:
            raise UserError(f"{what} has no knob {key!r}. {near(key, known)}")
        values[key] = _parse(value, known[key], f"{what}: knob {key}") if isinstance(value, str) else value
    return cls(**values, **fixed)


def knobs_of(cls: type[Any]) -> dict[str, Any]:
    """{knob: type} of a method: its fields but for slots."""
    hints, slots = typing.get_type_hints(cls), slots_of(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in slots}


def slots_of(cls: type[Any]) -> list[str]:
    """Verbs whose methods this one holds: fields named after a verb, but for plain numbers (how many decode)."""
    hints = typing.get_type_hints(cls)
    return [f.name for f in dataclasses.fields(cls) if f.name in VERBS and hints[f.name] not in (int, float)]


def _parse(text: str, kind: Any, what: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        choices = [str(c) for c in typing.get_args(kind)]
        if text not in choices:
            raise UserError(f"{what}={text!r}: choose one of {', '.join(choices)}")
        return typing.get_args(kind)[choices.index(text)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise UserError(f"{what}={text!r} is not a truth value: say true or false")
        return text.lower() in ("true", "1", "yes", "on")
    try:
        return kind(text)
    except (TypeError, ValueError):
        raise UserError(f"{what}={text!r} is not a valid {getattr(kind, '__name__', kind)}") from None
