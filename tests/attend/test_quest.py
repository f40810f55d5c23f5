"""attend.quest: true bounds, the same choice for a row however it arrives, and bytes that really fall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.layer_kv import LayerKV
from phasewise.methods.attend.quest import Quest, _Bounds, upper_bounds
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.step import reference
from phasewise.step.plan import AttentionPlan
from phasewise.step.read import Read
from phasewise.step.reference import attend
from phasewise.verbs.host import Host
from tests import double, oracle, seeds, tiny
from tests.asking import Asking
from tests.attend.slow_quest import SlowQuest
from tests.kv.harness import Uneven, Walk, cuts, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
KNOBS = {"page": 4, "budget": 20, "dense_layers": 1}
PROMPT, TOKENS = 70, tiny.prompts(110)[0]
OTHER = tiny.prompts(40, seed=9)[0]


def bound(method: Any, model: Model | None = None) -> Any:
    return method.bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "streaming, text": lambda: {"evict": bound(Streaming(sinks=6, window=43, positions="text"))},
    "snapkv": lambda: {"evict": bound(SnapKV(keep=0.5, window=5))},
    "heads that keep other rows": lambda: {"evict": Uneven([[range(0, 70, 2), [*range(34), 69]]] * 4)},
    "heads that keep more rows": lambda: {"evict": Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)},
    "int8": lambda: {"format": Int8().format()},
}


def started(attend: Any, case: str = "plain", model: Model | None = None) -> Walk:
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], attend=attend, **CASES[case]())
    one.feed(TOKENS[:PROMPT])
    return one


# ---- bounds
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1))
def test_no_key_scores_above_its_pages_bound(seed: int, page: int, n: int, steps: list[int]) -> None:
    """For every page, query and head, after any way of growing; and pages of one row are exact."""
    gen = torch.Generator().manual_seed(seed)
    k, q = torch.randn(2, n, 6, generator=gen), torch.randn(3, 4, 6, generator=gen)
    layer = LayerKV(KVShape(2, 6, torch.float32), Raw(), Ledger(1 << 30), 64)
    bounds = None
    for piece in cuts(list(range(n)), steps):
        layer.append(k[:, piece], k[:, piece], range(piece[0], piece[-1] + 1))
        layer.commit(len(piece))
        (part,) = layer.read()
        upto = part.n // page
        bounds = _Bounds.none(part) if bounds is None else bounds
        bounds = bounds.extend(part, upto, page) if bounds.upto < upto else bounds
    assert bounds is not None and bounds.pages.tolist() == list(range(n // page))
    whole = n // page * page
    scores = torch.einsum("rhgd,hnd->hrgn", q.view(3, 2, 2, 6), k[:, :whole]).amax(2).view(2, 3, -1, page).amax(-1)
    got = upper_bounds(q, bounds.low, bounds.high)
    assert got.shape == scores.shape and bool((got >= scores - 1e-5).all())
    if page == 1:
        torch.testing.assert_close(got, scores, atol=1e-5, rtol=1e-5)


class TopK(Asking):
    """Exact top-k: a row reads itself and the `k - 1` rows with the largest scores over the group."""

    def __init__(self, k: int, dense_layers: int) -> None:
        self.k, self.dense_layers = k, dense_layers

    def __call__(self, reads: list[Read]) -> list[Tensor]:
        return [self.one(read) if read.layer >= self.dense_layers else read.attend() for read in reads]

    def one(self, read: Read) -> Tensor:
        heads, n = read.part.size
        rows = read.q.shape[0]
        scores = torch.einsum("rhgd,hnd->hrgn", read.q.view(rows, heads, -1, read.q.shape[2]), read.part.k).amax(2)
        after = torch.arange(n) >= read.q_positions[:, None]
        best = scores.masked_fill(after, float("-inf")).topk(min(self.k - 1, n - 1), -1).indices
        select = torch.zeros(heads, rows, n, dtype=torch.bool).scatter(2, best, True)
        select |= torch.arange(n) == read.q_positions[:, None]
        return read.attend(select)


def test_pages_of_one_row_are_exact_top_k() -> None:
    quest = started(Quest(page=1, budget=12, dense_layers=1))
    top = started(TopK(12, 1))
    for piece in cuts(TOKENS[PROMPT:], [1, 1, 5]):
        torch.testing.assert_close(quest.feed(piece), top.feed(piece), **CLOSE)


def test_room_for_all_is_dense() -> None:
    one = started(Quest(page=4, budget=110, dense_layers=0))
    got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], [1, 3])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:], **CLOSE)


# ---- the same choice however a row arrives
@pytest.mark.parametrize("case", seeds.params(CASES, 1, "quest", always=["plain"]))
def test_equals_quest_by_the_book(case: str) -> None:
    """Single rows, slices across pages, and a whole replay, against rows chosen one by one from scratch."""
    slow = SlowQuest(**KNOBS)
    truth = started(slow, case)
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([1], [2, 7, 1], [40]):
        one = started(Quest(**KNOBS), case)
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)
    dense = started(None, case)
    assert (dense.feed(TOKENS[PROMPT:]) - want).abs().max() > 1e-2, "the choice matters, or the test tests little"
    assert max(map(len, slow.selected.values())) <= 20


@settings(max_examples=3, deadline=None)
@example("int8", [2], 6, 1)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 6),
       st.integers(1, 40))  # fmt: skip
def test_chunks_equal_single_steps(case: str, sizes: list[int], page: int, budget: int) -> None:
    """In double precision: in single, a number between two levels of int8, or two pages of nearly one score, may fall
    either way when a row is computed among others."""
    with pytest.MonkeyPatch.context() as patch:
        double.everything(patch)
        model = tiny.model()
        single = started(Quest(page=page, budget=budget, dense_layers=0), case, model)
        chunked = started(Quest(page=page, budget=budget, dense_layers=0), case, model)
        want = torch.cat([single.feed([token]) for token in TOKENS[PROMPT:110]])
        got = torch.cat([chunked.feed(piece) for piece in cuts(TOKENS[PROMPT:110], sizes)])
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_windows_of_the_model() -> None:
    model = sliding(17, 3)
    truth, one, chunked = (started(m, model=model) for m in (SlowQuest(**KNOBS), Quest(**KNOBS), Quest(**KNOBS)))
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    torch.testing.assert_close(torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]]), want, **CLOSE)
    torch.testing.assert_close(
        torch.cat([chunked.feed(piece) for piece in cuts(TOKENS[PROMPT:], [6, 1, 13])]), want, **CLOSE
    )


@pytest.mark.parametrize("case", seeds.params(["plain", "streaming", "heads that keep more rows"], 1, "quest's trees"))
def test_draft_trees_equal_their_paths(case: str) -> None:
    """Branches across a page's end: each node ranks pages by the rows of its own path."""
    tree, parents = TOKENS[PROMPT : PROMPT + 1], [-1]
    for depth in range(1, 9):  # two branches, nine deep, over pages of four
        tree = [*tree, TOKENS[PROMPT + depth], OTHER[depth]]
        parents = [*parents, 0 if depth == 1 else len(parents) - 2, 0 if depth == 1 else len(parents) - 1]
    one, truth = started(Quest(**KNOBS), case), started(SlowQuest(**KNOBS), case)
    logits = one.try_(tree, parents)
    torch.testing.assert_close(logits, truth.try_(tree, parents), **CLOSE)
    for leaf in (len(tree) - 2, len(tree) - 1):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        alone = started(Quest(**KNOBS), case)
        steps = torch.cat([alone.feed([tree[node]]) for node in path])
        torch.testing.assert_close(logits[path], steps, **CLOSE)
        taken = started(Quest(**KNOBS), case)
        taken.try_(tree, parents)
        taken.commit(tree, path)
        torch.testing.assert_close(taken.feed(OTHER[:5]), alone.feed(OTHER[:5]), **CLOSE)


