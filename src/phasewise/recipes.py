"""Recipes as text: named choices of methods for requests to pick from, the server's own but for the verbs they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from phasewise import catalog
from phasewise.errors import UserError, near

Verbs = Mapping[str, str | None]
ENGINE_WIDE = {
    "place": "it says where the engine's workers run",
    "schedule": "it shares each step out among the requests of all recipes",
}  # verbs that all recipes have in common, and why
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PARTS_OF_DECODE = ("draft", "verify")  # verbs whose methods live in a field of the decode method
NO_DRAFT = "none"  # in place of a drafter: no drafting, whatever would be drafted otherwise
DEFAULT = "default"  # what metrics call the recipe of requests that name none


def read(items: Iterable[str]) -> dict[str, dict[str, str]]:
    """{recipe: {verb: method}} from `NAME=VERB=METHOD ...`, verbs apart by spaces or semicolons. Raises UserError."""
    found: dict[str, dict[str, str]] = {}
    for item in items:
        name, equals, rest = item.partition("=")
        name, verbs = name.strip(), {}
        for part in re.split(r"[\s;]+", rest.strip()):
            verb, given, method = part.partition("=")
            if not (equals and given and method):
                raise UserError(
                    f"recipe {item!r} is not of the form NAME=VERB=METHOD, with more VERB=METHOD after spaces: "
                    "quote it as a whole; `phasewise methods` lists verbs and methods"
                )
            if verb in verbs:
                raise UserError(f"recipe {name!r} names {verb} twice")
            verbs[verb] = method
        if name in found:
            raise UserError(f"there are two recipes {name!r}: give each a name of its own")
        found[name] = verbs
    check(found)
    return found


def check(recipes: Mapping[str, Verbs]) -> None:
    """Raise UserError for what can be seen without importing a method: names, verbs, names of methods."""
    for name, verbs in recipes.items():
        if not NAME.fullmatch(name) or name == DEFAULT:
            why = "is what requests get that name none" if name == DEFAULT else "is not a name"
            raise UserError(f"recipe {name!r} {why}: take letters, digits, '.', '_' and '-', as in fast or long-2")
        for verb, text in verbs.items():
            if verb in ENGINE_WIDE:
                why = ENGINE_WIDE[verb]
                raise UserError(f"recipe {name!r} cannot have a {verb} of its own, for {why}: give --{verb} by itself")
            if verb not in catalog.VERBS:
                choices = set(catalog.VERBS) - ENGINE_WIDE.keys()
                raise UserError(f"recipe {name!r} names an unknown verb {verb!r}. {near(verb, choices)}")
            if text is not None and (verb, text) != ("draft", NO_DRAFT):
                catalog.known(verb, text)


def texts(given: Verbs, own: Verbs, defaults: Mapping[str, str]) -> dict[str, str]:
    """The verbs of one recipe: its `own` over those `given` to the server. What the server was given for a method that
    it does not use makes way: a drafter for one that does not draft, a decode method for a drafter's (`defaults`)."""
    mine, both = chosen(own), chosen(given)
    if own.get("draft") == NO_DRAFT:
        both = {verb: text for verb, text in both.items() if verb not in PARTS_OF_DECODE}
    both |= mine
    then = defaults["decode"] if "draft" in both else ""
    if "draft" in mine and "decode" not in mine and "draft" not in _slots(both.get("decode"), then):
        both |= defaults
    slots = _slots(both.get("decode") or then, then)
    return {verb: text for verb, text in both.items() if verb in mine or verb not in PARTS_OF_DECODE or verb in slots}


def chosen(options: Verbs) -> dict[str, str]:
    """The verbs for which a method is named."""
    return {verb: text for verb, text in options.items() if text and (verb, text) != ("draft", NO_DRAFT)}


def _slots(decode: str | None, then: str) -> list[str]:
    """The verbs whose methods `decode` holds, or who it hands on to, `then` if it names none; none of the default's."""
    if not decode:
        return []
    name, knobs = catalog.split(decode, "decode")
    cls = catalog.method("decode", name)
    hands_on = catalog.THEN in catalog.parts_of(cls)
    return _slots(str(knobs.get(catalog.THEN, then)), "") if hands_on else catalog.slots_of(cls)
