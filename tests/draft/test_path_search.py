"""The search for a path through a block, and the controller of its length, against what they are by definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise.methods.draft._block_length import LengthRecord, LengthRule
from phasewise.methods.draft._path_search import PathSearch, generated

V, END = 5, 2


def logits(seed: int, k: int) -> torch.Tensor:
    return torch.randn(k, V, generator=torch.Generator().manual_seed(seed)) * 2


def chance(first: int, second: int, token: int) -> float:
    """Some 3-gram model: any function of three tokens."""
    return -math.log(2 + (7 * first + 3 * second + 5 * token) % 11)


def score(said: torch.Tensor, path: tuple[int, ...], text: list[int], lam: float) -> float:
    own, whole = said.double().log_softmax(-1), [*text, *path]
    return sum(
        lam * float(own[i, token]) + (1 - lam) * chance(*whole[len(text) + i - 2 : len(text) + i], token)
        for i, token in enumerate(path)
    )


def every(k: int) -> list[tuple[int, ...]]:
    """All paths of k places that end with their first end token."""
    found = set()
    for path in itertools.product(range(V), repeat=k):
        at = next((i for i, token in enumerate(path) if token == END), k - 1)
        found.add(path[: at + 1])
    return sorted(found)


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_a_beam_of_all_paths_finds_the_best_of_all(seed: int, k: int, lam: float) -> None:
    said, text = logits(seed, k), [3, 1]
    search = PathSearch(tau=1.0, most=V, beams=0, lam=lam)
    found = tuple(token for token, _ in search.best(search.candidates(said, {END}), text, {END}, chance))
    best = max(score(said, path, text, lam) for path in every(k))
    assert score(said, found, text, lam) == pytest.approx(best, abs=1e-4)


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 4), st.sampled_from([0.3, 0.8, 1.0]))
def test_without_trigrams_and_ends_it_is_the_likeliest_token_of_each_place(
    seed: int, k: int, beams: int, tau: float
) -> None:
    said = logits(seed, k)
    for search in (PathSearch(tau, 3, beams, 1.0), PathSearch(tau, 3, beams, 0.2, greedy=True)):
        path = search.best(search.candidates(said, ()), [3, 1], (), None)
        assert [token for token, _ in path] == said.argmax(-1).tolist()
        assert [own for _, own in path] == pytest.approx(said.log_softmax(-1).amax(-1).tolist())


def test_candidates_are_the_fewest_of_a_mass_and_the_end() -> None:
    """0.5, 0.3, 0.15, 0.04, 0.01: of mass 0.8 the first two, if rounding does not take one more; the end is added."""
    said = torch.tensor([[0.5, 0.3, 0.01, 0.15, 0.04]]).log()
    found = [[token for token, _ in PathSearch(tau, most, 1, 1.0).candidates(said, {END})[0]]
             for tau, most in ((0.45, 9), (0.79, 9), (0.81, 9), (0.97, 9), (1.0, 9), (0.97, 2), (0.0, 9))]  # fmt: skip
    assert found == [[0, 2], [0, 1, 2], [0, 1, 3, 2], [0, 1, 3, 4, 2], [0, 1, 3, 4, 2], [0, 1, 2], [0, 2]]


def test_a_path_ends_with_its_first_end_token() -> None:
    said = torch.tensor([[9.0, 0, 0, 0, 0], [0, 0, 9.0, 0, 0], [0, 0, 0, 9.0, 0]])
    search = PathSearch(0.8, 3, 2, 1.0)
    assert [token for token, _ in search.best(search.candidates(said, {END}), [3], {END}, None)] == [0, END]
    assert [token for token, _ in search.best(search.candidates(said, ()), [3], (), None)] == [0, END, 3]


def test_trigrams_choose_where_the_model_is_unsure() -> None:
    """Two tokens as likely as one another; what came before decides, the text and the path alike."""
    said = torch.tensor([[0.0, 0.0, -9, -9, -9], [0.0, 0.0, -9, -9, -9]])

    def likes(first: int, second: int, token: int) -> float:
        return 0.0 if (first, second, token) in {(3, 4, 1), (4, 1, 0)} else -5.0

    search = PathSearch(1.0, 2, 3, 0.5)
    assert [token for token, _ in search.best(search.candidates(said, ()), [3, 4], (), likes)] == [1, 0]


def test_generated_tokens_are_those_before_an_end() -> None:
    assert [generated(tokens, {END}) for tokens in ([END], [1, END, END], [1, 3], [])] == [0, 1, 2, 0]


def test_the_trace_of_the_controller() -> None:
    """Pairs of generated and accepted lengths, worked out by hand: averages of half the new value."""
    rule, record, trace = LengthRule(2, 12, 3, 0.5), LengthRecord(12), list[tuple[float, float, int]]()
    for length, accepted in ((12, 2), (8, 8), (4, 4), (1, 9), (12, 12), (0, 0), (0, 0), (0, 0)):
        record.last = length
        record.judged(rule, accepted)
        trace.append((record.generated, record.accepted, record.length))
    assert trace == [
        (6.0, 1.0, 6), (7.0, 4.5, 7), (5.5, 4.25, 5), (3.25, 6.625, 6), (7.625, 9.3125, 10), (3.8125, 4.65625, 6),
        (1.90625, 2.328125, 4), (0.953125, 1.1640625, 3),
    ]  # fmt: skip


def test_a_length_stays_within_its_bounds() -> None:
    rule, record = LengthRule(4, 6, 10, 1.0), LengthRecord(6)
    for length, accepted, wanted in ((6, 0, 6), (1, 0, 4), (6, 6, 6), (5, 4, 5)):
        record.last = length
        record.judged(rule, accepted)
        assert record.length == wanted
    assert record.fork() is not record and LengthRule(4, 4, 1, 0.5).fixed and not rule.fixed
