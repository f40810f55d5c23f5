"""attend.infllm: means of windows, scores of blocks, where it does nothing, and bytes that are the closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.infllm import BlockMeans, InfLLM
from phasewise.step import reference
from phasewise.step.read import Read
from tests import oracle, tiny
from tests.kv.harness import Walk, cuts

PROMPT, TOKENS = 70, tiny.prompts(130)[0]
LAYERS, HEADS, DIM = 4, 2, 12  # of the tiny model, in float32
KEY = HEADS * DIM * 4


def started(method: InfLLM) -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=method)
    one.feed(TOKENS[:PROMPT])
    return one


@pytest.mark.parametrize(("block", "sizes"), [(4, [3, 1, 9]), (8, [1]), (16, [60])])
def test_means_equal_those_of_the_whole(block: int, sizes: list[int]) -> None:
    """However the rows came, tries that were given up included: bit for bit the mean-pool of all keys."""
    method = InfLLM(block, 1, block, 1, 0)
    one = started(method)
    for piece in cuts(TOKENS[PROMPT:], sizes):
        one.try_(tiny.prompts(7, seed=4)[0])
        with torch.inference_mode():
            one.kv.commit(0)
        one.feed(piece)
    one.feed(TOKENS[:1])
    (part,) = one.kv.layers[2].read()
    kept: Any = one.kv.layers[2].derived["infllm", block, 0]
    assert kept.upto == BlockMeans(method.block).windows(130) == 130 // (block // 4) - 1
    stride = block // 4
    means = torch.stack([part.k[:, w * stride : (w + 2) * stride].mean(1) for w in range(kept.upto)], 1)
    torch.testing.assert_close(kept.known, means, atol=1e-6, rtol=1e-6)


def test_below_dense_len_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense to the last bit, and no score is made; from there on, scores are."""
    scored: list[int] = []
    plain = BlockMeans.votes

    def watched(self: BlockMeans, read: Read, means: Tensor) -> Tensor:
        scored.append(int(read.q_positions[0]))
        return plain(self, read, means)

    monkeypatch.setattr(BlockMeans, "votes", watched)
    one, dense = started(InfLLM(4, 1, 4, 1, dense_len=100)), Walk(tiny.model(), TOKENS[:PROMPT])
    dense.feed(TOKENS[:PROMPT])
    for token in TOKENS[PROMPT:99]:
        assert torch.equal(one.feed([token]), dense.feed([token]))
    assert not scored and not any(layer.derived for layer in one.kv.layers)
    assert one.counters.kv_bytes_read == dense.counters.kv_bytes_read
    one.feed([TOKENS[99]])
    assert scored == [99] * LAYERS


def test_the_switch_does_not_change_rows_before_it() -> None:
    """A slice across `dense_len`: its first rows are dense, its last ones choose."""
    one = started(InfLLM(4, 1, 4, 1, dense_len=100))
    got, want = one.feed(TOKENS[PROMPT:]), oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:]
    torch.testing.assert_close(got[: 99 - PROMPT], want[: 99 - PROMPT], atol=3e-4, rtol=1e-4)
    assert (got[99 - PROMPT :] - want[99 - PROMPT :]).abs().amax(1).min() > 1e-2


def test_prompts_choose_as_well() -> None:
    """In an engine a prompt's rows are those that single steps would give."""
    method = InfLLM(4, 1, 4, 1, dense_len=30)
    whole, single = (Walk(tiny.model(), TOKENS[:1], attend=method) for _ in range(2))
    whole.feed(TOKENS[:1])
    single.feed(TOKENS[:1])
    want = torch.cat([single.feed([token]) for token in TOKENS[1:]])
    torch.testing.assert_close(whole.feed(TOKENS[1:]), want, atol=3e-3, rtol=1e-3)
    assert (want - oracle.logits(tiny.checkpoint(), TOKENS)[1:]).abs().max() > 1e-1
    assert method.traits.phases == ("prefill", "decode")


@pytest.mark.parametrize("entries", [1, HEADS * 120 * 7])
def test_long_prompts_choose_piece_by_piece(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, or a few at a time, so that no mask of all rows is ever made; what they read stays the same."""
    made: list[int] = []
    plain = reference.selected

    def watched(*of: Any) -> Tensor:
        mask = plain(*of)
        made.append(mask.shape[1])
        return mask

    method = InfLLM(4, 1, 4, 1, dense_len=30)
    want = started(method).feed(TOKENS[PROMPT:])
    monkeypatch.setattr(reference, "selected", watched)
    one = started(method)
    made.clear()
    monkeypatch.setattr(reference, "ENTRIES", entries)
    torch.testing.assert_close(one.feed(TOKENS[PROMPT:]), want, atol=1e-4, rtol=1e-4)
    rows = max(1, entries // (HEADS * 130))
    assert made == LAYERS * [*[rows] * (60 // rows), *([60 % rows] if 60 % rows else [])]


def test_bytes_read_are_the_closed_form() -> None:
    """The rows of the blocks, a mean for each complete window, and the keys of windows just complete."""
    block, init, topk = 8, 1, 3
    method = InfLLM(block, init, 8, topk, 0)
    one, kept, stride = started(method), 0, 2
    for token in TOKENS[PROMPT:]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        one.feed([token])
        first = (n - 1) // block - method.local + 1
        rows = (init + topk) * block + n - first * block
        assert rows <= method.most
        known = BlockMeans(method.block).windows(n - 1)
        made = (known + 1 - kept) * stride if known > kept else 0
        made += 2 * stride if BlockMeans(method.block).windows(n) > known else 0
        assert one.counters.kv_bytes_read - before == LAYERS * KEY * (2 * rows + known + made)
        kept = known


def test_local_blocks_are_counted_once() -> None:
    """As many blocks as there is room for: all are read, none twice, and one less leaves one out."""
    for topk, dense in ((26, True), (25, False)):  # 33 blocks of 4 in the end, the first and 6 local ones read anyway
        one = started(InfLLM(4, 1, 20, topk, 0))
        got = torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]])
        want = oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:]
        same = bool((got - want).abs().amax(1)[-1] < 3e-4)
        assert same is dense, topk


@pytest.mark.parametrize(("knobs", "said"), [
    ({"block": 6}, "block=6 must be a multiple of 4.*: choose 8"), ({"block": 0}, "block=0 .*: choose 4"),
    ({"topk": 0}, "topk=0 must be at least 1"), ({"window": 0}, "window=0 must be at least 1"),
    ({"init": -1}, "init=-1 must be at least 0"), ({"dense_len": -1}, "dense_len=-1 must be at least 0"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_fix(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"infllm: {said}"):
        InfLLM(**knobs)
