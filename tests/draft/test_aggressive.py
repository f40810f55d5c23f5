"""Aggressive Decoding: copies its source from where the answer has got to, and comes back after edits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.draft.aggressive import NAME, Aggressive, Copying
from phasewise.methods.verify.match import Match
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Dist
from tests import tiny

SOURCE = list(range(100, 300))  # every token once
MARK, END = 5, 6


def answered(drafter: Aggressive, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int, int]:
    """Passes a target needs that says `answer`, how often copying came back, and rows judged."""
    request = Request(list(prompt), Params(max_tokens=len(answer), ignore_eos=True))
    passes = rows = 0
    while request.n_out < len(answer):
        (draft,) = drafter.draft([request], [drafter.size(request)])
        assert draft is not None
        left = [*answer[request.n_out :], *[0] * len(draft.tokens)]
        path, token = Match()(draft, Dist(left[: len(draft.tokens) + 1], 400), lambda *_: 0.0)
        request.tokens += [*(draft.tokens[node] for node in path), token]
        passes, rows = passes + 1, rows + len(draft.tokens) + 1
    assert request.out == list(answer)
    state: Copying = request.state[NAME]
    return passes, state.attached, rows


def test_an_answer_that_is_its_source_takes_one_pass() -> None:
    assert answered(Aggressive(k=len(SOURCE)), SOURCE, SOURCE) == (1, 0, len(SOURCE))
    passes, attached, _ = answered(Aggressive(), SOURCE, SOURCE)
    assert (passes, attached) == (-(-len(SOURCE) // 64), 0)  # in guesses of 63 tokens


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_edits_cost_one_return_each(seed: int, edits: int) -> None:
    """Replaced, dropped or put in between, where the tokens around occur once."""
    rng = random.Random(seed)
    answer: list[int] = []
    places = sorted(rng.sample(range(5, len(SOURCE) - 5, 5), edits))
    for at, token in enumerate(SOURCE):
        kind = rng.choice(["replace", "drop", "insert"]) if at in places else "keep"
        answer += {"keep": [token], "replace": [20], "drop": [], "insert": [20, token]}[kind]
    passes, attached, _ = answered(Aggressive(k=len(SOURCE)), SOURCE, answer)
    assert attached <= edits
    assert passes <= 1 + 2 * edits  # one in which it leaves, at most one in which there is no guess yet


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_where_copying_goes_on(source: list[int], answer: list[int]) -> None:
    """Against looking everywhere."""
    copy = Copying(source, 3)
    expected: int | None = 0
    for done, token in enumerate(answer, 1):
        copy.read([token])
        if expected is not None and source[expected : expected + 1] == [token]:
            expected += 1
        else:
            expected = None
            for length in range(1, min(3, done) + 1):
                tail = answer[done - length : done]
                ends = [i for i in range(length, len(source) + 1) if source[i - length : i] == tail]
                if len(ends) < 2:
                    expected = ends[0] if ends else None
                    break
        assert copy.at == expected
        if done % 7 == 0:
            copy = copy.fork()


def test_a_marked_source_is_the_last_one() -> None:
    drafter = Aggressive(source="marks", opens=MARK, closes=END)
    for prompt, want in (
        ([7, MARK, 8, 9, END, 10], [8, 9]),
        ([MARK, 1, END, MARK, 8, 9], [8, 9]),
        ([7, 8, END], []),
        ([END, MARK], []),
    ):
        request = Request(prompt, Params(max_tokens=9))
        (draft,) = drafter.draft([request], [9])
        assert draft is not None
        assert draft.tokens == want
    prompt = [*range(10, 40), MARK, *SOURCE, END, 3]
    assert answered(Aggressive("marks", MARK, END, k=len(SOURCE)), prompt, SOURCE)[0] == 1


def test_a_guess_keeps_to_its_bounds() -> None:
    request = Request(SOURCE, Params(max_tokens=12))
    for k, budget, want in ((4, 9, 4), (40, 9, 9), (40, 99, 11)):
        drafter = Aggressive(k=k)
        (draft,) = drafter.draft([request], [budget])
        assert draft is not None
        assert len(draft.tokens) == want == min(drafter.size(request), budget)


def test_sampled_tokens_are_those_of_plain_decoding() -> None:
    prompts = tiny.prompts(20, 33, 9)
    params = [Params(max_tokens=30, temperature=0.7, seed=s, ignore_eos=True) for s in range(3)]
    want = tiny.plain(prompts, params)
    for verify in ("rejection", "match"):
        placed = tiny.engine({"draft": "aggressive", "verify": verify})
        assert tiny.outs(tiny.run(placed, prompts, params)) == want
        assert placed.counters.drafted > 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"k": 0}, "k=0 must be at least 1"),
        ({"source": "turn"}, "source=turn must be prompt or marks"),
        ({"source": "marks"}, "opens=-1 must be a token id"),
        ({"opens": 4}, "opens=4 must be a token id with source=marks"),
        ({"closes": 4}, "closes=4 goes with source=marks only"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"aggressive: {message}"):
        Aggressive(**knobs)  # type: ignore[arg-type]
