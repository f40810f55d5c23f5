"""Prompt lookup: the longest earlier match, found by an automaton that never reads a token twice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from phasewise.methods.draft import _automaton
from phasewise.methods.draft._automaton import SuffixAutomaton
from phasewise.methods.draft._continuations import copied
from phasewise.methods.draft.prompt_lookup import CHUNK, NAME, PromptLookup
from phasewise.methods.verify.match import Match
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist
from tests import tiny


def automaton(tokens: Sequence[int]) -> SuffixAutomaton:
    text = SuffixAutomaton()
    for token in tokens:
        text.extend(token)
    return text


def longest(tokens: Sequence[int]) -> tuple[int, int]:
    """Length of the longest suffix that has ended before, and the last place where it did, by looking everywhere."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        for end in range(n - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[n - length :]:
                return length, end
    return 0, n


def test_equals_brute_force() -> None:
    """10,000 random texts over five symbols."""
    rng = random.Random(0)
    for _ in range(10_000):
        tokens = [rng.randrange(5) for _ in range(rng.randrange(1, 31))]
        text, (length, after) = automaton(tokens), longest(tokens)
        assert text.match == length
        assert (text.places(1, 1) or [len(tokens)])[0] == after
        assert not text.places(length + 1, 1)


def test_growing_equals_building_anew() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(3) for _ in range(200)]
    text = SuffixAutomaton()
    for n, token in enumerate(tokens, 1):
        text.extend(token)
        assert text.match == longest(tokens[:n])[0]
        if n % 50 == 0:
            text = text.fork()


def test_a_fork_grows_by_itself() -> None:
    text = automaton([1, 2, 3, 1, 2])
    twin = text.fork()
    twin.extend(3)
    text.extend(9)
    assert (twin.match, text.match, twin.n, text.n) == (3, 0, 6, 6)


def test_followers_are_the_tokens_that_have_followed() -> None:
    """Longest match first, then the latest; each is one token that came after it."""
    tokens = [5, 1, 2, 7, 8, 1, 2, 9, 3, 2, 6, 5, 1, 2]
    assert automaton(tokens).places(2, 9) == [3, 7, 3]
    assert automaton(tokens).places(1, 9) == [3, 7, 3, 10, 7, 3]


def test_cost_per_token_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """States and updates are linear in the text, even for runs, where thousands of matches nest."""

    class Counting(list):
        writes = 0

        def __setitem__(self, *given: object) -> None:
            Counting.writes += 1
            super().__setitem__(*given)

    for tokens in ([1] * 3000, [1, 2] * 1500, [1] * 1500 + [2] + [1] * 1499):
        text = SuffixAutomaton()
        text._end = Counting(text._end)
        Counting.writes = 0
        for token in tokens:
            text.extend(token)
        assert Counting.writes <= _automaton.MARKED * len(tokens)
        assert len(text._link) <= 2 * len(tokens)


@pytest.mark.parametrize(
    ("start", "want"), [(1, [2, 3, 4, 1]), (3, [4, 1, 4, 1]), (4, [1, 1, 1, 1]), (0, [1, 2, 3, 4])]
)
def test_a_copy_goes_on_with_itself(start: int, want: list[int]) -> None:
    assert copied([1, 2, 3, 4, 1], start, 4) == want


# ---- the drafter


def guess(tokens: Sequence[int], budget: int = 100, **knobs: int) -> Draft | None:
    return PromptLookup(**knobs).draft([Request(tokens, tiny.greedy(100))], [budget])[0]


