"""The grammar of options: every tree comes back from its text, and every mistake is pointed at."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.spelling import Quoted, Spelled, parse_value, read, spell_value

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,6}", fullmatch=True)
KEYS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
METHODS = st.recursive(
    st.builds(Spelled, NAMES),
    lambda inner: st.builds(Spelled, NAMES, st.dictionaries(KEYS, st.text() | st.builds(Quoted, st.text()) | inner)),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(METHODS)
def test_every_method_comes_back_from_its_text(method: Spelled) -> None:
    assert read(str(method), "draft") == method


def test_what_is_written_by_hand() -> None:
    assert read("rasd : base = (draft_model:k=4) , source=( retrieval ),deep=(a:b=(c:d=(e))),", "draft") == Spelled(
        "rasd",
        {
            "base": Spelled("draft_model", {"k": "4"}),
            "source": Spelled("retrieval"),
            "deep": Spelled("a", {"b": Spelled("c", {"d": Spelled("e")})}),
        },
    )
    assert read("m:path=/a (1)/b=c,q='it''s, (so)',empty=", "x").knobs == {
        "path": "/a (1)/b=c", "q": "it's, (so)", "empty": "",
    }  # fmt: skip
    assert read("snapkv", "evict") == read("snapkv:", "evict") == Spelled("snapkv")


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("rasd:base=(draft_model:k=4", 27, "')' for the '(' at character 11"),
        ("rasd:base=(draft_model:k=4))", 28, "',' or the end"),
        ("rasd:base=(draft_model)k=4", 24, "',' or the end"),
        ("rasd:base=()", 12, "the name of a method"),
        ("rasd:base=(a:b=(:c=1))", 17, "the name of a method"),
        ("rasd:base=(draft_model:k)", 25, "knob=value, '=' after 'k'"),
        ("rasd:k", 7, "knob=value, '=' after 'k'"),
        ("rasd:=4", 6, "knob=value"),
        ("rasd:k=1,k=2", 10, "another knob, 'k' being given already"),
        ("rasd:k='4", 10, "a quote to close the one at character 8"),
        ("rasd:k='4'5", 11, "',' or the end"),
        ("rasd:k=a(b", 11, "')'"),
        ("rasd)", 5, "',' or the end"),
        ("rasd(k=3)", 5, "',' or the end"),
    ],
)
def test_mistakes_are_pointed_at(text: str, at: int, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        read(text, "draft")
    said = str(raised.value)
    assert said.startswith(f"draft {text!r}, character {at}: expected {expected}"), said
    assert said.endswith("the text ends" if at > len(text) else f"found {text[at - 1 : at + 11]!r}"), said


FINITE = st.floats(allow_nan=False, allow_infinity=False)
KINDS: list[tuple[Any, Any]] = [
    (int, st.integers()),
    (float, FINITE),
    (bool, st.booleans()),
    (str, st.text()),
    (Literal["a", "none", 3], st.sampled_from(["a", "none", 3])),
    (int | None, st.integers() | st.none()),
    (bool | None, st.booleans() | st.none()),
    (str | None, st.text() | st.none() | st.sampled_from(["none", "None", ""])),
    (Literal["a", "b"] | None, st.sampled_from(["a", "b", None])),
    (int | str, st.integers() | st.text() | st.integers().map(str)),
    (int | float | None, st.integers() | FINITE | st.none()),
]


@settings(deadline=None)
@given(st.data())
def test_every_value_comes_back_from_its_text(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(KINDS))
    value = data.draw(values)
    written = str(Spelled("m", {"k": spell_value(value, kind, "m: knob k")}))
    text = read(written, "x").knobs["k"]
    assert isinstance(text, str)
    found = parse_value(text, kind, "m: knob k")
    assert type(found) is type(value) and found == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [("half", float), (0.5, int), (None, int), ("c", Literal["a", "b"]), ([1, 2], int), (math.inf, float)],
)
def test_a_value_without_text_is_refused(value: Any, kind: Any) -> None:
    with pytest.raises(UserError, match="knob k=.* cannot be written as text"):
        spell_value(value, kind, "m: knob k")


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("maybe", bool, "'maybe' is not a truth value"),
        ("c", Literal["a", "b"], "choose one of a, b"),
        ("c", Literal["a", "b"] | None, "choose one of a, b"),
        ("x", int | None, "'x' is not a valid int"),
        ("none", int, "'none' is not a valid int"),
        ("inf", float, "'inf' is not a finite number: choose one that is"),
        ("nan", float | None, "'nan' is not a finite number"),
        ("-1e999", float, "'-1e999' is not a finite number"),
    ],
)
def test_a_wrong_value_is_named(text: str, kind: Any, why: str) -> None:
    with pytest.raises(UserError, match=f"m: knob k.*{why}"):
        parse_value(text, kind, "m: knob k")
