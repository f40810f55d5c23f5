"""Blocks that native kernels read packed: whole steps and drafts over them, beside the open path over opened ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.kv.format import SIDES, BlockCut, KVShape, RowFormat, packings
from phasewise.methods.store._approximated import Approximated
from phasewise.methods.store.gear import Gear
from phasewise.methods.store.kivi import Kivi
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native import spans
from phasewise.ops.native.sealing import Sealing, Seals
from phasewise.request.request import Request
from tests import tiny
from tests.kv.harness import Walk
from tests.store.packed_steps import beside_mates, forks_and_dumps_change_nothing
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
PROMPT, WHOLE = 37, 80
KIVI = Kivi(bits=2, group=4, residual=16).format()
WIDE = Kivi(bits=4, group=16, residual=32).format()
LEVELS = Gear(bits=4, group=8, block=16, rank=0, sparse=0).format()  # GEAR without what mends its levels
MENDED = Gear(bits=2, group=8, block=16, rank=3, sparse=0.2).format()
APART = Gear(bits=4, group=16, block=16, rank=0, sparse=0.1).format()
EVERY = {"kivi": KIVI, "wide": WIDE, "levels": LEVELS, "mended": MENDED, "apart": APART}
FORMATS = pytest.mark.parametrize("format", EVERY.values(), ids=EVERY)


def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=128), dtype=torch.bfloat16)  # heads of 32 numbers


def tokens() -> list[int]:
    return tiny.prompts(WHOLE)[0]


def fed(of: Model, format: RowFormat, sizes: Sequence[int] = (1,)) -> tuple[Tensor, Walk]:
    """Logits of the rows after a prompt, in steps of so many rows, over and over."""
    every, found, at = tokens(), list[Tensor](), PROMPT
    one = Walk(of, every[:PROMPT], format=format)
    one.feed(every[:PROMPT])
    while at < WHOLE:
        some = every[at : at + sizes[len(found) % len(sizes)]]
        found.append(one.feed(some))
        at += len(some)
    return torch.cat(found), one


def plainly(of: Model, format: RowFormat, patch: pytest.MonkeyPatch) -> tuple[Tensor, Walk]:
    """`fed`, over blocks that are opened."""
    with patch.context() as here:
        here.setattr("phasewise.kv.blocks.packings", lambda format, shape: None)
        return fed(of, format)


def far(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@FORMATS
def test_whole_steps_are_as_near_as_the_open_path(format: RowFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    got, one = fed(model(), format)
    assert [each.rows for each in made] == [PROMPT] + [1] * (WHOLE - PROMPT) and all(each.whole for each in made)
    made.clear()
    plain, other = plainly(model(), format, monkeypatch)
    assert [each.rows for each in made] == [PROMPT], "the twin was to open blocks"
    exact, _ = fed(Model.load(tiny.checkpoint(hidden=128), dtype=torch.float32), format)
    assert far(got, exact) < 1.2 * far(plain, exact) + 1e-3
    names = ("row_layers", "rows", "kv_bytes_read", "kv_bytes_written")
    assert [getattr(one.counters, n) for n in names] == [getattr(other.counters, n) for n in names]
    for layer, twin in zip(one.kv.layers, other.kv.layers):
        assert layer.blocks is not None and twin.blocks is not None
        assert layer.blocks.counts == twin.blocks.counts and layer.live_bytes == twin.live_bytes


@FORMATS
def test_what_is_sealed_is_what_each_layer_seals_by_itself(format: RowFormat) -> None:
    """Blocks of all layers are sealed in one call."""
    _, one = fed(model(), format)
    for layer in one.kv.layers:
        assert layer.blocks is not None
        for side in SIDES:
            cut = layer.blocks.format.cuts[side]
            assert layer.blocks.counts[side] == cut.blocks(WHOLE)
            last = slice(cut.sealed(WHOLE) - cut.rows, cut.sealed(WHOLE))
            base = layer.slabs[0].base
            if last.start < base:
                continue
            rows = layer.slabs[0].buffer.planes[side][:, last.start - base : last.stop - base]
            for plane, new in zip(layer.blocks.buffers[side].planes, layer.blocks.format.seal(side, rows)):
                assert torch.equal(plane[:, layer.blocks.counts[side] - 1 :][:, :1], new)


@pytest.mark.parametrize(
    ("format", "sizes"),
    [(KIVI, [2]), (WIDE, [5, 1, 3]), (MENDED, [8]), (APART, [5, 1, 3]), (LEVELS, [2])],
    ids=[*EVERY],
)
def test_drafts_read_bit_for_bit_what_single_rows_read(
    format: RowFormat, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for steps whose rows read one another from a block: these go the open path, which rounds differently."""
    made, of = passes(monkeypatch), model()
    want, _ = fed(of, format)
    made.clear()
    got, _ = fed(of, format, sizes)
    exact, _ = fed(Model.load(tiny.checkpoint(hidden=128), dtype=torch.float32), format)
    assert far(got, exact) < 1.3 * far(want, exact) + 1e-3
    keys, at, same = format.cuts[0], PROMPT, 0  # type: ignore[attr-defined]
    for turn in range(WHOLE):
        rows = min(sizes[turn % len(sizes)], WHOLE - at)
        if rows < 1:
            break
        crossing = keys.sealed(at + rows - 1) > at
        if crossing:
            break  # what comes after reads rows that differ by that rounding
        here = slice(at - PROMPT, at - PROMPT + rows)
        assert torch.equal(got[here], want[here])
        at, same = at + rows, same + rows
    assert same > 0 and len(made) > 1 and all(each.whole for each in made)


