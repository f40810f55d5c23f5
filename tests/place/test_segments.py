"""KV in pieces: rows arrive bit for bit in any order, nothing is complete too early, and rewritten rows are noticed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.cluster.segments import Landing, SegmentBlock, Sent, between, cut, size
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.engine import Engine
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.store import Store
from phasewise.kv.wire import Misfit
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from tests import tiny

LAYERS = tiny.model().config.layers
ROWS = 90


def computed(schedule: str = "prefill_first", steps: int = 1, **verbs: str) -> tuple[Engine, Request]:
    """A prompt of 90 rows after some steps."""
    engine = tiny.engine({"schedule": schedule, **verbs}, prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(ROWS)[0], tiny.greedy(20))
    engine.add(request)
    for _ in range(steps):
        engine.step()
    return engine, request


def landing(engine: Engine, tokens: int = ROWS + 1) -> Landing:
    return Landing(
        Store(kv_shapes(engine.model), engine.store.format, ledger=Ledger(1 << 30), counters=Counters()), tokens
    )


def same_rows(ours: KV, theirs: KV) -> None:
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.n == b.n
        for mine, other in zip(a.slabs[0].buffer.planes, b.slabs[0].buffer.planes, strict=True):
            assert torch.equal(mine[:, : a.n], other[:, : b.n])


# ---- numbers
def test_runs_of_layers_share_a_block() -> None:
    assert between([0] * 4, [16] * 4) == [SegmentBlock((0, 4), (0, 16))]  # a chunk
    assert between([16, 16, 0, 0], [16, 16, 16, 0]) == [SegmentBlock((2, 3), (0, 16))]  # a layer of a slice under way
    assert between([8, 8, 4, 4], [20, 20, 20, 4]) == [SegmentBlock((0, 2), (8, 20)), SegmentBlock((2, 3), (4, 20))]
    assert between([5, 5], [5, 5]) == []


counts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


@settings(deadline=None)
@given(counts)
def test_blocks_hold_exactly_what_is_ready_and_not_sent(pairs: list[tuple[int, int]]) -> None:
    sent, more = zip(*pairs)
    ready = [a + b for a, b in pairs]
    found = [(layer, row) for b in between(sent, ready) for layer in range(*b.layers) for row in range(*b.rows)]
    assert sorted(found) == [(layer, row) for layer in range(len(more)) for row in range(sent[layer], ready[layer])]
    assert all(SegmentBlock.of(block.plain()) == block for block in between(sent, ready))


# ---- rows
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, ROWS - 1), max_size=5, unique=True),
    st.lists(st.integers(1, LAYERS - 1), max_size=2, unique=True),
    st.randoms(use_true_random=False),
)
def test_pieces_in_any_order_and_twice_give_the_same_rows(
    rows: list[int], layers: list[int], order: random.Random
) -> None:
    engine, request = computed()
    edges, depths = sorted({0, ROWS, *rows}), sorted({0, LAYERS, *layers})
    pieces = [[SegmentBlock((a, b), (start, stop))] for a, b in pairwise(depths) for start, stop in pairwise(edges)]
    room = landing(engine)
    numbers = [*range(len(pieces)), *range(len(pieces))]
    order.shuffle(numbers)
    for number in numbers:
        assert room.covers(ROWS) == all(room.has(i) for i in range(len(pieces)))
        if not room.has(number):
            room.lay(number, pieces[number], cut(request.kv, pieces[number]))
    kv = room.finish(ROWS)
    same_rows(kv, request.kv)
    assert kv.bytes == room.store.ledger.used and room.bytes == 0
    assert room.store.counters.kv_bytes_moved == request.kv.live_bytes == sum(size(request.kv, p) for p in pieces)


@pytest.mark.parametrize(
    "missing", [SegmentBlock((0, 1), (0, 1)), SegmentBlock((3, 4), (89, 90)), SegmentBlock((1, 2), (40, 41))]
)
def test_a_single_missing_row_is_noticed(missing: SegmentBlock) -> None:
    engine, request = computed()
    room = landing(engine)
    (first, last), (start, stop) = missing.layers, missing.rows
    sides = [((0, first), (0, ROWS)), ((last, LAYERS), (0, ROWS)), ((first, last), (0, start)),
             ((first, last), (stop, ROWS))]  # fmt: skip
    around = [SegmentBlock(layers, rows) for layers, rows in sides]
    blocks = [b for b in around if b.layers[0] < b.layers[1] and b.rows[0] < b.rows[1]]
    room.lay(0, blocks, cut(request.kv, blocks))
    assert not room.covers(ROWS)
    room.lay(1, [missing], cut(request.kv, [missing]))
    assert room.covers(ROWS)


@pytest.mark.parametrize(
    "block",
    [
        SegmentBlock((0, 5), (0, 9)),
        SegmentBlock((0, 4), (100, 200)),
        SegmentBlock((2, 2), (0, 9)),
        SegmentBlock((-1, 4), (0, 9)),
    ],
)
def test_rows_that_have_no_place_do_not_fit(block: SegmentBlock) -> None:
    engine, request = computed()
    room = landing(engine)
    with pytest.raises(Misfit, match="do not fit"):
        room.lay(0, [block], cut(request.kv, [SegmentBlock((0, 4), (0, 9))]))
    assert not room.has(0) and not room.covers(1)


def test_tensors_of_another_shape_or_number_do_not_fit() -> None:
    engine, request = computed()
    block = SegmentBlock((0, 4), (0, 9))
    tensors = cut(request.kv, [block])
    for wrong in (tensors[:-1], [t[:, :1] for t in tensors], [t.double() for t in tensors]):
        room = landing(engine)
        with pytest.raises(Misfit, match="piece 0 does not fit"):
            room.lay(0, [block], wrong)
        room.close()
        room.close()
        assert room.store.ledger.used == 0


# ---- what may be sent, and what was sent in vain
def test_layers_of_a_slice_under_way_may_go_before_it_is_done() -> None:
    engine, request = computed("layered:rows_per_group=30", steps=0)
    sent, seen = Sent(), []
    while request.prefilling:
        engine.step()
        blocks = sent.more(request, ROWS)
        seen.append(blocks)
        sent.note(blocks)
    assert seen == [[SegmentBlock((layer, layer + 1), (0, ROWS))] for layer in range(LAYERS)]
    assert sent.rest(request) == []


def test_rows_that_may_be_computed_again_stay_until_they_are_kept() -> None:
    _, request = computed("layered:rows_per_group=30", steps=1)
    assert Sent().more(request, 64) == [SegmentBlock((0, 1), (0, 64))]
    sent = Sent()
    sent.note(sent.more(request, ROWS))
    request.slice.kv.commit(0)  # as a step that failed
    assert sent.more(request, ROWS) == [] and sent.spoiled


def test_a_prompt_that_was_preempted_goes_whole() -> None:
    engine, request = computed("sarathi:budget=40", steps=1)
    sent = Sent()
    assert sent.note(sent.more(request, ROWS)) == 0
    engine.room.preempt(request)
    assert sent.more(request, ROWS) == []
    while request.prefilling:
        engine.step()
    assert sent.rest(request) is None


@pytest.mark.parametrize("after", [1, 3])
def test_a_prompt_whose_rows_were_given_up_goes_whole(after: int) -> None:
    engine, request = computed("sarathi:budget=40", steps=after)
    sent = Sent()
    sent.note(sent.more(request, ROWS))
    while request.prefilling:
        engine.step()
    request.kv.keep(2, torch.arange(50))
    assert sent.rest(request) is None


def test_a_prompt_whose_rows_were_rewritten_in_place_goes_whole() -> None:
    _, request = computed("sarathi:budget=40", steps=3)
    sent = Sent()
    sent.note(sent.more(request, ROWS))
    layer = request.kv.layers[1]
    with torch.inference_mode():
        layer.rewrite([[plane[:, : layer.n] * 2 for plane in layer.slabs[0].buffer.planes]])
    assert sent.rest(request) is None
