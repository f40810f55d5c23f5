"""kv.blocks: what a row reads depends on how many rows it sees alone, and every byte is in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.cache import KV
from phasewise.kv.format import SIDES, BlockCut, Raw, RowFormat, block_bytes, block_format
from phasewise.methods.store.gear import Gear
from phasewise.methods.store.kivi import Kivi
from phasewise.request.request import Request
from tests import double, tiny
from tests.kv.harness import Walk, cuts
from tests.kv.sealing import Slowly, by_hand, through

KIVI = Kivi(bits=2, group=4, residual=8).format()
GEAR = Gear(bits=2, group=4, block=8, rank=1, sparse=0.1).format()
FORMATS = pytest.mark.parametrize("format", [KIVI, GEAR], ids=["kivi", "gear"])
PROMPT, WHOLE = 37, 80
FIXTURES = [HealthCheck.function_scoped_fixture]  # one and the same for all examples


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is a step function: see tests/laws/test_kv_methods.py."""
    double.everything(monkeypatch)


@settings(max_examples=40, suppress_health_check=FIXTURES)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 300))
def test_cuts(rows: int, tail: int, n: int) -> None:
    cut = BlockCut(rows, tail)
    sealed = cut.sealed(n)
    assert sealed % rows == 0 and (sealed == 0 or n - sealed >= tail) and n - sealed < max(tail, 0) + rows + tail + 1
    assert cut.sealed(n) == max([m for m in range(0, n + 1, rows) if n - m >= tail], default=0)
    assert cut.blocks(cut.last(cut.blocks(n))) == cut.blocks(n) < cut.blocks(cut.last(cut.blocks(n)) + 1)


def tokens() -> list[int]:
    return tiny.prompts(WHOLE)[0]


def fed(
    format: RowFormat, sizes: Sequence[int], prompt: Sequence[int] = (PROMPT,), attend: object = None
) -> torch.Tensor:
    """Logits of all rows; the prompt in pieces of `prompt` rows, what follows in pieces of `sizes`."""
    every = tokens()
    one = Walk(tiny.model(), every[:PROMPT], format=format, attend=attend)
    pieces = [*cuts(every[:PROMPT], prompt), *cuts(every[PROMPT:], sizes)]
    return torch.cat([one.feed(piece) for piece in pieces])


@cache
def slowly(format: RowFormat) -> torch.Tensor:
    blocks = block_format(format)
    assert blocks is not None
    rounder = by_hand(2, 4) if format is KIVI else through(blocks)
    return fed(Raw(), [1], attend=Slowly(blocks.cuts, rounder))


@FORMATS
@pytest.mark.parametrize(("sizes", "prompt"), [([1], [5]), ([9, 2], [PROMPT]), ([WHOLE], [5])], ids=str)
def test_every_row_reads_what_it_would_alone(format: RowFormat, sizes: list[int], prompt: list[int]) -> None:
    got, want = fed(format, sizes, prompt), slowly(format)
    assert torch.allclose(got, want, atol=1e-9)
    dense = fed(Raw(), [1])
    assert torch.allclose(got[:PROMPT], dense[:PROMPT], atol=1e-9), "prompts are computed from rows as they are"
    assert float((got[PROMPT:] - dense[PROMPT:]).abs().max()) > 0.01, "and what follows is not"


@FORMATS
def test_trees_across_a_border(format: RowFormat) -> None:
    """Every node reads its own path, of which a part may be sealed for it; rejected nodes leave no trace."""
    every, want = tokens(), slowly(format)
    one = Walk(tiny.model(), every[:PROMPT], format=format)
    one.feed(every[:PROMPT])
    at = PROMPT
    while at + 12 < WHOLE:
        tree, parents, path = [every[at]], [-1], [0]
        for right in every[at + 1 : at + 11]:  # beside each right token a wrong one, before or after it
            pair = [right, 3 + (right + 1) % 60] if right % 2 else [3 + (right + 1) % 60, right]
            parent = path[-1]
            tree += pair
            parents += [parent, parent]
            path.append(len(tree) - 2 + pair.index(right))
        logits = one.try_(tree, parents)
        assert torch.allclose(logits[path], want[at : at + 11], atol=1e-9)
        keep = path[: 1 + at % 11]
        one.commit(tree, keep)
        at += len(keep)
        assert one.kv.layers[0].n == at


