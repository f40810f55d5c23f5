"""evict.snapkv: the rows that stay are those a full attention matrix names, and they are really all that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import ROUND
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.verbs.evict import retain
from phasewise.verbs.host import Host
from tests import oracle, tiny
from tests.kv.harness import Masked, Recorder, Uneven, Walk, cuts, sliding, walk

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
HEADS = 2


def snapkv(model: Model | None = None, **knobs: Any) -> Any:
    return SnapKV(**knobs).bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


def text(n: int, seed: int = 0) -> list[int]:
    return tiny.prompts(n, seed=seed)[0]


def matrix(model: Model, prompt: list[int]) -> dict[int, Tensor]:
    """Every layer's attention probabilities [hq, L, L] over a prompt."""
    record = Recorder(len(prompt))
    one = Walk(model, prompt, attend=record)
    one.plain = one.phase
    one.feed(prompt)
    return record.seen


def named(a: Tensor, capacity: int, window: int, kernel: int, pool: str) -> list[list[int]]:
    """By the paper, in Python: the positions that each KV head keeps, from the attention matrix [hq, L, L]."""
    length, group = a.shape[-1], a.shape[0] // HEADS
    kept = []
    for head in range(HEADS):
        sums = [float(a[head * group : (head + 1) * group, -window:, j].sum()) / group for j in range(length - window)]
        pooled = []
        for j in range(len(sums)):
            near = [sums[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < len(sums)]
            pooled.append(max(near) if pool == "max" else sum(near) / kernel)
        best = sorted(range(len(pooled)), key=lambda j: (-pooled[j], j))[: capacity - window]
        kept.append(sorted(best) + list(range(length - window, length)))
    return kept


def kept(one: Walk) -> list[list[list[int]]]:
    heads = one.model.config.kv_heads
    return [[one.positions(layer, head) for head in range(heads)] for layer in range(len(one.kv.layers))]


@pytest.mark.parametrize(
    ("window", "kernel", "keep", "pool"),
    [(8, 5, 0.4, "avg"), (4, 1, 20, "max"), (16, 7, 17, "max"), (1, 3, 0.1, "avg")],
)
def test_keeps_what_the_attention_matrix_names(window: int, kernel: int, keep: float, pool: str) -> None:
    prompt = text(90)
    one = Walk(tiny.model(), prompt, evict=snapkv(keep=keep, window=window, kernel=kernel, pool=pool))
    one.feed(prompt)
    capacity = max(int(keep * 90) if keep <= 1 else int(keep), window)
    full = matrix(tiny.model(), prompt)
    assert kept(one) == [named(full[layer], capacity, window, kernel, pool) for layer in range(4)]
    assert len({tuple(head) for layer in kept(one) for head in layer}) > 1, "heads differ, or the test tests little"


def test_a_models_own_window_hides_rows_from_the_vote() -> None:
    model, prompt = sliding(24, 3), text(70)
    one = Walk(model, prompt, evict=snapkv(model, keep=30, window=6, kernel=1))
    one.feed(prompt)
    full = matrix(model, prompt)
    assert kept(one) == [named(full[layer], 30, 6, 1, "avg") for layer in range(3)]


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_chunked_prompts_keep_the_same_rows(sizes: list[int]) -> None:
    """Queries of the last rows are gathered over as many chunks as they take."""
    prompt, knobs = text(100), {"keep": 0.3, "window": 12}
    whole = Walk(tiny.model(), prompt, evict=snapkv(**knobs))
    whole.feed(prompt)
    parts = Walk(tiny.model(), prompt, evict=snapkv(**knobs))
    for piece in cuts(prompt, sizes):
        assert all(len(head) == parts.request.computed for layer in kept(parts) for head in layer), "not before the end"
        parts.feed(piece)
    assert kept(parts) == kept(whole)
    assert not parts.request.state.get("snapkv"), "queries that have voted are let go"


def test_a_step_tried_twice_votes_once() -> None:
    prompt, knobs = text(80), {"keep": 0.3, "window": 12}
    whole = Walk(tiny.model(), prompt, evict=snapkv(**knobs))
    whole.feed(prompt)
    one = Walk(tiny.model(), prompt, evict=snapkv(**knobs))
    one.feed(prompt[:72])
    one.try_(prompt[72:])
    one.kv.commit(0)  # it failed
    one.try_(prompt[72:77])
    one.kv.commit(0)
    one.feed(prompt[72:77])
    one.feed(prompt[77:])
    assert kept(one) == kept(whole)


def test_decoding_equals_full_cache_with_the_others_hidden() -> None:
    """Positions stay true: the compressed cache is the whole one seen through a mask, per head and layer."""
    tokens, knobs = text(110), {"keep": 0.25, "window": 8}
    one = Walk(tiny.model(), tokens[:80], evict=snapkv(**knobs))
    one.feed(tokens[:80])
    stay = kept(one)
    got = torch.cat([one.feed(piece) for piece in cuts(tokens[80:], [1, 1, 4])])
    truth = Masked(lambda layer, head, q, k: q < 80 or k >= 80 or k in stay[layer][head])
    want = walk(tiny.model(), tokens[:80], [tokens[80:]], evict=truth)[80:]
    torch.testing.assert_close(got, want, **CLOSE)
    assert (want - oracle.logits(tiny.checkpoint(), tokens)[80:]).abs().max() > 1e-2, "what went was worth something"


@pytest.mark.parametrize("keep", [1.0, 60])
def test_room_for_all_is_dense(keep: float) -> None:
    tokens = text(70)
    one = Walk(tiny.model(), tokens[:60], evict=snapkv(keep=keep, window=8))
    got = torch.cat([one.feed(tokens[:60]), *(one.feed([token]) for token in tokens[60:])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), tokens), **CLOSE)
    assert one.kv.layers[0].slabs[0].positions is None, "nothing was moved"


