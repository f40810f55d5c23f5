"""Attention over listed slots and the choice of pages, against their plain twins, on every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import native
from phasewise.ops.attention import reference
from phasewise.ops.native import listed
from phasewise.ops.native.listed import Listed, Pages
from tests.ops.targets import EACH, by_levels

HERE = [name for name in native.TARGETS if native.load(name) is not None]
pytestmark = pytest.mark.skipif(not HERE, reason="no native kernels here")
MOST = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}  # errors relative to the largest number


def chosen(pages: Pages) -> Tensor:
    """What `listed.choose` lists for one row, plainly."""
    heads, (_, heads_q, _) = pages.low.shape[0], pages.q.shape
    q = pages.q.float().view(heads, heads_q // heads, -1)  # [h, G, D]
    if pages.high is None:
        each = q @ pages.low.float().mT
    else:
        each = q.clamp_min(0) @ pages.high.float().mT + q.clamp_max(0) @ pages.low.float().mT
    order = each.amax(1).sort(descending=True, stable=True).indices  # [h, P]
    best = order[:, : pages.chosen].sort().values
    slots = (best[:, :, None] * pages.size + torch.arange(pages.size)).flatten(1)
    last = torch.arange(pages.own, pages.n).expand(heads, -1)
    return torch.cat((slots, last), 1)[:, None].int()


@pytest.fixture(params=EACH, autouse=True, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    kernels = native.load(request.param)
    native._share_threads(kernels)  # type: ignore[arg-type]
    patch.setattr(listed, "library", lambda: kernels)
    yield request.param
    patch.undo()


def made(seed: int, rows: int, shape: tuple[int, int, int], n: int, count: int, dtype: torch.dtype) -> Listed:
    """Rows whose lists hold slots in any order, none twice, and some gaps (-1)."""
    heads, group, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads * group, dim, generator=generator).to(dtype)
    k, v = (torch.randn(heads, n + 7, dim, generator=generator).to(dtype)[:, 3 : n + 3] for _ in range(2))
    order = torch.rand(heads, rows, n, generator=generator).argsort(-1)[..., :count]
    gaps = torch.rand(order.shape, generator=generator) < 0.1
    return Listed(q, k, v, order.masked_fill(gaps, -1).int())


def twin(rows: Listed) -> Tensor:
    """A mask over all slots, in float32."""
    heads, count, n = rows.slots.shape[0], rows.q.shape[0], rows.k.shape[1]
    mask = torch.zeros(heads, count, n + 1, dtype=torch.bool)
    mask.scatter_(2, rows.slots.long().masked_fill(rows.slots < 0, n), True)
    seen = mask[..., :n]
    out, _ = reference(rows.q.float(), rows.k.float(), rows.v.float(), seen, 0.3)
    blind = ~seen.any(-1).T.repeat_interleave(rows.q.shape[1] // heads, 1)  # [R, Hq]: a row that sees nothing reads 0
    return out.masked_fill(blind[..., None], 0.0)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    return float((got.float() - want).abs().max()) <= MOST[dtype] * max(1.0, float(want.abs().max()))


SHAPES = st.sampled_from([(1, 1, 64), (3, 3, 64), (2, 4, 128), (1, 20, 32), (2, 2, 20), (2, 1, 256)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000), rows=st.integers(1, 5), shape=SHAPES, n=st.integers(1, 900), share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_only_what_is_listed_is_read(
    seed: int, rows: int, shape: tuple[int, int, int], n: int, share: float, dtype: torch.dtype
) -> None:
    one = made(seed, rows, shape, n, int(share * n), dtype)
    [got] = listed.attend([one], 0.3)
    assert close(got, twin(one), dtype)
    spoilt = one.k.clone(), one.v.clone()  # a slot that nobody lists may hold anything
    for head in range(shape[0]):
        unread = torch.ones(n, dtype=torch.bool)
        unread[one.slots[head][one.slots[head] >= 0].long()] = False
        unread[0] = False  # stands in for gaps, at a weight of nought
        for plane in spoilt:
            plane[head, unread] = float("nan")
    assert torch.equal(listed.attend([one._replace(k=spoilt[0], v=spoilt[1])], 0.3)[0], got)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 700), threads=st.sampled_from([1, 2, 3]))
def test_mates_and_threads_change_no_bit(seed: int, n: int, threads: int) -> None:
    spans = [made(seed + i, i + 1, (3, 3, 64), n + 300 * i, min(n, 100 * i + 30), torch.bfloat16) for i in range(3)]
    alone = [listed.attend([span], 0.3)[0] for span in spans]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = listed.attend(spans, 0.3)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    rows = spans[2]
    apart = [
        listed.attend([rows._replace(q=rows.q[r : r + 1], slots=rows.slots[:, r : r + 1])], 0.3)[0] for r in range(3)
    ]
    assert torch.equal(torch.cat(apart), alone[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 20])
def test_int8_rows(dim: int, dtype: torch.dtype, target: str) -> None:
    """Bit for bit what the decoded rows give; or, where no row is decoded, nearer to exact sums over levels."""
    format = Int8().format()
    one = made(1, 3, (2, 3, dim), 500, 300, dtype)
    k, k_scale, v, v_scale = format.encode(one.k, one.v)
    as_read = format.decode((k, k_scale, v, v_scale), dtype)
    [got] = listed.attend([Listed(one.q, k, v, one.slots, (k_scale, v_scale))], 0.3)
    [want] = listed.attend([one._replace(k=as_read[0], v=as_read[1])], 0.3)
    if not by_levels(target, dim, dtype):
        assert torch.equal(got, want)
        return
    exact = format.decode((k, k_scale, v, v_scale), torch.float32)
    [full] = listed.attend([one._replace(q=one.q.float(), k=exact[0], v=exact[1])], 0.3)
    assert (got.float() - full).norm() < (want.float() - full).norm()


def test_strides_and_empty_lists() -> None:
    one = made(5, 4, (2, 2, 64), 90, 40, torch.float32)
    wide = torch.randn(4, 9, 64)
    wide[:, 2:6] = one.q
    lists = torch.zeros(2, 4, 80, dtype=torch.int32)
    lists[..., ::2] = one.slots
    [want] = listed.attend([one], 0.3)
    assert torch.equal(listed.attend([one._replace(q=wide[:, 2:6], slots=lists[..., ::2])], 0.3)[0], want)
    nothing = one._replace(slots=one.slots[..., :0])
    assert not listed.attend([nothing], 0.3)[0].any()
    none = one._replace(slots=torch.full_like(one.slots, -1))
    assert not listed.attend([none], 0.3)[0].any()


# ---- pages
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), heads=st.integers(1, 3), group=st.integers(1, 5), dim=st.sampled_from([16, 20, 64, 128]),
    pages=st.integers(1, 70), size=st.integers(1, 5), share=st.floats(0, 1), own=st.integers(0, 6),
)  # fmt: skip
def test_the_pages_that_promise_the_most(
    seed: int, heads: int, group: int, dim: int, pages: int, size: int, share: float, own: int
) -> None:
    """Small whole numbers: sums are exact, and ties frequent."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-3, 4, (1, heads * group, dim), generator=generator).float()
    bounds = torch.randint(-3, 4, (2, heads, pages, dim), generator=generator).float()
    low, high = bounds.amin(0), bounds.amax(0)
    made = Pages(q, low, high, size, int(share * pages), pages * size, pages * size + own)
    for one in (made._replace(high=None), made):
        want = chosen(one)
        assert torch.equal(listed.choose([one])[0], want)
    half = made._replace(q=q.bfloat16(), low=low.bfloat16(), high=high.bfloat16())
    others = [half._replace(chosen=pages), half, half._replace(chosen=0)]
    got = listed.choose(others)
    assert torch.equal(got[1], want)
    assert got[0].shape == (heads, 1, pages * size + own) and got[2].shape == (heads, 1, own)