def test_bounds_follow_rollbacks_evictions_and_forks() -> None:
    one = started(Quest(**KNOBS))
    one.feed(TOKENS[PROMPT:100])
    twin = one.fork()
    assert one.kv.layers[2].derived and twin.kv.layers[2].derived
    for walk, tokens in ((one, OTHER), (twin, TOKENS[100:])):
        truth = started(SlowQuest(**KNOBS))
        truth.feed(TOKENS[PROMPT:100])
        assert walk.kv.layers[2].derived
        for piece in cuts(tokens[:20], [1, 1, 3]):
            torch.testing.assert_close(walk.feed(piece), truth.feed(piece), **CLOSE)
    with torch.inference_mode():
        one.kv.drop_last(90)
    assert not one.kv.layers[2].derived
    del one.request.tokens[90:]
    one.request.computed = 90
    truth = started(SlowQuest(**KNOBS))
    truth.feed(TOKENS[PROMPT:90])
    torch.testing.assert_close(one.feed(OTHER[10:20]), truth.feed(OTHER[10:20]), **CLOSE)
    for walk in (one, truth):
        with torch.inference_mode():
            walk.kv.keep(2, [torch.arange(0, 100, 3), torch.arange(1, 90)])  # ragged, one layer
    for piece in cuts(TOKENS[:12], [1, 4]):
        torch.testing.assert_close(one.feed(piece), truth.feed(piece), **CLOSE)


