"""How each discovered method is set up on the tiny model, from what it declares about itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from phasewise import catalog
from phasewise.load import EMBEDDED

UNTRAINED = {  # knobs of methods that need what the tiny model has not: the laws hold with any weights, over any text
    "weights": "random:0",
    "store": "random:0",
}


def spell(verb: str, name: str, knobs: dict[str, Any] | None = None) -> str:
    """The text of a method with these knobs. One whose default is a model that ships with the package names a second
    model, and gets a tiny one; so does a method of a verb that it holds."""
    cls = catalog.method(verb, name)
    known = catalog.knobs_of(cls)
    second = {field.name: "tiny-draft" for field in dataclasses.fields(cls) if field.default in list(EMBEDDED)}
    held = {
        field: f"({spell(its.kind, its.default)})"
        for field, its in catalog.parts_of(cls).items()
        if field in known and its.kind in catalog.VERBS and its.default in catalog.names(its.kind)
    }
    usual = {field.name: field.default for field in dataclasses.fields(cls)}  # "none": it works without, if not told to
    drawn = {knob: value for knob, value in UNTRAINED.items() if knob in known and usual.get(knob) != "none"}
    drawn |= {"heads": "random:0"} if usual.get("heads") == "auto" else {}  # to others, heads are those of attention
    chosen = second | drawn | held | (knobs or {})
    return name + (":" + ",".join(f"{k}={v}" for k, v in chosen.items()) if chosen else "")


def tight(verb: str, name: str) -> dict[str, Any]:
    """Knobs at which the method bites within a few dozen tokens: what the laws are tested at."""
    return dict(getattr(catalog.method(verb, name), "tight", {}))


def options(verb: str, name: str, knobs: dict[str, Any] | None = None) -> dict[str, str]:
    """Verb options that put the method to work, at its tight knobs unless others are given, and what it needs."""
    given = {verb: spell(verb, name, tight(verb, name) if knobs is None else knobs)}
    if verb == "verify" or (verb == "decode" and "draft" in catalog.slots_of(catalog.method(verb, name))):
        given["draft"] = spell("draft", "draft_model", {"k": 3})
    return given


def slow(verb: str, name: str) -> dict[str, str]:
    """Verb options at which a method is its own slow reference; empty if plain decoding is."""
    knobs = getattr(catalog.method(verb, name), "reference", None)
    return {} if knobs is None else options(verb, name, knobs)


def discovered() -> list[tuple[str, str]]:
    return [(verb, name) for verb, name, _ in catalog.every()]


def guarantee(verb: str, name: str) -> str:
    return str(catalog.method(verb, name).guarantee)
