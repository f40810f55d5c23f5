"""Rows that see blocks of their own span, and trees of any size, against the plain twin: every instruction set here."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import attention, native
from phasewise.ops.native import prefill, spans
from phasewise.ops.native.spans import Few, SeenWindow
from tests import seeds
from tests.ops.targets import EACH, HERE, NATIVE, SETS, drawn, running

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(4, 2, 64), (6, 3, 20), (3, 1, 7), (2, 2, 256)]  # heads_q, heads, dim
LOADED = {target: native.load(target) for target in HERE}


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return str(request.param)


def use(patch: pytest.MonkeyPatch, target: str) -> None:
    for module in (prefill, spans):
        patch.setattr(module, "library", lambda: LOADED[target])


def make(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype) -> Few:
    """Keys and values are the first n rows of a longer slab, and the queries lie inside a fused buffer."""
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n + 5, dim).to(kind)[:, :n] for _ in range(2))
    return Few(q, k, v)


def own(rows: int, block: int) -> Tensor:
    """bool [rows, rows]: a row sees its own block and those before."""
    blocks = torch.arange(rows) // block
    return blocks[None, :] <= blocks[:, None]


def exact(few: Few, sees: Tensor, scale: float, window: int | None = None) -> Tensor:
    rows, n = few.q.shape[0], few.k.shape[1]
    mask = torch.cat((torch.ones(rows, n - rows).bool(), sees), 1)
    if window is not None:
        mask &= torch.arange(n - rows, n)[:, None] - torch.arange(n) < window
    return attention.reference(few.q.float(), few.k.float(), few.v.float(), mask[None], scale)[0]


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def slice_of(few: Few, block: int, window: int | None = None) -> Tensor:
    return prefill.causal(few.q, few.k, few.v, 0.2, few.scales, SeenWindow(window or 0, block=block))


@pytest.mark.parametrize(("draw", "sets"), drawn(4))
@NATIVE
def test_blocks_equal_the_twin(draw: int, sets: list[str]) -> None:
    """Whole blocks and an incomplete last one; a block that holds all is full attention. By both kernels."""
    some, kind, window = seeds.draw("blocks", draw), KINDS[draw % 2], (None, 1, 50)[draw % 3]
    shape = some.choice(SHAPES)
    torch.manual_seed(some.getrandbits(32))
    for rows, n in [(1, 5), (8, 8), (30, 1050), (65, 65), (97, 300), (300, 511)]:
        for block in (2, 7, 1000, some.choice([4, 32, 64, 100])):
            few = make(shape, rows, n, kind)
            want = exact(few, own(rows, block), 0.2, window)
            for target in sets:
                with running(target, prefill, spans):
                    close(slice_of(few, block, window), want)
                    close(spans.attend([few._replace(seen=SeenWindow(0, block=block))], 0.2, window)[0], want)
            if window is None:
                close(attention.causal_plain(few.q, few.k, few.v, 0.2, block), want)


@pytest.mark.parametrize("sets", SETS)
@settings(max_examples=25)
@given(data=st.data())
def test_blocks_are_read_alike_however_they_are_cut(data: st.DataObject, sets: list[str]) -> None:
    """Bit for bit: pieces of whole blocks, with the rows of later ones unwritten; and rounded rows as they are."""
    block, kind = data.draw(st.sampled_from([2, 3, 4, 16, 60, 64, 130])), data.draw(st.sampled_from(KINDS))
    rows, before = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 200))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    few = make((4, 2, 64), rows, before + rows, kind)
    if data.draw(st.booleans()):
        k, k_scale, v, v_scale = Int8().format().encode(few.k, few.v)
        few = few._replace(k=k, v=v, scales=(k_scale, v_scale))
    cuts = sorted(data.draw(st.sets(st.integers(0, -(-rows // block)), max_size=4)) | {0, -(-rows // block)})
    with pytest.MonkeyPatch.context() as patch:
        for target in sets:
            use(patch, target)
            whole, few_rows = (
                slice_of(few, block),
                spans.attend([few._replace(seen=SeenWindow(0, block=block))], 0.2)[0],
            )
            for first, end in pairwise(cuts):
                start, stop = first * block, min(end * block, rows)
                piece = _piece(few, start, stop)
                assert torch.equal(slice_of(piece, block), whole[start:stop])
                piece = piece._replace(seen=SeenWindow(0, block=block))
                assert torch.equal(spans.attend([piece], 0.2)[0], few_rows[start:stop])


def _piece(few: Few, start: int, stop: int) -> Few:
    upto = few.k.shape[1] - few.q.shape[0] + stop
    scales = None if few.scales is None else (few.scales[0][:, :upto], few.scales[1][:, :upto])
    return few._replace(q=few.q[start:stop], k=few.k[:, :upto], v=few.v[:, :upto], scales=scales)


@pytest.mark.parametrize("sets", SETS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_mask_of_any_size(data: st.DataObject, sets: list[str]) -> None:
    """Trees of one row to many: as the twin has them; and each row bit for bit as in a small tree or alone."""
    kind, shape = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(SHAPES))
    rows, before = data.draw(st.integers(1, 150)), data.draw(st.sampled_from([0, 1, 63, 70, 500, 1000]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    sees = torch.rand(rows, rows) < data.draw(st.sampled_from([0.02, 0.3, 0.9]))
    sees |= torch.eye(rows, dtype=torch.bool)
    few = make(shape, rows, before + rows, kind)._replace(sees=sees)
    beside = make(shape, 3, 40, kind)
    some = data.draw(st.integers(1, rows))  # the first rows, which see none of the others, are a tree of their own
    small = sees.clone()
    small[:some, some:] = False
    with pytest.MonkeyPatch.context() as patch:
        for target in sets:
            use(patch, target)
            close(spans.attend([few], 0.2)[0], exact(few, sees, 0.2))
            whole = spans.attend([few._replace(sees=small), beside], 0.2)[0][:rows]
            piece = _piece(few, 0, some)._replace(sees=small[:some, :some].contiguous())
            assert torch.equal(spans.attend([piece], 0.2)[0], whole[:some])
            if some < rows:  # the others come later, when the first are there
                later = few._replace(q=few.q[some:], sees=small[some:].contiguous())
                assert torch.equal(spans.attend([later, beside], 0.2)[0][: rows - some], whole[some:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_a_long_chain_is_read_as_its_rows_one_by_one(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    few = make((4, 2, 64), 130, 1100, kind)
    chain = spans.attend([few._replace(sees=torch.ones(130, 130).tril().bool())], 0.2)[0]
    alone = [_piece(few, i, i + 1) for i in range(130)]
    assert torch.equal(spans.attend(alone, 0.2)[0], chain)