@FORMATS
def test_trees_read_bit_for_bit_what_their_paths_read(format: RowFormat) -> None:
    every, of = tokens(), model()
    want, _ = fed(of, format)
    one = Walk(of, every[:PROMPT], format=format)
    one.feed(every[:PROMPT])
    right = every[PROMPT : PROMPT + 3]
    wrong = [3 + (token + 1) % 60 for token in right]
    logits = one.try_([right[0], wrong[1], right[1], wrong[2], right[2]], [-1, 0, 0, 1, 2])
    assert torch.equal(logits[[0, 2, 4]], want[:3])
    one.commit([right[0], wrong[1], right[1], wrong[2], right[2]], [0, 2])
    assert torch.equal(one.feed(every[PROMPT + 2 : PROMPT + 3]), want[2:3]), "what was rejected leaves no trace"


def test_where_blocks_go_is_found_once_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIVI seals a row of values with every token, in all layers."""
    made, called = list[int](), list[int]()

    class Counted(Seals):
        def __init__(self, blocks: Sequence[Sealing], by_channel: bool, bits: int, group: int) -> None:
            made.append(len(blocks))
            super().__init__(blocks, by_channel, bits, group)

        def __call__(self, slots: int, first: int = 0, block: int = 0) -> None:
            called.append(slots)
            super().__call__(slots, first, block)

    monkeypatch.setattr("phasewise.kv.blocks.Seals", Counted)
    _, one = fed(model(), KIVI)
    assert set(made) == {len(one.kv.layers)}
    assert called.count(1) == WHOLE - PROMPT and len(made) < (WHOLE - PROMPT) / 2


def test_forks_and_dumps_in_between() -> None:
    every, of = tokens(), model()
    want, _ = fed(of, KIVI)
    forks_and_dumps_change_nothing(lambda: Walk(of, every[:PROMPT], format=KIVI), every, PROMPT, want)


@pytest.mark.parametrize(("store", "draft"), [
    ("kivi:group=4,residual=8", {}), ("kivi:bits=4,group=16,residual=32", {"draft": "prompt_lookup:k=3"}),
], ids=str)  # fmt: skip
def test_mates_change_no_token_and_share_the_call(
    store: str, draft: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, prompts = {"schedule": "prefill_first", "store": store} | draft, tiny.prompts(33, 5, 64, 17, 50)
    engine, made = beside_mates(model(), given, prompts, monkeypatch)
    if not draft:
        assert all(each.whole for each in made) and sum(each.rows for each in made) == engine.counters.rows
        assert len(made) == engine.counters.forwards, "all requests share one call"


def test_what_is_read_is_counted_packed() -> None:
    """By closed form, as tests/store/test_kivi.py has it for the open path."""
    bits, group, residual, prompt, new = 2, 4, 8, 50, 30
    engine = tiny.engine(
        {"store": f"kivi:bits={bits},group={group},residual={residual}"}, of=model(), prefix_cache=False
    )
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(prompt)[0], tiny.greedy(new))
    engine.add(request)
    engine.step()
    before, want = engine.counters.kv_bytes_read, 0.0
    shape = request.kv.layers[0].shape  # type: ignore[union-attr]
    while request.left is None:
        engine.step()
    for seen in range(prompt, prompt + new - 1):  # rows before a token's own
        keys, values = seen // residual * residual, max(0, seen - residual)
        tail = (seen + 1 - keys) + (seen + 1 - values)
        want += 4 * shape.heads * shape.dim * ((keys + values) * (bits + 32 / group) / 8 + tail * 2)
    assert engine.counters.kv_bytes_read - before == want


def test_who_is_left_to_the_open_path() -> None:
    """Heads of other widths, float32, blocks to whose levels too much is added."""
    assert KIVI.packings(32) is not None and KIVI.packings(32) == KIVI.packings(64)  # type: ignore[attr-defined]
    cut = BlockCut(8)
    shape = KVShape(2, 64, torch.bfloat16)
    assert packings(Approximated(2, 4, (cut, cut), rank=1, sparse=0.1), shape) is not None
    large = BlockCut(64), BlockCut(64)
    assert packings(Approximated(2, 4, large, rank=16, sparse=0), shape) is not None
    assert packings(Approximated(2, 4, large, rank=17, sparse=0), shape) is None
    assert packings(Approximated(2, 4, (cut, cut), rank=1), replace(shape, dtype=torch.float32)) is None
    assert spans.opens(2, 4, 8, 32) and not spans.opens(2, 4, 8, 16)
    for width, dtype in ((64, torch.bfloat16), (128, torch.float32)):
        _, one = fed(Model.load(tiny.checkpoint(hidden=width), dtype=dtype), KIVI)
        assert one.kv.flat() is None and one.kv.layers[0].read()[0].packed is None
