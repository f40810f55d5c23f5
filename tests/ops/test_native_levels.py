"""Native attention over rows of int8 levels against exact sums, for every instruction set that this machine runs.

How far off it may be follows from how queries and weights are rounded: see `bounds`. Elsewhere than where levels are
read as they are, rows and weights are rounded to bfloat16, and the bounds are wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops.native import listed, spans
from phasewise.ops.native.listed import Listed
from phasewise.ops.native.spans import Common, Few, SeenWindow
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.targets import EACH, by_levels, running

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 2, 128), (5, 1, 96), (2, 2, 256), (16, 1, 64), (3, 1, 20)]  # heads_q, heads, dim
CODEC = Int8().format()
SCALE = 0.2


@pytest.fixture(params=EACH, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param, spans, listed) as target:
        yield target


def make(shape: tuple[int, int, int], rows: int, n: int, seed: int, tree: bool = False) -> Few:
    """Queries of a fused buffer over the first n rows of a slab."""
    heads_q, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads_q + 2 * heads, dim, generator=generator).bfloat16()[:, :heads_q]
    size = 10.0 ** torch.randint(-3, 2, (2, heads, n + 5, 1), generator=generator)  # of rows: some outweigh others
    k, v = (torch.randn(heads, n + 5, dim, generator=generator) * size[i] for i in range(2))
    planes = [plane[:, :n] for plane in CODEC.encode(k * 0.3, v)]
    sees = ancestors([i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(rows)]) if tree else None
    return Few(q, planes[0], planes[2], sees, scales=(planes[1], planes[3]))


class Exact(NamedTuple):
    """Sums in float64 over [R, Hq, ...], and how far off scores and values may be."""

    out: Tensor
    lse: Tensor
    scores: Tensor
    value: Tensor


def exact(few: Few, mask: Tensor | None = None, softcap: float = 0.0) -> Exact:
    """`mask` [Hq, R, N], or one for all heads; None: what the span sees."""
    assert few.scales is not None
    mask = sight(few) if mask is None else mask
    group = few.q.shape[1] // few.k.shape[0]
    k, v = (
        (x.double() * s.double()[..., None]).repeat_interleave(group, 0) for x, s in zip((few.k, few.v), few.scales)
    )
    q = few.q.double().transpose(0, 1)
    scores, largest = q @ k.mT * SCALE, q.abs().amax(-1)
    if few.seen is not None and few.seen.far is not None:
        far = few.seen.far.double().transpose(0, 1)
        scores[..., : few.seen.sinks] = far @ k[:, : few.seen.sinks].mT * SCALE
        largest = torch.maximum(largest, far.abs().amax(-1))
    # a query's numbers are 1 / 32512 of its largest apart
    off = SCALE * largest / 65024 * k.abs().sum(-1).amax(-1)[:, None]  # [Hq, R]
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    value = torch.where(mask.any(1)[..., None], v.abs(), 0).amax((1, 2))  # [Hq]
    return Exact((scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T, off.T, value)


def sight(few: Few) -> Tensor:
    """bool [1, R, N]: causal, or the span's tree; within its window, and sinks."""
    rows, n = few.q.shape[0], few.k.shape[1]
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    if few.seen is not None:
        slots, at = torch.arange(n), torch.arange(n - rows, n)[:, None]
        mask &= (slots < few.seen.sinks) | (slots > at - few.seen.window)
    return mask[None]


def bounds(want: Exact) -> tuple[Tensor, Tensor]:
    """What out and lse may be off by: shares of a sum move as scores do, twice, and a block's 64 weights, times what
    their levels are worth, are 1 / 65535 of the largest apart. Then floats, and a result in bfloat16."""
    scores = want.scores + 2e-6 * (1 + want.lse.abs())
    moved = (torch.expm1(2 * scores) + 64 / 131070 + 1e-5) * want.value
    return want.out.abs() / 256 + 1.01 * moved[..., None], scores + 1e-5


def check(got: Tensor, lse: Tensor | None, want: Exact, target: str) -> None:
    if by_levels(target, got.shape[-1], got.dtype):
        out_bound, lse_bound = bounds(want)
        assert bool(((got.double() - want.out).abs() <= out_bound).all())
        assert lse is None or bool(((lse.double() - want.lse).abs() <= lse_bound).all())
    else:
        largest = float(want.value.max())
        torch.testing.assert_close(got.double(), want.out, rtol=2e-2, atol=2e-2 * largest)


@pytest.mark.parametrize("shape", [SHAPES[0], *seeds.some(SHAPES[1:], 2, "levels")])
def test_near_exact_sums(shape: tuple[int, int, int], target: str) -> None:
    """Single rows, several, trees; from one slot to more than a part, beside one another."""
    cases = [(1, 1), (1, 2), (1, 17), (1, 63), (1, 64), (1, 65), (1, 300), (1, 2500), (3, 3), (5, 70), (16, 1030)]
    batch = [make(shape, rows, n, seed) for seed, (rows, n) in enumerate(cases)]
    batch += [make(shape, 7, 7, 90, tree=True), make(shape, 9, 200, 91, tree=True)]
    out, lse = spans.attend(batch, SCALE, with_lse=True)
    assert lse is not None
    sizes = [few.q.shape[0] for few in batch]
    for few, rows, rows_lse in zip(batch, out.split(sizes), lse.split(sizes), strict=True):
        check(rows, rows_lse, exact(few), target)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_capped_scores(softcap: float, target: str) -> None:
    few = make((6, 2, 64), 3, 700, 5)
    out, lse = spans.attend([few], SCALE, with_lse=True, softcap=softcap)
    check(out, lse, exact(few, softcap=softcap), target)


