"""From text to methods: one per verb, from `name:knob=value`. Only here do defaults have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise import catalog
from phasewise.errors import UserError

DEFAULTS = {
    "place": "colocated",
    "schedule": "sarathi",
    "decode": "autoregressive",
    "verify": "rejection",
    "attend": "dense",
    "evict": "none",
    "store": "slab",
    "skip": "all",
    "sample": "standard",
}
CLUSTERS = ("auto", "inline", "processes", "ray")
PARTS_OF_DECODE = ("draft", "verify")  # verbs whose methods live in a field of the decode method
WITH_DRAFT = {"decode": "speculative"}  # defaults once a drafter is chosen


def parse(options: Mapping[str, str | None]) -> dict[str, Any]:
    """{verb: method} from {verb: 'name:knob=value'}; verbs not given get their defaults. Raises UserError."""
    given = {verb: text for verb, text in options.items() if text}
    texts = {**DEFAULTS, **(WITH_DRAFT if "draft" in given else {}), **given}
    name = texts["decode"].partition(":")[0]
    slots = catalog.slots_of(catalog.method("decode", name))
    for verb in PARTS_OF_DECODE:
        if verb in slots and verb not in texts:
            raise UserError(f"decode {name} needs a {verb} method: add --{verb} NAME")
        if verb in given and verb not in slots:
            raise UserError(f"decode {name} has no use for --{verb} {given[verb]}: leave one of them out")
    wanted = [verb for verb in texts if verb != "decode" and (verb in slots or verb not in PARTS_OF_DECODE)]
    methods = {verb: catalog.build(verb, texts[verb]) for verb in wanted}
    methods["decode"] = catalog.build("decode", texts["decode"], **{verb: methods[verb] for verb in slots})
    return methods