# ---- what it reads
def test_bytes_read_are_the_closed_form() -> None:
    """Rows within the budget, two bounds per page, and every key once more when its page is complete."""
    page, budget, heads, dim, layers, dense_layers = 4, 20, 2, 12, 4, 1
    one = started(Quest(page=page, budget=budget, dense_layers=dense_layers))
    key = heads * dim * 4
    sealed = 0
    for token in TOKENS[PROMPT:]:
        n = one.request.computed + 1
        before = one.counters.kv_bytes_read
        one.feed([token])
        pages, own = (n - 1) // page, (n - 1) % page + 1
        rows = (budget - own) // page * page + own
        assert budget - page < rows <= budget and (rows == budget) == (own == page)
        sparse = rows * 2 * key + pages * 2 * key + (n - 1 - sealed * page if pages > sealed else 0) * key
        assert one.counters.kv_bytes_read - before == dense_layers * n * 2 * key + (layers - dense_layers) * sparse
        sealed = pages
    dense = started(None)
    dense.counters.kv_bytes_read = 0
    one.counters.kv_bytes_read = 0
    for token in OTHER:
        one.feed([token])
    for token in TOKENS[PROMPT:] + OTHER:
        dense.feed([token])
    assert one.counters.kv_bytes_read < 0.6 * sum(2 * key * layers * n for n in range(111, 151))


def test_rows_outside_the_choice_are_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path touches the chosen rows alone, in whatever form they are stored."""

    whole: list[bool] = []

    def watched(plan: AttentionPlan, reads: Any) -> Any:
        out = attend(plan, reads)
        whole.extend(read.part._whole is not None for read in reads if read.layer >= KNOBS["dense_layers"])
        return out

    monkeypatch.setattr(reference, "attend", watched)
    for case in ("plain", "int8", "snapkv"):
        one = started(Quest(**KNOBS), case)
        whole.clear()
        for token in TOKENS[PROMPT:90]:
            one.feed([token])
        assert whole and not any(whole)


@pytest.mark.parametrize("case", ["plain", "snapkv"])
def test_drafts_read_no_more_than_their_rows_choose(case: str) -> None:
    one, dense = started(Quest(page=4, budget=12, dense_layers=0), case), started(None, case)
    for walk in (one, dense):
        walk.feed(TOKENS[PROMPT:100])
        walk.counters.kv_bytes_read = 0
        walk.feed(TOKENS[100:102])
    assert one.counters.kv_bytes_read < dense.counters.kv_bytes_read


@pytest.mark.parametrize(("knob", "least"), [("page", 1), ("budget", 1), ("dense_layers", 0)])
def test_bad_knobs_are_named_with_the_bound(knob: str, least: int) -> None:
    with pytest.raises(UserError, match=f"quest: {knob}={least - 1} must be at least {least}"):
        Quest(**{knob: least - 1})