@pytest.mark.parametrize(
    ("shape", "window", "sinks"),
    [((9, 3, 64), 3, 4), ((4, 2, 128), 64, 4), ((3, 1, 96), 300, 65), ((9, 3, 64), 20, 1100)],
)
def test_windows_with_sinks(window: int, sinks: int, shape: tuple[int, int, int], target: str) -> None:
    """Sinks by the queries that read what is near, and by others."""
    few = make(shape, 5, 1500, 7)
    others = make(shape, 5, 5, 8).q.contiguous()
    for far in (None, others):
        one = few._replace(seen=SeenWindow(window, sinks, far))
        check(*spans.attend([one], SCALE, with_lse=True), exact(one), target)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 1400), shape=st.sampled_from(SHAPES), threads=st.integers(1, 3))
def test_mates_threads_and_cuts_change_no_bit(
    seed: int, n: int, shape: tuple[int, int, int], threads: int, target: str
) -> None:
    batch = [make(shape, rows, n + extra, seed + rows) for rows, extra in ((1, 0), (4, 700), (12, 12))]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together, _ = spans.attend(batch, SCALE)
    finally:
        torch.set_num_threads(before)
    start = 0
    for few in batch:
        rows, slots = few.q.shape[0], few.k.shape[1]
        assert torch.equal(spans.attend([few], SCALE)[0], together[start : start + rows])
        assert few.scales is not None
        for i in (0, rows - 1):
            end = slots - rows + i + 1
            scales = few.scales[0][:, :end], few.scales[1][:, :end]
            one = Few(few.q[i : i + 1], few.k[:, :end], few.v[:, :end], scales=scales)
            assert torch.equal(spans.attend([one], SCALE)[0], together[start + i : start + i + 1])
        start += rows


@pytest.mark.parametrize(("shape", "stop"), zip(seeds.some(SHAPES, 4, "levels in common"), [64, 640, 1088, 2112]))
@pytest.mark.usefixtures("target")
def test_what_is_read_in_common_changes_no_bit(shape: tuple[int, int, int], stop: int) -> None:
    first = make(shape, 1, stop + 40, 1)
    batch = [first, *(make(shape, rows, stop + 40 + rows, rows) for rows in (2, 5))]
    for few in batch[1:]:
        assert few.scales is not None and first.scales is not None
        for to, of in zip((few.k, few.v, *few.scales), (first.k, first.v, *first.scales)):
            to[:, :stop] = of[:, :stop]
    want, want_lse = spans.attend(batch, SCALE, with_lse=True)
    got, lse = spans.attend(batch, SCALE, with_lse=True, commons=[Common((0, 1, 2), 0, stop, 0)])
    assert lse is not None and want_lse is not None
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 4), shape=st.sampled_from(SHAPES), n=st.integers(1, 900),
    run=st.sampled_from([1, 5, 16, 64, 200]), threads=st.integers(1, 3),
)  # fmt: skip
def test_listed_rows(
    seed: int, rows: int, shape: tuple[int, int, int], n: int, run: int, threads: int, target: str
) -> None:
    """Lists of runs, of which some are left out, with gaps; in company of another list, on some threads."""
    few, heads = make(shape, rows, n, seed), shape[1]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(heads, rows, -(-n // run), generator=generator) < 0.4
    seen = chosen.repeat_interleave(run, -1)[..., :n]
    lists = torch.where(seen, torch.arange(n), -1).int()
    one = Listed(few.q, few.k, few.v, lists.sort(dim=-1).values, few.scales)  # gaps first: runs begin anywhere
    mate = Listed(few.q, few.k, few.v, lists.flip(0), few.scales)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got, _ = listed.attend([one, mate], SCALE)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, listed.attend([one], SCALE)[0])
    mask = seen.repeat_interleave(shape[0] // heads, 0)  # [Hq, R, N]
    blind = ~mask.any(-1).T
    assert not got[blind].any(), "a row that sees nothing reads 0"
    want = exact(few, mask | ~mask.any(-1, keepdim=True))
    check(torch.where(blind[..., None], want.out.to(got.dtype), got), None, want, target)


def test_nothing_and_bad_numbers(target: str) -> None:
    """Queries of zeros read the mean; rows of zeros are nothing; what is not a number spoils those who read it."""
    few = make((4, 2, 64), 1, 100, 3)
    assert few.scales is not None
    nothing = few._replace(q=torch.zeros_like(few.q))
    check(*spans.attend([nothing], SCALE, with_lse=True), exact(nothing), target)
    planes = CODEC.encode(torch.zeros(2, 100, 64), torch.zeros(2, 100, 64))
    empty = Few(few.q, planes[0], planes[2], scales=(planes[1], planes[3]))
    assert not spans.attend([empty], SCALE)[0].any()
    for bad in (float("nan"), float("inf")):
        q = few.q.clone()
        q[0, 1, 5] = bad
        got = spans.attend([few._replace(q=q)], SCALE)[0][0]
        assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()
        for which in (0, 1):
            scales = [scale.clone() for scale in few.scales]
            scales[which][1, 99] = float("nan")
            spoilt = few._replace(scales=(scales[0], scales[1]))
            lists = torch.arange(100, dtype=torch.int32).expand(2, 1, 100).contiguous()
            for out in (
                spans.attend([spoilt, few], SCALE)[0],
                torch.cat(listed.attend([Listed(*spoilt[:3], lists, spoilt.scales)], SCALE)),
            ):
                assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1:].isfinite().all()
