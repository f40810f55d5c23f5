"""Methods made of methods: chosen by name, found in folders and in other packages, written back as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phasewise.methods.decode.selector as selectors
from phasewise import catalog
from phasewise.errors import UserError
from phasewise.options import parse
from tests.engine.dummies import METHODS, Chain, Mixed, Simple, Tree, forget, installed


@pytest.fixture(scope="module", autouse=True)
def dummies() -> Iterator[None]:
    with installed():
        yield


def test_parts_are_found_like_methods_and_are_none() -> None:
    assert catalog.names("draft.shape").keys() == {"chain", "deep", "tree"}
    assert "draft.shape" in catalog.folders("draft") and "decode.selector" in catalog.folders("decode")
    assert {"mixed", "simple", "draft_model"} <= catalog.names("draft").keys()
    assert not {"shape", "chain", "shape.chain"} & catalog.names("draft").keys()
    assert not {"selector", "dynamic"} & catalog.names("decode").keys()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("source=simple", lambda: Mixed(Simple())),
        ("source=(simple)", lambda: Mixed(Simple())),
        ("source=(simple:n=9,on=no)", lambda: Mixed(Simple(9, on=False))),
        ("source=simple,source.n=9,source.on=no", lambda: Mixed(Simple(9, on=False))),
        ("source=(simple:n=9),source.on=no", lambda: Mixed(Simple(9, on=False))),
        ("source=simple,base.x=2", lambda: Mixed(Simple(), Simple(6, 2.0))),  # the default's own knobs stay
        ("source=simple,base.n=2", lambda: Mixed(Simple(), Simple(2))),
        ("source=simple,base=simple", lambda: Mixed(Simple(), Simple())),  # its own defaults, not the field's
        ("source=simple,shape=chain", lambda: Mixed(Simple(), shape=Chain())),
        ("source=simple,shape.width=2", lambda: Mixed(Simple(), shape=Tree(2.0))),
        ("source=simple,shape.below.depth=1", lambda: Mixed(Simple(), shape=Tree(below=Chain(1)))),
        ("source=simple,shape.below=tree,shape.below.below=(tree:width=3)", lambda: Mixed(Simple(), shape=Tree(below=Tree(below=Tree(3.0))))),  # noqa: E501
        ("source=(mixed:source=(mixed:source=simple,k=3),k=2)", lambda: Mixed(Mixed(Mixed(Simple(), k=3), k=2))),
    ],
)  # fmt: skip
def test_parts_and_nested_methods(text: str, want: Callable[[], Mixed]) -> None:
    assert catalog.build("draft", f"mixed:{text}") == want()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "draft mixed needs a source: add source=.NAME.. Valid: .*simple"),
        ("source.n=3", "draft mixed: source is not chosen, but its n is given. Valid: .*simple"),
        ("source=simpel", "unknown draft method 'simpel'. Did you mean simple?"),
        ("source=snapkv", "unknown draft method 'snapkv'. It is a method of evict"),
        ("source=simple:n=3", "source=simple:n=3: a method with knobs stands in parentheses, .simple:n=3."),
        ("source=simple,shape=chian", "unknown shape 'chian'. Did you mean chain. Valid: chain, deep, tree"),
        ("source=simple,shape=chain,shape.width=3", "chain has no knob 'width'. It is a knob of tree. .*Valid: depth"),
        ("source=simple,shape.depth=3", "shape tree has no knob 'depth'. It is a knob of chain. .*Valid: .*width"),
        ("source=simple,shape.width=wide", "shape tree: knob width='wide' is not a valid float"),
        ("source=(simple:n=3),source.n=4", "source: n is given twice"),
        ("source=simple,width=3", "draft mixed has no knob 'width'. Did you mean .*shape.width"),
        ("source=simple,k=(simple)", "knob k holds no method: write k=VALUE"),
        ("source=simple,k.n=3", "draft mixed has no knob 'k.n'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        catalog.build("draft", f"mixed:{text}" if text else "mixed")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("deep", lambda: Tree(2.0, Tree(3.0, Chain(9)))),
        ("deep:inner.width=5", lambda: Tree(5.0, Tree(3.0, Chain(9)))),
        ("deep:inner.below.below.depth=1", lambda: Tree(2.0, Tree(3.0, Chain(1)))),
        ("deep:inner.below.below.depth=1,inner.below.width=7", lambda: Tree(2.0, Tree(7.0, Chain(1)))),
        ("deep:inner.below=chain", lambda: Tree(2.0, Chain())),
        ("deep:inner.below.depth=4,inner.below=chain", lambda: Tree(2.0, Chain(4))),
        ("deep:inner=tree", Tree),
        ("deep:inner=tree,inner.below.depth=4", lambda: Tree(below=Chain(4))),
    ],
)
def test_knobs_of_a_default_change_at_any_depth_and_the_rest_stays(text: str, want: Callable[[], Tree]) -> None:
    assert catalog.build("draft.shape", text).inner == want()


def test_what_is_chosen_has_no_knob_given_twice() -> None:
    for text in ("inner.below=(chain:depth=1),inner.below.depth=2", "inner=(tree:width=1),inner.width=2"):
        with pytest.raises(UserError, match="is given twice"):
            catalog.build("draft.shape", f"deep:{text}")


def test_an_object_may_be_given_instead_of_text() -> None:
    assert catalog.configure(Mixed, {"source": Simple(2), "k": 3}, "draft mixed") == Mixed(Simple(2), k=3)
    with pytest.raises(UserError, match="source is an object: set n in it"):
        catalog.configure(Mixed, {"source": Simple(2), "source.n": 3}, "draft mixed")


# ---- back to text
WORDS = st.text(max_size=6) | st.sampled_from(["none", "true", "a,b", "(x)", "it's", "-1", "k=v"])
SIMPLE = st.builds(
    Simple, n=st.integers(), x=st.floats(allow_nan=False, allow_infinity=False), word=WORDS, on=st.booleans(),
    mode=st.sampled_from(["low", "high", "none"]), maybe=st.none() | st.integers(), name=st.none() | WORDS,
    either=st.integers() | WORDS,
)  # fmt: skip
SHAPES: Any = st.recursive(
    st.builds(Chain, st.integers()), lambda inner: st.builds(Tree, st.floats(-1e9, 1e9), inner), max_leaves=4
)
DRAFTS: Any = st.recursive(
    SIMPLE, lambda inner: st.builds(Mixed, inner, inner, SHAPES, st.integers()), max_leaves=6
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(DRAFTS)
def test_every_method_can_be_built_from_its_spelling(method: Any) -> None:
    text = catalog.spell("draft", method)
    again = catalog.build("draft", text)
    assert again == method and hash(again) == hash(method) and repr(again) == repr(method)
    assert catalog.spell("draft", again) == text


def test_only_what_is_not_default_is_written() -> None:
    assert catalog.spell("draft", Mixed(Simple())) == "mixed:source=(simple)"
    assert catalog.spell("draft", Mixed(Simple(), Simple(6), Tree(below=Chain(5)))) == "mixed:source=(simple)"
    assert catalog.spell("draft", Mixed(Simple(), Simple())) == "mixed:source=(simple),base=(simple)"


def test_what_has_no_name_or_text_is_refused() -> None:
    class Stranger:
        pass

    with pytest.raises(UserError, match="Stranger is no draft method that can be named"):
        catalog.spell("draft", Mixed(Stranger()))
    with pytest.raises(UserError, match=r"draft simple: knob n=0\.5 cannot be written"):
        catalog.spell("draft", Simple(n=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(("verb", "name", "cls"), [e for e in catalog.every() if not catalog.slots_of(e[2])], ids=str)
def test_every_discovered_method_comes_back(verb: str, name: str, cls: type[Any]) -> None:
    for knobs in ({}, cls.neutral, getattr(cls, "tight", {})):
        method = cls(**{**knobs, **{f: Simple() for f, p in catalog.parts_of(cls).items() if p.default is None}})
        again = catalog.build(verb, catalog.spell(verb, method))
        assert again == method and hash(again) == hash(method), knobs
        assert repr(again) == repr(method) and " at 0x" not in repr(method)


def test_a_new_part_is_one_new_file(tmp_path: Any) -> None:
    (tmp_path / "all_at_once.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass AllAtOnce:\n    bar: float = 0.5\n\n"
        "    def __call__(self, masked):\n        return list(range(len(masked.confidence)))\n"
    )
    selectors.__path__.append(str(tmp_path))
    forget()
    try:
        method = catalog.build("decode", "block_diffusion:selector=all_at_once,selector.bar=0.25")
        assert type(method.selector).__name__ == "AllAtOnce" and method.selector.bar == 0.25
        assert catalog.spell("decode", method) == "block_diffusion:selector=(all_at_once:bar=0.25)"
    finally:
        selectors.__path__.remove(str(tmp_path))
        forget()


# ---- the methods that exist
def test_old_spellings_of_the_selectors_threshold_are_refused_with_the_new_one() -> None:
    with pytest.raises(UserError, match=r"no knob 'threshold'. Did you mean .*selector\.threshold"):
        catalog.build("decode", "block_diffusion:threshold=0.3")
    with pytest.raises(UserError, match="selector static has no knob 'threshold'. It is a knob of dynamic, entropy"):
        catalog.build("decode", "block_diffusion:selector=static,selector.threshold=0.3")


def test_a_drafter_can_be_chosen_by_its_option_or_inside_the_decode_method() -> None:
    outside = parse({"draft": "prompt_lookup:k=6", "verify": "match"})
    inside = parse({"decode": "speculative:draft=(prompt_lookup:k=6),verify=match"})
    assert inside == outside
    assert parse({"decode": catalog.spell("decode", outside["decode"])}) == outside
    assert (
        parse({"decode": "speculative:draft=(prompt_lookup)"})["verify"] == parse({"draft": "prompt_lookup"})["verify"]
    )
    assert parse({"draft": "mixed:source=(simple)"})["draft"] == Mixed(Simple())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"decode": "speculative"}, "decode speculative needs a draft method: add --draft NAME"),
        ({"decode": "speculative:draft=(prompt_lookup)", "draft": "draft_model"}, "draft is given twice"),
        ({"decode": "speculative:draft=(prompt_lookup),verify=match", "verify": "match"}, "verify is given twice"),
        ({"decode": "speculative:draft=(snapkv)"}, "unknown draft method 'snapkv'"),
        ({"draft": "prompt_lookup", "decode": "autoregressive"}, "does not use --draft prompt_lookup"),
    ],
)
def test_a_drafter_chosen_twice_or_not_at_all(options: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(options)


def test_the_dummies_are_all_installed() -> None:
    for where, cls in METHODS.items():
        kind, _, name = where.rpartition(".")
        assert catalog.method(kind, name) is cls and catalog.name_of(kind, cls(*[Simple()] * (cls is Mixed))) == name
