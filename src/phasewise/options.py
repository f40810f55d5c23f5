"""From text to methods: one per verb, from `name:knob=value`. Only here do defaults have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise import catalog
from phasewise.engine.binding import settle
from phasewise.errors import UserError
from phasewise.recipes import PARTS_OF_DECODE, Verbs, check, chosen, texts
from phasewise.spelling import read
from phasewise.verbs.traits import SHARED

DEFAULTS = {
    "place": "colocated",
    "schedule": "sarathi",
    "decode": "autoregressive",
    "verify": "rejection",
    "attend": "dense",
    "evict": "none",
    "store": "slab",
    "skip": "all",
    "sample": "grammar+budget_forcing",
}
CLUSTERS = ("auto", "inline", "processes", "ray")
WITH_DRAFT = {"decode": "speculative"}  # defaults once a drafter is chosen


def parse(options: Mapping[str, str | None]) -> dict[str, Any]:
    """{verb: method} from {verb: 'name:knob=value'}; verbs not given get their defaults, `draft="none"` no
    drafter. Raises UserError.

    The decode method's parts (a drafter, a verifier), or those of the one it hands on to, come from options or knobs.
    """
    return settle(built(options), defaults())


def _refuse(decode: str, verb: str, missing: bool, unused: str | None) -> None:
    """Raise UserError where a decode method lacks a part of itself, or was given one that it does not use."""
    if missing:
        raise UserError(f"decode {decode} needs a {verb} method: add --{verb} NAME")
    if unused is not None:
        raise UserError(f"decode {decode} does not use --{verb} {unused}: leave one of them out")


def built(options: Mapping[str, str | None]) -> dict[str, Any]:
    """`parse` without a look at whether the methods work together."""
    given = chosen(options)
    texts = {**DEFAULTS, **(WITH_DRAFT if "draft" in given else {}), **given}
    name, knobs = catalog.split(texts["decode"], "decode")
    cls = catalog.method("decode", name)
    slots, parts = catalog.slots_of(cls), catalog.parts_of(cls)
    within, handed = {key.partition(".")[0] for key in knobs}, _handed(cls, knobs, texts, given)
    for verb in PARTS_OF_DECODE:
        missing = verb in slots and parts[verb].default is None and verb not in {*texts, *within}
        _refuse(name, verb, missing, None if verb in slots or f"{catalog.THEN}.{verb}" in handed else given.get(verb))
    filled = [verb for verb in slots if verb in given or (verb in texts and verb not in within)]
    wanted = [verb for verb in texts if verb != "decode" and (verb in filled or verb not in PARTS_OF_DECODE)]
    methods = {verb: catalog.build(verb, texts[verb]) for verb in wanted}
    own = {verb: methods[verb] for verb in filled}
    methods["decode"] = catalog.configure(cls, {**knobs, **handed}, f"decode {name}", **own)
    methods |= {verb: held for verb, held in catalog.filled(methods["decode"]).items() if verb in PARTS_OF_DECODE}
    return methods


def _handed(cls: type[Any], knobs: Mapping[str, Any], texts: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    """Knobs by which options of verbs reach the method that a decode method hands on to."""
    if catalog.THEN not in catalog.parts_of(cls) or not (catalog.THEN in knobs or "draft" in given):
        return {}
    then = knobs.get(catalog.THEN, WITH_DRAFT["decode"])
    spelled = read(str(then), "decode")
    within = {key.removeprefix(f"{catalog.THEN}.").partition(".")[0] for key in (*spelled.knobs, *knobs)}
    slots = catalog.slots_of(catalog.method("decode", spelled.name))
    wanted = [verb for verb in slots if verb in given or (verb in texts and verb not in within)]
    return {catalog.THEN: then, **{f"{catalog.THEN}.{verb}": read(texts[verb], verb) for verb in wanted}}


def spell(methods: Mapping[str, Any]) -> dict[str, str]:
    """Options from which `parse` makes equal methods, for another process. Raises UserError for what has no text."""
    return {
        verb: catalog.spell(verb, method)
        for verb, method in methods.items()
        if verb not in PARTS_OF_DECODE and method.traits.verb == verb
    }


def defaults() -> dict[str, Any]:
    """The methods that phases have where nothing is chosen, by verb."""
    return {verb: catalog.build(verb, DEFAULTS[verb]) for verb in SHARED}


def parse_recipes(options: Verbs, recipes: Mapping[str, Verbs]) -> dict[str, dict[str, Any]]:
    """{recipe: {verb: method}}: what `parse` makes of `options` with each recipe's own verbs. Raises UserError."""
    check(recipes)
    parsed = {}
    for name, own in recipes.items():
        try:
            parsed[name] = parse(texts(options, own, WITH_DRAFT))
        except UserError as error:
            raise UserError(f"recipe {name!r}: {error}") from error
    return parsed


def lossy(methods: Mapping[str, Any]) -> list[str]:
    """The chosen methods that may change answers, as VERB=METHOD, each with the knobs at which it does not. Lossy ones
    that are just as they say to be neutral may not."""
    found = []
    for verb, method in ((verb, link) for verb, held in methods.items() for link in catalog.chain_of(held)):
        kind, home = type(method), method.traits.verb
        then = {field: getattr(method, field) for field in catalog.parts_of(kind) if field == catalog.THEN}
        if home == verb and kind.guarantee == "lossy" and not (kind.neutral and method == kind(**kind.neutral, **then)):
            neutral = f" (or say {catalog.spell(verb, kind(**kind.neutral, **then))})" if kind.neutral else ""
            found.append(f"{verb}={catalog.name_of(verb, method)}{neutral}")
    return found


def refuse_lossy(every: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError naming all lossy methods of recipes, "" being what requests get that name none."""
    own = lossy(every[""])
    found = [f"leave out --{text.replace('=', ' ', 1)}" for text in own]
    found += [
        f"leave out {text} of recipe {name!r}" for name in every for text in lossy(every[name]) if text not in own
    ]
    if found:
        raise UserError(f"exact refuses what may change answers: {'; '.join(found)}")
