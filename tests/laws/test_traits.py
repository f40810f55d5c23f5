"""Traits: a method that holds another one forwards or refuses each of them, and what is declared is what is bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.kv.format import block_format
from phasewise.methods.decode._then import Handing
from phasewise.methods.draft.paced import Pacer
from phasewise.methods.draft.rasd import Fusion, fuse
from phasewise.methods.sample._rest import Chained
from phasewise.options import DEFAULTS, parse
from phasewise.request.params import Params
from phasewise.verbs.decode import Decode
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Sample
from phasewise.verbs.traits import Matches, Traits, joined
from tests import tiny
from tests.laws.settings import options, tight

# What a holder says for itself, whatever its part says: by method and trait.
OWN = {
    ("decode.speculative", "plain_prompts"): "its prompts are plain slices",
    ("decode.speculative", "margin"): "the largest draft, `max_nodes`",
    ("decode.kv_prediction", "plain_prompts"): "its prompts are not computed",
    ("decode.augment", "margin"): "its latents come on top",
    ("decode.augment", "single_rows"): "latents come together",
    ("draft.paced", "idles"): "it looks at nobody whose size is 0",
    ("draft.rasd", "idles"): "both must",
    ("draft.rasd", "late"): "what follows a base's chain does not follow the tree",
    ("draft.rasd", "drawn"): "it is the base that draws: a source that does is refused when it is bound",
    ("store.cachegen", "inner"): "it names the part itself",
}


def other(field: Field[Any]) -> Any:
    """A value that is not the default."""
    if field.name == "matches":
        return next(value for value in get_args(Matches) if value != field.default)
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, int):
        return field.default + 41
    if field.name == "phases":
        return ("decode",)
    return {str: "other", tuple: ("other",), frozenset: frozenset({"other"})}[type(field.default)]


TRAITS = [field for field in fields(Traits) if field.name not in ("verb", "name")]
HOLDERS = [
    (verb, name, part, its.kind)
    for verb, name, cls in catalog.every()
    for part, its in catalog.parts_of(cls).items()
    if its.kind in catalog.VERBS
]


def held(verb: str, name: str, part: str, inner: Any) -> Any:
    """The method with `inner` in one of its parts. Raises UserError where it refuses it."""
    cls = catalog.method(verb, name)
    others = {"draft": "prompt_lookup", "verify": "match"}
    rest = {p: catalog.build(its.kind, its.default or others[its.kind]) for p, its in catalog.parts_of(cls).items()
            if p != part and its.kind in catalog.VERBS}  # fmt: skip
    knobs = {"sharer": "tiny-draft"} if "sharer" in catalog.knobs_of(cls) else {}
    return cls(**knobs, **rest, **{part: inner})


@pytest.mark.parametrize(("verb", "name", "part", "kind"), HOLDERS, ids=lambda value: str(value))
def test_a_holder_forwards_or_refuses_every_trait(verb: str, name: str, part: str, kind: str) -> None:
    """Of all fields of `Traits`, those that come later included."""
    usual = {"decode": Traits("decode", plain_prompts=True), "draft": Traits("draft", drawn=False)}
    for field in TRAITS:
        if (f"{verb}.{name}", field.name) in OWN:
            continue
        said = replace(usual.get(kind, Traits(kind)), **{field.name: other(field)})

        @dataclass(frozen=True)
        class Inner(Method):
            @property
            def traits(self, said: Traits = said) -> Traits:
                return said

        try:
            outer = held(verb, name, part, Inner()).traits
        except UserError:
            continue
        mine, theirs = getattr(said, field.name), getattr(outer, field.name)
        if isinstance(mine, tuple | frozenset) and field.name != "phases":
            assert set(mine) <= set(theirs), f"{verb}.{name} drops {field.name} of its {part}"
        elif isinstance(mine, int) and not isinstance(mine, bool):
            assert theirs >= mine, f"{verb}.{name} drops {field.name} of its {part}"
        else:
            assert theirs == mine, f"{verb}.{name} drops {field.name} of its {part}"


def test_what_holders_say_for_themselves_is_still_so() -> None:
    """No exception outlives its reason."""
    names = {f"{verb}.{name}" for verb, name, *_ in HOLDERS}
    assert {method for method, _ in OWN} <= names and {trait for _, trait in OWN} <= {f.name for f in TRAITS}


def test_joined_keeps_what_either_says() -> None:
    for field in TRAITS:
        said = replace(Traits("draft"), **{field.name: other(field)})
        for both in (joined(said, Traits("draft")), joined(Traits("draft"), said)):
            assert getattr(both, field.name) == getattr(said, field.name), field.name


def members(base: type[Any]) -> set[str]:
    """What a verb's class asks of a runtime."""
    return {name for name in vars(base) if not name.startswith("_") or name == "__call__"}


