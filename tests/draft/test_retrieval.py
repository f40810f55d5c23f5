"""Retrieval: what followed the longest match in a datastore."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.methods.draft._datastore import Datastore
from phasewise.methods.draft.retrieval import Retrieval, _Retrieval
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from tests import tiny

STORE = Datastore.of([[1, 2, 3, 4, 5], [7, 2, 3, 4, 6], [2, 3, 9]])


def guess(tokens: list[int], budget: int = 100, most: int = 100, **knobs: int) -> Draft | None:
    return _Retrieval(Retrieval(**knobs), STORE).draft([Request(tokens, tiny.greedy(most))], [budget])[0]


def test_the_guess_is_what_most_continuations_share() -> None:
    draft = guess([8, 2, 3])
    assert draft is not None and (draft.tokens, draft.parents, draft.drawn, draft.q) == (
        [4, 9, 5, 6], [-1, -1, 0, 0], "point", None,
    )  # fmt: skip
    assert guess([8, 2, 3], nodes=1).tokens == [4]
    assert guess([8, 2, 3], length=1).tokens == [4, 9]
    assert guess([8, 2, 3], budget=2).tokens == [4, 9]


def test_a_longer_match_beats_more_matches() -> None:
    assert guess([1, 2, 3]).tokens == [4, 5]
    assert guess([1, 2, 3], longest=2).tokens == [4, 9, 5, 6]


def test_no_match_no_guess() -> None:
    assert guess([8, 8, 8]) is None
    assert guess([8, 8, 3]) is None, "one token is shorter than a match"
    assert guess([8, 8, 3], shortest=1) is not None
    assert guess([2, 3], budget=0) is None
    assert guess([2, 3], most=1) is None, "no drafted token could stay"


def test_of_many_hits_some_are_counted() -> None:
    assert len(guess([8, 2, 3], hits=1).tokens) <= 2
    assert guess([8, 2, 3], hits=1).tokens == guess([8, 2, 3], hits=1).tokens


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"nodes": 0}, "nodes=0 must be at least 1"),
        ({"hits": 0}, "hits=0 must be at least 1"),
        ({"longest": 17}, "longest=17 must be from shortest=2 to 16"),
        ({"longest": 1}, "longest=1 must be from shortest=2 to 16"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=f"retrieval: {said}"):
        Retrieval(**knobs)


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        tiny.engine({"draft": f"retrieval:store={tmp_path / 'nothing'}"})
    with pytest.raises(UserError, match="the seed must be a whole number"):
        tiny.engine({"draft": "retrieval:store=random:x"})


def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    prompts = tiny.prompts(20, 33, 7)
    want = tiny.plain(prompts, tiny.greedy(40))
    placed = tiny.engine({"draft": "retrieval:store=random:3,shortest=1,length=2"})
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(40))) == want
    assert placed.counters.accepted > 0
