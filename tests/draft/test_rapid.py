"""RAPID: pieces of a long prompt, a drafter that reads no more however long the prompt is, and lanes that hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.draft._pieces import bm25, nearest, shortened
from phasewise.methods.draft.rapid import DRAWER, NAME, Rapid
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion
from phasewise.step.forward import forward
from phasewise.step.span import Span
from phasewise.verbs.place import Placed
from tests import tiny, uncached

SMALL = "k=3,context=24,piece=4,query=8"
N = 20


def companion(placed: Placed) -> Companion:
    (only,) = placed.recipes[""].companions
    return only


# ---- which pieces
def slow_bm25(pieces: Sequence[Sequence[int]], query: Sequence[int]) -> list[float]:
    """Term by term, as the formula is written."""
    mean = sum(map(len, pieces)) / len(pieces)
    scores = []
    for piece in pieces:
        score = 0.0
        for term in query:
            holders = sum(term in other for other in pieces)
            rarity = math.log(1 + (len(pieces) - holders + 0.5) / (holders + 0.5))
            count = list(piece).count(term)
            score += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(piece) / mean))
        scores.append(score)
    return scores


TOKENS = st.integers(0, 9)
PIECES = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=60)
@given(PIECES, st.lists(TOKENS, min_size=1, max_size=6))
def test_bm25_is_its_formula(pieces: list[list[int]], query: list[int]) -> None:
    assert bm25(pieces, query).tolist() == pytest.approx(slow_bm25(pieces, query), abs=1e-12)


def test_bm25_prefers_what_is_rare() -> None:
    pieces = [[1, 2, 3, 4], [1, 1, 1, 1], [1, 2, 2, 9], [1, 5, 6, 7]]
    scores = bm25(pieces, [1, 9, 0])
    assert int(scores.argmax()) == 2 and scores[1] > scores[0] == scores[3]


@settings(max_examples=60)
@given(st.integers(1, 90), st.integers(1, 8), st.integers(1, 8), st.integers(0, 40), st.randoms())
def test_what_is_kept_of_a_prompt(n: int, piece: int, query: int, more: int, rng: object) -> None:
    """Against all pieces written out and sorted; places instead of tokens, so that order and repetition show."""
    prompt, context = list(range(n)), piece + query + more
    scores = [rng.randrange(5) for _ in range(n)]  # type: ignore[attr-defined]

    def scorer(pieces: list[list[int]], asked: list[int]):
        assert asked == prompt[-query:]
        return torch.tensor([scores[part[0]] for part in pieces], dtype=torch.float64).numpy()

    kept = shortened(prompt, context, piece, query, scorer)
    assert len(kept) <= context
    if n <= context:
        assert kept == prompt
        return
    between = [prompt[at : min(at + piece, n - query)] for at in range(piece, n - query, piece)]
    best = sorted(between, key=lambda part: (-scores[part[0]], part[0]))[: (context - query) // piece - 1]
    assert kept == [*prompt[:piece], *(token for part in sorted(best) for token in part), *prompt[n - query :]]


def test_embeddings_are_compared_by_their_means() -> None:
    table = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pieces, query = [[1, 2, 3], [4], [5, 5, 6, 7]], [3, 2, 8]
    want = [torch.cosine_similarity(table[part].mean(0), table[query].mean(0), dim=0).item() for part in pieces]
    assert nearest(lambda ids: table[ids], pieces, query).tolist() == pytest.approx(want)


@pytest.mark.parametrize("scorer", ["bm25", "embedding"])
def test_the_piece_that_answers_is_found(scorer: str) -> None:
    """What the question names stands once, anywhere in a long prompt."""
    filler = tiny.prompts(400, vocab=30)[0]
    needle, question = [40, 41, 42, 50], [40, 41, 42, 40]
    embed = tiny.model().embed
    for at in (8, 160, 380):
        prompt = [*filler[:at], *needle, *filler[at:], *question]
        scores = bm25 if scorer == "bm25" else lambda pieces, asked: nearest(embed, pieces, asked)
        kept = shortened(prompt, 24, 4, 4, scores)
        assert "40, 41, 42, 50" in str(kept) and len(kept) == 24


# ---- tokens and counters
@pytest.mark.parametrize("scorer", ["bm25", "embedding"])
def test_greedy_tokens_are_plain_decodings(scorer: str) -> None:
    prompts = tiny.prompts(300, 41, 7, 90)
    plain = tiny.plain(prompts, tiny.greedy(N))
    placed = tiny.engine({"draft": f"rapid:{SMALL},scorer={scorer}"})
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(N))) == plain
    assert 0 < placed.counters.accepted < placed.counters.drafted


def test_with_room_for_all_of_it_the_model_is_its_own_perfect_draft() -> None:
    k = 4
    placed = tiny.engine({"draft": f"rapid:k={k},confidence=0"})
    tiny.run(placed, tiny.prompts(100, 41), tiny.greedy(1 + 3 * (k + 1)))
    counters = placed.counters
    assert counters.accepted == counters.drafted == 2 * 3 * k
    assert (counters.forwards, counters.draft_forwards) == (1 + 3, 3 * k)


def reading(length: int, draft: str, n: int = 12) -> tuple[int, int, int]:
    """Of one greedy request: draft rows, the most bytes that the drafter held, and the most it may have read."""
    placed = tiny.engine({"draft": draft}, prefix_cache=False)
    second = companion(placed)
    request = Request(tiny.prompts(length)[0], tiny.greedy(n))
    placed.add(request)
    most = passes = 0
    while request.left is None:
        before = second.own.kv_bytes_read
        placed.step()
        if second.name in request.state:
            most = max(most, request.state[second.name].kv.bytes)
        passes = max(passes, second.own.kv_bytes_read - before)
    return second.own.rows, most, passes


def test_what_the_drafter_holds_and_reads_is_flat_in_the_prompt() -> None:
    """A control, whose drafter reads all of the prompt, grows with it."""
    flat = [reading(length, f"rapid:{SMALL},confidence=0") for length in (50, 200, 800)]
    row = tiny.engine({"draft": f"rapid:{SMALL}"}).recipes[""].companions[0].store.row_bytes
    for rows, held, read in flat:
        assert rows <= 24 + 12 * 4
        assert held == flat[0][1]
        assert read <= (24 + 12 * 3) * (24 + 12 + 3) * row
    assert max(read for *_, read in flat) <= 1.5 * min(read for *_, read in flat)
    short, long = (reading(length, "draft_model:model=tiny,k=3") for length in (50, 800))
    assert long[1] > 4 * short[1] and long[0] > short[0] + 700


# ---- lanes
def holds(second: Companion, request: Request) -> None:
    """The lane's rows are those of a fresh pass over what it says it has read."""
    follower = request.state.get(second.name)
    if follower is None:
        return
    text = second.text(request)
    short = shortened(request.prompt, 24, 4, 8, bm25)
    assert text == [*short, *request.out]
    follower.settle(text)
    read = [*text[: follower.base], *follower.tail]
    fresh = second.store.open(Request(read), len(read))
    forward(second.model, [Span(Request(read), fresh, uncached.PLAIN, read, range(len(read)))], Counters())
    fresh.commit(len(read))
    for ours, theirs in zip(follower.kv.layers, fresh.layers):
        (slab,), (want,) = ours.slabs, theirs.slabs
        assert slab.positions is None and slab.n == len(read)
        for plane, expected in zip(slab.buffer.planes, want.buffer.planes):
            torch.testing.assert_close(plane[:, : slab.n], expected[:, : slab.n], atol=1e-4, rtol=1e-4)
    fresh.close()


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_a_lane_equals_a_fresh_one_after_every_round(how: str) -> None:
    """Rounds, a preemption and a fork."""
    params = tiny.greedy(N) if how == "greedy" else Params(max_tokens=N, temperature=0.9, seed=2, ignore_eos=True)
    placed = tiny.engine({"draft": f"rapid:{SMALL}"}, prefix_cache=False)
    second = companion(placed)
    requests = [Request(prompt, params) for prompt in tiny.prompts(120, 60)]
    for request in requests:
        placed.add(request)
    rounds = 0
    with torch.inference_mode():
        while requests[0].n_out < N // 2:
            placed.step()
            if requests[1].n_out == 5 and NAME in requests[1].state:
                placed.room.preempt(requests[1])
                assert NAME not in requests[1].state and DRAWER not in requests[1].state
            for request in requests:
                holds(second, request)
                rounds += NAME in request.state
        twin = Request(requests[0].prompt, params)
        twin.adopt(requests[0])
        assert twin.state[DRAWER].tokens is not requests[0].state[DRAWER].tokens
        placed.resume(twin)
        requests.append(twin)
        while any(request.left is None for request in requests):
            placed.step()
            for request in requests:
                holds(second, request)
    tiny.finish(placed, requests)
    assert rounds >= 4 and requests[2].out == requests[0].out


