"""evict.streaming: dense until full, then a fresh forward of sinks and window, in constant memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.streaming import Streaming
from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import oracle, tiny, uncached
from tests.asking import Asking
from tests.kv.harness import Masked, Walk, cuts, sliding, walk

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def streaming(**knobs: Any) -> Any:
    return Streaming(**knobs).bind(Host(tiny.model(), None, None, None, None))  # type: ignore[arg-type]


def text(n: int, seed: int = 0) -> list[int]:
    return tiny.prompts(n, seed=seed)[0]


def cached(tokens: list[int], sinks: int, window: int) -> list[int]:
    """What is in the cache when the last of `tokens` has entered it."""
    return tokens if len(tokens) <= sinks + window else tokens[:sinks] + tokens[len(tokens) - window :]


def test_before_eviction_equals_dense() -> None:
    tokens = text(40)
    got = walk(tiny.model(), tokens[:30], cuts(tokens[30:], [1]), evict=streaming(sinks=4, window=36))
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), tokens), **CLOSE)


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_one_layer_equals_a_fresh_forward_of_sinks_and_window(sinks: int) -> None:
    """With one layer, keys and values depend on the embeddings alone, so nothing of the dropped rows may remain."""
    model, tokens = tiny.model(layers=1), text(150)
    got = walk(model, tokens[:9], cuts(tokens[9:], [1, 3, 40, 1, 1, 7]), evict=streaming(sinks=sinks, window=13))
    for t in [*range(10, 20), *range(20, len(tokens), 9)]:
        want = oracle.logits(tiny.checkpoint(layers=1), cached(tokens[: t + 1], sinks, 13))[-1]
        torch.testing.assert_close(got[t], want, **CLOSE)


def test_text_positions_fail_that_test_and_are_masks_only() -> None:
    tokens, sinks, window = text(120), 3, 17
    knobs = {"sinks": sinks, "window": window, "positions": "text"}
    one = tiny.model(layers=1)
    got = walk(one, tokens[:9], cuts(tokens[9:], [1]), evict=streaming(**knobs))
    assert (got[-1] - oracle.logits(tiny.checkpoint(layers=1), cached(tokens, sinks, window))[-1]).abs().max() > 1e-2
    truth = Masked(lambda layer, head, q, k: k < sinks or q - k < window)
    got = walk(tiny.model(), tokens[:40], cuts(tokens[40:], [1, 5]), evict=streaming(**knobs))
    torch.testing.assert_close(got, walk(tiny.model(), tokens, [], evict=truth), **CLOSE)


@settings(max_examples=3, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(1, 140), st.sampled_from(["cache", "text"]))
def test_chunks_equal_single_steps(sizes: list[int], prompt: int, positions: str) -> None:
    """Prompt or not, in one span or many, before and after rows are really dropped."""
    tokens, knobs = text(140), {"sinks": 3, "window": 21, "positions": positions}
    want = walk(tiny.model(), tokens[:1], cuts(tokens[1:], [1]), evict=streaming(**knobs))
    one = Walk(tiny.model(), tokens[:prompt], evict=streaming(**knobs))
    got = torch.cat([one.feed(piece) for piece in cuts(tokens, sizes)])
    torch.testing.assert_close(got, want, **CLOSE)


def test_draft_trees_equal_their_paths() -> None:
    tokens, other = text(90), text(8, seed=5)
    one = Walk(tiny.model(), tokens[:60], evict=streaming(sinks=3, window=21))
    one.feed(tokens[:60])
    one.feed(tokens[60:70])
    parents = [-1, 0, 0, 1, 2, 4, 5]
    tree = [tokens[70], tokens[71], other[0], tokens[72], other[1], other[2], other[3]]
    logits = one.try_(tree, parents)
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tree[at])
            at = parents[at]
        alone = Walk(tiny.model(), tokens[:70], evict=streaming(sinks=3, window=21))
        alone.feed(tokens[:70])
        steps = torch.cat([alone.feed([token]) for token in path])
        torch.testing.assert_close(logits[node], steps[-1], **CLOSE)
    one.commit(tree, [0, 2, 4])
    follow = Walk(tiny.model(), tokens[:70], evict=streaming(sinks=3, window=21))
    follow.feed(tokens[:70])
    follow.feed([tree[0], tree[2], tree[4]])
    torch.testing.assert_close(one.feed(tokens[80:82]), follow.feed(tokens[80:82]), **CLOSE)


@pytest.mark.parametrize(("window", "sinks", "recent"), [(64, 3, 12), (10, 3, 12), (10, 2, 5)])
def test_a_models_own_window_counts_within_the_cache(window: int, sinks: int, recent: int) -> None:
    """Sliding-window models measure distance where rows seem to be: near sinks stay visible, far ones do not."""
    model, tokens = sliding(window, 1), text(80)
    got = walk(model, tokens[:5], cuts(tokens[5:], [1, 4]), evict=streaming(sinks=sinks, window=recent))
    for t in range(0, len(tokens), 4):
        want = uncached.logits(model, cached(tokens[: t + 1], sinks, recent))[-1]
        torch.testing.assert_close(got[t], want, **CLOSE)


class TwoForms(Asking):
    """Attends as the library does, and checks it against the two forms that the method is described by."""

    def __init__(self, model: Model, sinks: int, window: int) -> None:
        self.model, self.sinks, self.window, self.checked = model, sinks, window, 0

    def __call__(self, reads: list[Read]) -> list[torch.Tensor]:
        return [self.one(read) for read in reads]

    def one(self, read: Read) -> torch.Tensor:
        out = read.attend()
        t = int(read.q_positions[0])
        if t < self.sinks + self.window or read.q.shape[0] > 1:
            return out
        positions = read.part.positions[0]
        stay = torch.nonzero((positions < self.sinks) | (positions > t - self.window))[:, 0]
        k, v, at = read.part.k[:, stay], read.part.v[:, stay], positions[stay]
        m, delta = len(stay), t - (len(stay) - 1)
        turn = self.model.rotate
        # every key rotated to its index in the cache, the query to the last index
        contiguous = turn(read.layer, k, torch.arange(m) - at)
        first = ops.reference(turn(read.layer, read.q, -delta), contiguous, v, None, read.scale)[0]
        # sinks by a query turned back, the window as it is, merged by their log-sum-exp
        back, near = turn(read.layer, read.q, -delta), slice(self.sinks, None)
        parts = [ops.reference(back, k[:, : self.sinks], v[:, : self.sinks], None, read.scale),
                 ops.reference(read.q, k[:, near], v[:, near], None, read.scale)]  # fmt: skip
        for form in (first, ops.merge(parts)):
            torch.testing.assert_close(out, form, atol=1e-5, rtol=1e-4)
        self.checked += 1
        return out


def test_the_two_forms_agree() -> None:
    tokens = text(80)
    forms = TwoForms(tiny.model(), 3, 21)
    walk(tiny.model(), tokens[:20], cuts(tokens[20:], [1]), evict=streaming(sinks=3, window=21), attend=forms)
    assert forms.checked == 4 * (80 - 24)


def test_memory_stays_constant() -> None:
    sinks, window = 4, 28
    one = Walk(tiny.model(), text(3), evict=streaming(sinks=sinks, window=window))
    rows, peak = [], 0
    for token in text(300):
        one.feed([token])
        peak = max(peak, one.ledger.used)
        rows.append(one.kv.layers[0].n)
    assert max(rows) < sinks + window + EVERY
    assert len(set(rows[100:])) == EVERY, "drops come in lots"
    fixed = 128 * one.kv.layers[0].bytes // one.kv.layers[0].slabs[0].buffer.cap * len(one.kv.layers)
    assert one.ledger.used <= fixed and peak <= 2 * fixed
    for layer in range(4):
        kept = one.positions(layer)
        assert kept[:sinks] == list(range(sinks)) and kept[-1] == 299
        assert kept[sinks:] == list(range(kept[sinks], 300)) and kept[sinks] <= 300 - window + 1


def test_engine_memory_is_bounded() -> None:
    """What is allocated for an answer many times the window stays that of the window."""
    engine = tiny.engine({"evict": "streaming:sinks=4,window=40"}, prefix_cache=False)
    request = tiny.Request(text(20), tiny.greedy(200))
    engine.add(request)
    live = []
    while request.left is None:
        engine.step()
        live.append(engine.kv_bytes)
    row = 4 * (2 * 2 * 12 * 4 + 8)  # layers; keys and values, KV heads, their size, float32; a position
    assert max(live) <= 128 * row and len(request.out) == 200


@pytest.mark.parametrize(("sinks", "window"), [(4, 0), (-1, 1020)])
def test_bad_knobs_are_named_with_the_bounds(sinks: int, window: int) -> None:
    says = f"streaming: sinks={sinks} must be at least 0, window={window} at least 1"
    with pytest.raises(UserError, match=says):
        Streaming(sinks, window)


def test_steps_without_eviction_build_no_mask() -> None:
    """The plain single row stays free of masks while everything is in sight."""
    seen: list[Any] = []

    class Look(Asking):
        def __call__(self, reads: list[Read]) -> list[torch.Tensor]:
            seen.extend((read.view, read.mask()) for read in reads)
            return [read.attend() for read in reads]

    tokens = text(30)
    walk(tiny.model(), tokens[:20], cuts(tokens[20:], [1]), evict=streaming(sinks=4, window=36), attend=Look())
    assert seen and all(view is None and mask is None for view, mask in seen)
