"""Why two methods cannot work together, told from their traits alone. The engine refuses by it, and tests ask it."""

from __future__ import annotations

from collections.abc import Callable

from phasewise.verbs.traits import PHASES, SHARED, Traits


def conflict(a: Traits, b: Traits) -> str | None:
    """The reason why the two methods cannot be in one recipe, with what to do about it; None: they can."""
    a, b = sorted((a, b), key=lambda traits: (traits.verb, traits.name))  # the reason does not depend on who is first
    for rule in RULES:
        for one, other in ((a, b), (b, a)):
            if (reason := rule(one, other)) is not None:
                return reason
    return None


def _slots(one: Traits, other: Traits) -> str | None:
    if other.verb in one.fills:
        return f"{one.label} also fills {other.verb}: leave out --{other.verb} {other.name}{other.inner}"
    twice = next((slot for slot in one.fills if slot in other.fills), None)
    if twice is not None:
        return f"{one.label} and {other.label} both fill {twice}: leave one of them out"
    return None


def _brought(one: Traits, other: Traits) -> str | None:
    for verb in one.brings:
        if verb in other.slots and verb not in one.composes:
            return f"{one.label} brings its own {verb}: leave out --{other.verb} {other.name}{other.inner}"
    return None


def _recomputed(one: Traits, other: Traits) -> str | None:
    what = f"{one.label} has decoded rows computed once more"
    if one.recomputes and other.frees_rows and other.acts("decode"):
        return f"{what}, and {other.label} gives up rows they need: choose one that is done with the prompt"
    if one.recomputes and other.block > 1:
        return f"{what}, and {other.label} finishes tokens in blocks: choose another decode method"
    return None


def _deferred(one: Traits, other: Traits) -> str | None:
    if one.defers_tokens and other.verb == "decode" and not other.single_rows:
        return (
            f"{one.label} takes decoded tokens one at a time, and {other.label} may bring several: choose one that "
            "decodes token by token, without drafts"
        )
    return None


def _pieces(one: Traits, other: Traits) -> str | None:
    if one.whole_prompts and other.block > 1:
        return f"{one.label} takes prompts whole, and {other.label} computes them in blocks: leave one of them out"
    return None


def _low_rank(one: Traits, other: Traits) -> str | None:
    if one.low_rank and other.low_rank and any(one.acts(phase) and other.acts(phase) for phase in PHASES):
        return (
            f"{one.label} and {other.label} both bring low-rank weights, and neither was trained with the other's: "
            "leave one of them out"
        )
    return None


def _base(one: Traits, other: Traits) -> str | None:
    if one.base_alone and other.verb == "lora":
        return (
            f"{one.label} was trained for the base model's KV, which {other.label} changes: choose another "
            f"{one.verb} method, or leave the adapter out"
        )
    return None


def _injected(one: Traits, other: Traits) -> str | None:
    if not one.injects_kv or other.accepts_injected:
        return None
    sees = other.own_attention or other.frees_rows or other.skips_rows or other.ranks_rows
    if sees and other.acts("prefill") and any(slot in SHARED for slot in other.slots):
        return (
            f"{one.label} takes rows of prompts from elsewhere, and {other.label} is not shown them: leave one of them "
            "out"
        )
    return None


def _blocks(one: Traits, other: Traits) -> str | None:
    if one.ranks_rows and other.block > 1:
        return (
            f"{one.label} ranks rows as a block of them fills, and {other.label} finishes tokens in blocks of its own. "
            "Choose another decode method, or store int8"
        )
    if not one.packs_blocks:
        return None
    if other.skips_rows:
        why = "lets single rows pass layers by"
    elif other.frees_rows:
        why = "gives single rows up"
    elif other.joins_tokens:
        why = "has several tokens share a row, so that positions go without rows"
    elif other.own_attention or other.shared_reads:
        why = "chooses among rows, or reads those of several requests at once, whose form changes"
    else:
        return None
    return (
        f"{one.label} packs finished rows in blocks: {other.label} {why}. Leave out --{other.verb}, or choose store "
        "slab or int8"
    )


def _begun(one: Traits, other: Traits) -> str | None:
    if not one.begins_rows or not other.acts("decode"):
        return None
    if "skip" in other.slots:
        why = "decides which layers run"
    elif other.frees_rows or other.ranks_rows:
        why = "ranks rows by what all layers have seen of a step's"
    elif other.own_attention:
        why = "chooses what rows read, from layer to layer"
    else:
        return None
    return (
        f"{one.label} has guesses run the first layers before the others, one by one, and {other.label} {why}: choose "
        "another drafter, or leave the other method out"
    )


RULES: tuple[Callable[[Traits, Traits], str | None], ...] = (
    _slots, _brought, _recomputed, _deferred, _pieces, _low_rank, _base, _injected, _blocks, _begun,
)  # fmt: skip