def test_a_text_grows_with_the_request() -> None:
    second, request = companion(tiny.engine({"draft": f"rapid:{SMALL}"})), Request(tiny.prompts(100)[0])
    assert len(second.text(request)) == 24 and second.lag(request) == 24
    cost = second.store.cost
    assert second.growth(request, 100) == cost(24) and second.growth(request, 300) == cost(224)
    request.tokens += [7, 8]
    assert second.text(request)[-3:] == [request.prompt[-1], 7, 8] and len(second.text(request)) == 26


# ---- settings
def test_another_model_may_draft() -> None:
    prompts = tiny.prompts(90, 41)
    plain = tiny.plain(prompts, tiny.greedy(N))
    placed = tiny.engine({"draft": f"rapid:{SMALL},model=tiny-draft,confidence=0"})
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(N))) == plain
    assert companion(placed).model is tiny.load("tiny-draft")
    assert companion(tiny.engine({"draft": "rapid"})).model is tiny.model(), "its own weights, not a copy"


def test_a_chain_ends_after_a_doubtful_guess() -> None:
    prompts = tiny.prompts(90)
    sure, doubtful = (tiny.engine({"draft": f"rapid:{SMALL},confidence={least}"}) for least in (0, 1))
    for placed in (sure, doubtful):
        tiny.run(placed, prompts, tiny.greedy(N))
    assert doubtful.counters.drafted == doubtful.counters.forwards - 1 - 1  # one a pass, none before the last token
    assert sure.counters.draft_forwards > doubtful.counters.draft_forwards


@pytest.mark.parametrize(
    ("knobs", "said"),
    [({"k": 0}, "k=0 must be at least 1"), ({"piece": 0}, "piece=0"), ({"query": 0}, "query=0"),
     ({"chunk": 0}, "chunk=0"), ({"context": 40}, "context=40 must have room for query=16 and a piece=32: at least 48"),
     ({"confidence": 1.5}, "confidence=1.5 must be from 0 to 1"), ({"scorer": "bm52"}, "scorer=bm52 must be bm25")],
)  # fmt: skip
def test_wrong_knobs_are_named(knobs: dict, said: str) -> None:
    with pytest.raises(UserError, match=f"rapid: {said}"):
        Rapid(**knobs)


def test_second_models_must_fit() -> None:
    with pytest.raises(UserError, match="32 tokens in its vocabulary, the model has 64"):
        tiny.engine({"draft": f"rapid:model={tiny.checkpoint(vocab=32, layers=1)}"})
    with pytest.raises(UserError, match="rapid: context=512, but that of .* is 256: lower it"):
        tiny.engine({"draft": f"rapid:model={tiny.checkpoint(layers=1, context=256)}"})