WRAPPERS = [("draft", "paced", Drafter), ("draft", "rasd", Drafter), ("sample", "momentum", Sample),
            ("sample", "grammar", Sample), ("decode", "pie", Decode), ("decode", "kv_prediction", Decode),
            ("decode", "augment", Decode)]  # fmt: skip


@pytest.mark.parametrize(("verb", "name", "base"), WRAPPERS, ids=str)
def test_a_runtime_that_holds_one_leaves_nothing_to_the_defaults(verb: str, name: str, base: type[Any]) -> None:
    """Of all that its verb's class asks, what is added later included."""
    placed: Any = tiny.engine(options(verb, name))
    runtime = placed.parts.recipes[""]
    decode = runtime.phases[-1].decode
    made = {"draft": lambda: decode.drafter, "decode": lambda: decode, "sample": lambda: runtime.sample}[verb]()
    for member in members(base):
        defined = member in vars(made) or any(
            member in vars(cls) for cls in type(made).__mro__ if cls not in base.__mro__
        )
        assert defined, f"{type(made).__name__} leaves {member} to {base.__name__}"


# What is asked of a holder, by the parameter's name, and what the one inside answers, by the member's.
ASKED: dict[str, Any] = {
    "params": SimpleNamespace(ask={"it": 1}), "context": 100, "requests": ["request"], "budgets": [4], "rows": 5,
    "chance": 0.5, "tops": None,
}  # fmt: skip
ANSWERS = {"size": 1, "reach": 10, "rows": 1, "draft": [None], "propose": ["span"], "draws": True, "sort": 3,
           "think": True}  # fmt: skip
HOLDING: dict[str, tuple[type[Any], Callable[[Any], Any], set[str]]] = {  # class, around what is held, what is its own
    "paced": (Drafter, Pacer, {"size", "draft", "learn"}),
    "rasd, base": (Drafter, lambda inner: Fusion(0, inner, listening(Drafter, [])), {"late"}),
    "rasd, source": (
        Drafter, lambda inner: Fusion(0, listening(Drafter, []), inner),
        {"late", "draws", "sort", "think", "companion", "drawer"},
    ),
    "decode methods of prompts": (Decode, lambda inner: Handing(*binding("decode", inner)), set()),
    "sample methods": (Sample, lambda inner: Chained(*binding("sample", inner)), set()),
}  # fmt: skip


def listening(base: type[Any], heard: list[str]) -> Any:
    """A runtime that notes which of its members are asked."""

    def member(name: str) -> Callable[..., Any]:
        return lambda self, *args: (heard.append(name), ANSWERS.get(name))[1]

    asked = {name: member(name) for name in members(base) if callable(getattr(base, name))}
    return type("Listening", (base,), asked)()


def binding(verb: str, inner: Any) -> tuple[Any, Any]:
    """A host, and a method of which `inner` is the runtime."""
    return SimpleNamespace(bind=lambda method: inner), SimpleNamespace(traits=Traits(verb, asks=("it",)))


@pytest.mark.parametrize("name", HOLDING)
def test_whatever_a_holder_is_asked_it_asks(name: str) -> None:
    """Of all members of its class, what is added later included; but for what it does itself."""
    base, around, own = HOLDING[name]
    assert own <= members(base)
    heard: list[str] = []
    inner = listening(base, heard)
    inner.drawer, inner.beside, inner.companion, inner.coupling = object(), object(), object(), object()
    holder = around(inner)
    for member in sorted(members(base) - own):
        if not callable(getattr(base, member, None)):
            assert getattr(holder, member) is getattr(inner, member), member
            continue
        parameters = list(signature(getattr(base, member)).parameters)[1:]
        heard.clear()
        getattr(holder, member)(*(ASKED.get(parameter, parameter) for parameter in parameters))
        assert member in heard, f"{name} does not ask {member}"
    if base is Decode:
        assert holder.drawer is inner.drawer and holder.beside is inner.beside