def test_the_guess_is_what_followed() -> None:
    draft = guess([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    assert draft is not None and (draft.tokens, draft.drawn, draft.q) == ([4, 5, 6, 7, 9, 1], "point", None)
    assert draft.parents == [-1, 0, 1, 2, 3, 4]


def test_longer_beats_later_and_later_beats_earlier() -> None:
    assert guess([1, 2, 3, 50, 8, 2, 3, 60, 1, 2, 3], k=1).tokens == [50]
    assert guess([1, 2, 50, 1, 2, 60, 1, 2], k=1).tokens == [60]


def test_no_match_no_guess() -> None:
    assert guess([1, 2, 3, 4]) is None
    assert guess([1, 2, 3, 4, 1]) is None, "one token is shorter than min_match"
    assert guess([1, 2, 3, 4, 1], min_match=1).tokens == [2, 3]
    assert guess([1, 2, 3, 4, 1, 2], budget=0) is None


def test_branches_are_other_continuations() -> None:
    tokens = [1, 2, 50, 51, 1, 2, 60, 61, 1, 2]
    assert guess(tokens, branches=3, k=2).tokens == [60, 61, 50, 51]
    assert guess(tokens, branches=3, k=2).parents == [-1, 0, -1, 2]
    merged = guess([7, 1, 2, 50, 51, 2, 50, 61, 7, 1, 2], branches=2, k=2, min_match=1)
    assert (merged.tokens, merged.parents) == ([50, 51, 61], [-1, 0, 0]), "shared beginnings are merged"


def test_the_cap_follows_the_verdicts() -> None:
    drafter, request = PromptLookup(k=8), Request([*range(10, 30), *range(10, 20)])

    def told(accepted: int) -> int:
        draft = drafter.draft([request], [100])[0]
        span = type("Span", (), {"note": draft, "request": request})
        said = [*draft.tokens[:accepted], 0]
        drafter.learn([span], None, [Outcome(1, said, drafted=len(draft.tokens), accepted=accepted)])
        return len(draft.tokens)

    verdicts = (0, 0, 0, 0, 1, 1, 2, 3, 4, 8)
    assert [told(accepted) for accepted in verdicts] == [8, 4, 2, 1, 1, 2, 2, 4, 4, 8]


def test_the_cap_follows_its_own_guess() -> None:
    """Not what else was in the draft: a drafter that holds this one may have had more accepted, or guessed on."""
    drafter, request = PromptLookup(k=8), Request([*range(10, 30), *range(10, 20)])

    def told(said: list[int], others: Draft) -> int:
        drafter.draft([request], [100])
        span = type("Span", (), {"note": others, "request": request})
        drafter.learn([span], None, [Outcome(1, said, drafted=len(others.tokens), accepted=len(said) - 1)])
        return len(drafter.draft([request], [100])[0].tokens)

    assert told([7, 8, 9], Draft.chain([7, 8])) == 4, "others were right, it was not"
    assert told([*range(20, 24), 0], Draft.chain([*range(20, 24), 1, 2, 3, 4])) == 8, "it was right, others guessed on"


def test_a_copying_target_needs_few_passes() -> None:
    """200 random tokens to be repeated: at most ceil(200 / (k + 1)) + 5 passes."""
    rng = random.Random(2)
    text = [rng.randrange(3, 4000) for _ in range(200)]
    request, drafter, passes = Request([*text, 1], tiny.greedy(220)), PromptLookup(k=8), 0
    while request.n_out < 200:
        draft = drafter.draft([request], [200])[0] or Draft([], [])
        done, passes = request.n_out, passes + 1
        after = [text[(done + depth) % 200] for depth in range(len(draft.tokens) + 1)]  # chains only
        path, token = Match()(draft, Dist(after, 4000), lambda *_: 0.0)
        request.tokens += [*(draft.tokens[node] for node in path), token]
    assert request.out[:200] == text
    assert passes <= -(-200 // 9) + 5


def test_no_token_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    kind = type(_automaton.automaton())
    was = kind.read
    monkeypatch.setattr(kind, "read", lambda self, tokens: (read.extend(tokens), was(self, tokens))[1])
    placed = tiny.engine({"draft": "prompt_lookup"})
    request = tiny.run(placed, tiny.prompts(60), tiny.greedy(20))[0]
    assert read == request.tokens[: len(read)]
    assert len(read) >= request.known - 10


def test_a_very_long_prompt_is_read_in_pieces() -> None:
    request, drafter = Request([4, 5] * CHUNK), PromptLookup()
    assert drafter.draft([request], [9]) == [None]
    assert request.state[NAME].text.n == CHUNK
    assert drafter.draft([request], [9])[0] is not None


@pytest.mark.parametrize("knob", ["k", "min_match", "branches"])
def test_knobs_below_one_are_refused(knob: str) -> None:
    with pytest.raises(Exception, match=f"prompt_lookup: {knob}=0 must be at least 1"):
        PromptLookup(**{knob: 0})


def test_sampled_tokens_are_those_of_plain_decoding() -> None:
    """Chosen guesses never touch the draw: exact for sampled output too, under either verifier."""
    prompts = [tiny.prompts(6)[0] * 5, *tiny.prompts(20, 33, vocab=12)]
    params = [Params(max_tokens=30, temperature=0.7, seed=s, ignore_eos=True, frequency_penalty=-0.4) for s in range(3)]
    want = tiny.plain(prompts, params)
    for verify in ("rejection", "match"):
        placed = tiny.engine({"draft": "prompt_lookup:min_match=1,branches=2", "verify": verify})
        assert tiny.outs(tiny.run(placed, prompts, params)) == want
        assert placed.counters.accepted > 0
