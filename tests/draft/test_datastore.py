"""Datastores: what a search finds is what reading everything finds; files of strangers are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.methods.draft import _datastore
from phasewise.methods.draft._continuations import NOTHING
from phasewise.methods.draft._datastore import ORDERED, Datastore, encoded, load, vocabulary
from phasewise.model.source import Source

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6).filter(any)


@pytest.fixture(scope="module")
def pocket() -> Source:
    return files_of("pocket")


@given(texts=TEXTS, query=st.lists(st.integers(0, 3), max_size=20), shortest=st.integers(1, 3))
def test_equals_reading_everything(texts: list[list[int]], query: list[int], shortest: int) -> None:
    store = Datastore.of(texts)
    tokens = store.tokens.tolist()
    want: tuple[int, set[int]] = (0, set())
    for length in range(min(ORDERED, len(query)), shortest - 1, -1):
        end = query[-length:]
        ends = {at + length for at in range(len(tokens) - length + 1) if tokens[at : at + length] == end}
        if ends:
            want = (length, ends)
            break
    length, places = store.find(query, shortest, ORDERED)
    assert (length, set(places.tolist())) == want
    assert len(places) == len(want[1])


def test_a_continuation_ends_with_its_text() -> None:
    store = Datastore.of([[1, 2, 3], [1, 2, 4, 5]])
    _, places = store.find([9, 1, 2], 1, 4)
    assert sorted(store.continuations(places, 3).tolist()) == [[3, NOTHING, NOTHING], [4, 5, NOTHING]]


def test_what_was_saved_is_read_where_it_lies(pocket: Source, tmp_path: Path) -> None:
    made = encoded(pocket, ["import os\nimport sys\n", "def f(x):\n    return x\n"])
    made.save(tmp_path / "store", vocabulary(pocket), "two texts")
    read = load(tmp_path / "store", pocket)
    assert isinstance(read.tokens, np.memmap) and isinstance(read.order, np.memmap)
    assert (read.tokens.tolist(), read.order.tolist()) == (made.tokens.tolist(), made.order.tolist())
    with pytest.raises(UserError, match="store: no datastore can be written there"):
        made.save(tmp_path / "store", vocabulary(pocket), "again")


def test_what_is_not_right_is_refused_by_name(pocket: Source, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a datastore needs text"):
        Datastore.of([[], []])
    folder = tmp_path / "store"
    with pytest.raises(UserError, match=r"store: datastore\.json is missing"):
        load(folder, pocket)
    encoded(pocket, ["import os\n"]).save(folder, vocabulary(pocket), "a text")
    about = folder / _datastore.ABOUT
    facts = json.loads(about.read_text())
    about.write_text(json.dumps(facts | {"vocabulary": "0123456789abcdef"}))
    with pytest.raises(UserError, match="made for another tokenizer"):
        load(folder, pocket)
    about.write_text(json.dumps(facts | {"tokens": 7_000_000}))
    with pytest.raises(UserError, match="damaged"):
        load(folder, pocket)
    about.write_text("{")
    with pytest.raises(UserError, match="no datastore can be read there"):
        load(folder, pocket)
    about.write_text(json.dumps(facts))
    (folder / _datastore.ORDER).unlink()
    with pytest.raises(UserError, match=r"order\.npy is missing"):
        load(folder, pocket)


def test_the_library_is_made_once(pocket: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_datastore, "sources", lambda held_out: {} if held_out else {"a.py": "import os\n" * 3})
    made = _datastore.library(pocket)
    monkeypatch.setattr(_datastore, "sources", lambda held_out: pytest.fail("made again"))
    assert _datastore.library(pocket).tokens.tolist() == made.tokens.tolist()