def test_texts_reach_as_far_as_their_drafter_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: Any = tiny.engine({"draft": "prompt_lookup"})
    decode = placed.parts.recipes[""].phases[-1].decode
    monkeypatch.setattr(decode, "drafter", SimpleNamespace(reach=lambda context: context - 7))
    assert decode.reach(100) == 93


# ---- what is declared is what is bound
def acting() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for verb, name, cls in catalog.every():
        if verb in ("attend", "evict", "skip", "store") and name != DEFAULTS[verb]:
            yield verb, name, tight(verb, name)
            yield verb, name, cls.neutral


@pytest.mark.parametrize(("verb", "name", "knobs"), list(acting()), ids=str)
def test_traits_are_what_is_bound(verb: str, name: str, knobs: dict[str, Any]) -> None:
    """On a model whose context is long enough for the method to act: then a flag is there exactly where it acts."""
    placed: Any = tiny.engine(given := options(verb, name, knobs))
    traits, runtime = parse(dict(given))[verb].traits, placed.parts.recipes[""]
    assert traits.verb == verb
    format, phases = runtime.store.format, runtime.phases
    assert traits.packs_blocks == (block_format(format) is not None) and traits.ranks_rows == bool(
        (blocks := block_format(format)) and blocks.by_saliency
    )
    assert any(phase.delta is not None for phase in phases) <= traits.low_rank
    assert any(phase.attend.again is not None for phase in phases) == traits.recomputes
    assert any(phase.late is not None for phase in phases) == traits.defers_tokens
    assert any(phase.whole for phase in phases) == traits.whole_prompts
    assert any(not phase.dense for phase in phases) <= traits.own_attention
    assert any(phase.skip is not None and phase.skip.walk is None for phase in phases) == traits.skips_rows
    if verb == "evict":
        assert any(phase.evict is not None for phase in phases) <= traits.frees_rows
    for phase in phases:
        if not traits.acts(phase.name) and verb in ("attend", "skip"):
            assert phase.dense and phase.skip is None


# ---- a verifier that wants the drafter's thoughts has them, whoever holds the drafter
RAPID = "rapid:k=3,context=24,piece=4,query=8"


def outs(draft: str, verify: str = "transfer:eta=30") -> list[list[int]]:
    params = Params(max_tokens=48, ignore_eos=True)
    placed = tiny.engine({"draft": draft, "verify": verify, "schedule": "prefill_first"})
    return tiny.outs(tiny.run(placed, tiny.prompts(60, 41), params))


def test_transfer_acts_inside_holders_as_outside() -> None:
    """Greedy; the source of RASD finds nothing here, so that its guesses change no verdict."""
    alone = outs(RAPID)
    assert alone != outs(RAPID, "match"), "the drafter has a say"
    assert outs(f"paced:of=({RAPID})") == alone
    assert outs(f"rasd:base=({RAPID}),source=(prompt_lookup:min_match=64)") == alone
    assert outs(f"paced:of=(rasd:base=({RAPID}),source=(prompt_lookup:min_match=64))") == alone


@pytest.mark.parametrize("verify", ["transfer:eta=30", "match"])
@pytest.mark.parametrize("held", ["{}", "paced:of=({})", "rasd:base=({}),source=(prompt_lookup)"])
def test_drafts_say_what_was_thought_after_all_that_was_asked_only_if_it_is_wanted(held: str, verify: str) -> None:
    placed: Any = tiny.engine({"draft": held.format(RAPID), "verify": verify})
    drafter = placed.parts.recipes[""].phases[-1].decode.drafter
    while not hasattr(drafter, "thoughts"):
        drafter = drafter.base if hasattr(drafter, "base") else drafter.of
    assert drafter.thoughts == verify.startswith("transfer")


def test_fused_drafts_keep_what_was_thought() -> None:
    import torch

    thoughts = {(): torch.ones(9), (5,): torch.zeros(9)}
    base = Draft([5, 6], [-1, 0], thoughts=thoughts, likely=[0.9, 0.5])
    fused = fuse(base, Draft([5, 7], [-1, 0], likely=[0.4, 0.3]))
    assert fused.tokens == [5, 6, 7] and fused.thoughts is thoughts and fused.likely == [0.9, 0.5, 0.3]
    assert fuse(base, Draft([5, 7], [-1, 0])).likely is None, "guesses that nobody weighs are counted by their place"