def test_memory_really_falls() -> None:
    prompt = text(400)
    one = Walk(tiny.model(), prompt, evict=snapkv(keep=0.25, window=16))
    before, live = one.ledger.used, 0
    one.try_(prompt)
    one.kv.commit(400)
    live = one.kv.live_bytes
    one.kv.drop_last(0)
    one.feed(prompt)
    assert one.kv.live_bytes * 4 == live
    assert one.ledger.used == before * (-(-(100 + ROUND) // ROUND)) // (-(-400 // ROUND))
    assert one.ledger.used == one.kv.bytes


def test_a_prefix_hit_leaves_the_voters_to_compute() -> None:
    """The last `window` rows are never taken from the cache, so the same rows stay as without one."""
    prompt = text(100)
    engine = tiny.engine({"evict": "snapkv:keep=0.3,window=40"})
    outs, stays = [], []
    for _ in range(2):
        request = Request(prompt, tiny.greedy(8))
        engine.add(request)
        while request.prefilling:
            engine.step()
        assert request.kv is not None
        stays.append([part.committed[:, :30].tolist() for la in request.kv.layers for part in la.read()
                      if part.committed is not None])  # fmt: skip
        while request.left is None:
            engine.step()
        outs.append(request.out)
    assert engine.counters.prefix_hits == 32, "the 40 rows that vote are computed; of the others, whole blocks hit"
    assert outs[0] == outs[1] and stays[0] == stays[1] and len(stays[0]) == 4


@pytest.mark.parametrize(("knobs", "says"), [
    ({"keep": 0.0}, r"keep=0\.0 must be above 0: a share of the prompt up to 1, or a number of rows"),
    ({"keep": 30.5}, r"keep=30\.5: above 1 it is a number of rows, which 30\.5 is not: say 30 or 31, or a share up"),
    ({"window": 0}, "window=0 must be at least 1"), ({"kernel": 4}, "kernel=4 must be odd .*: choose 5"),
    ({"kernel": -4}, "kernel=-4 must be odd and at least 1: choose 1"),
    ({"pool": "sum"}, "pool='sum': choose avg or max"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_fix(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"snapkv: {says}"):
        SnapKV(**knobs)


# ---- what scoring evictors share
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(0, 9),
       st.integers(0, 3))  # fmt: skip
def test_retain_takes_the_best_and_the_last(scores: list[list[int]], keep: int, recent: int) -> None:
    got = retain(torch.tensor(scores, dtype=torch.float32), keep, recent).tolist()
    for head, slots in zip(scores, got):
        best = sorted(range(7), key=lambda j: (-head[j], j))[:keep]  # of equal scores, the earlier
        assert slots == sorted(best) + list(range(7, 7 + recent))


def some(count: int, n: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, n - 1), min_size=count, max_size=count).map(sorted)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_uneven_budgets_per_head_are_attended_exactly(data: st.DataObject) -> None:
    """Ragged heads, end to end: single rows, slices and trees read what a masked full cache would show them."""
    tokens, prompt, model = text(70), 50, tiny.model(heads=6, kv_heads=3)
    sizes = st.sampled_from([1, 7, 20])  # heads that keep equally many are stored and read together
    stay = [[data.draw(some(data.draw(sizes), prompt)) for _ in range(3)] for _ in range(4)]
    one = Walk(model, tokens[:prompt], evict=Uneven(stay))
    one.feed(tokens[:prompt])
    truth = Masked(lambda layer, head, q, k: q < prompt or k >= prompt or k in stay[layer][head])
    full = Walk(model, tokens[:prompt], evict=truth)
    full.feed(tokens[:prompt])
    entry = 2 * 8 * 4
    assert one.kv.live_bytes == sum(len(head) for layer in stay for head in layer) * entry
    for piece in cuts(tokens[prompt:], [1, 3, 1, 5]):
        torch.testing.assert_close(one.feed(piece), full.feed(piece), **CLOSE)
        assert kept(one) == [[head + list(range(prompt, one.request.computed)) for head in layer] for layer in stay]
    tree, parents = tokens[:5], [-1, 0, 0, 1, 2]
    torch.testing.assert_close(one.try_(tree, parents), full.try_(tree, parents), **CLOSE)