@FORMATS
@settings(max_examples=3, deadline=None, suppress_health_check=FIXTURES)
@given(st.data())
def test_forks_dumps_and_the_ledger(format: RowFormat, data: st.DataObject) -> None:
    """Whatever forks, is dumped, loaded and closed: rows are read alike, and the ledger has the bytes of all."""
    every, want = tokens(), slowly(format)
    first = Walk(tiny.model(), every[:PROMPT], format=format)
    first.feed(every[:PROMPT])
    walks = [first]
    for _ in range(data.draw(st.integers(1, 8))):
        one = data.draw(st.sampled_from(walks))
        action = data.draw(st.sampled_from(["feed", "feed", "fork", "move"]))
        if action == "fork":
            walks.append(one.fork())
        elif action == "move":
            dumped = one.kv.dump()
            other = Walk(tiny.model(), every[:PROMPT], format=format)
            other.kv.load(dumped)
            other.request.tokens, other.request.computed = list(one.request.tokens), one.request.computed
            for each in walks:
                each.kv.close()
            assert one.ledger.used == 0
            walks = [other]
        else:
            at, n = one.request.computed, data.draw(st.integers(1, 9))
            if at + n <= WHOLE:
                assert torch.allclose(one.feed(every[at : at + n]), want[at : at + n], atol=1e-9)
        assert walks[0].ledger.used == bytes_of([walk.kv for walk in walks])
    for walk in walks:
        walk.kv.close()
    assert walks[0].ledger.used == 0


def bytes_of(kvs: Sequence[KV]) -> int:
    """Of all tensors, once each."""
    buffers = {}
    for kv in kvs:
        for layer in kv.layers:
            assert layer.blocks is not None
            for buffer in (*layer.blocks.held, *(slab.buffer for slab in layer.slabs)):
                buffers[id(buffer)] = sum(plane.nbytes for plane in buffer.planes)
    return sum(buffers.values())


@FORMATS
def test_what_is_sealed_is_really_freed(format: RowFormat) -> None:
    """However long the text, rows as they are fit a buffer of one size; all else lies in blocks."""
    one = Walk(tiny.model(), tiny.prompts(500)[0], format=format)
    one.feed(one.request.prompt)
    blocks = block_format(format)
    assert blocks is not None
    for _ in range(100):
        one.feed([5])
        for layer in one.kv.layers:
            (slab,), n = layer.slabs, one.request.computed
            assert layer.blocks is not None and slab.buffer.cap <= 128 and slab.base + slab.n == layer.n == n
            counts = [blocks.cuts[side].blocks(n) for side in SIDES]
            assert layer.blocks.counts == counts
            live = sum(counts[side] * block_bytes(blocks, layer.shape, side) for side in SIDES)
            live += sum((n - layer.blocks.rows(side)) * 12 * 8 for side in SIDES)
            assert layer.live_bytes == 2 * live
    assert one.ledger.used == bytes_of([one.kv]) < one.kv.layers[0].n * 4 * 2 * 2 * 12 * 8 / 2


@pytest.mark.parametrize("store", ["kivi:bits=2,group=4,residual=8", "gear:group=4,block=8,rank=1,sparse=0"])
def test_what_admission_is_told_is_what_is_taken(store: str) -> None:
    engine = tiny.engine({"store": store}, prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(130)[0], tiny.greedy(40))
    engine.add(request)
    engine.step()
    assert engine.ledger.peak <= engine.store.cost(131)
    while request.left is None:
        assert request.kv is not None and engine.kv_bytes == bytes_of([request.kv])
        engine.step()
    assert engine.ledger.peak <= engine.store.cost(131), "sealing takes no more than was booked"


@pytest.mark.parametrize("verbs", [{"attend": "quest"}, {"attend": "hydragen"}, {"evict": "snapkv"}], ids=str)
def test_what_does_not_go_together_is_refused_by_name(verbs: dict[str, str]) -> None:
    ((verb, name),) = verbs.items()
    with pytest.raises(UserError, match=f"kivi packs finished rows in blocks: {verb} {name} .*Leave out --{verb}"):
        tiny.engine({"store": "kivi:group=4,residual=8", **verbs})
    tiny.engine({"store": "kivi:bits=16", **verbs})


def test_blocks_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="store kivi: group=8 does not divide the 12"):
        tiny.engine({"store": "kivi:group=8,residual=8"})
    with pytest.raises(UserError, match="store gear: rank=9 is more than blocks of 8 x 12 have: choose 8"):
        tiny.engine({"store": "gear:group=4,block=8,rank=9"})
