"""Native attention over packed blocks and the rows behind them against exact sums, for every instruction set of this
machine.

How far off it may be follows from how queries and weights are rounded, group by group: see `bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.kv.format import KEYS, SIDES, VALUES, BlockCut, KVShape
from phasewise.methods.store._approximated import Approximated
from phasewise.ops.attention import attention
from phasewise.ops.native import spans
from phasewise.ops.native.spans import Few, Side
from phasewise.ops.packing import unpack
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.mates import change_nothing
from tests.ops.targets import EACH, HERE, NATIVE, drawn, in_pairs, running

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 2, 128), (5, 1, 96), (2, 2, 256), (16, 1, 64), (20, 1, 32)]  # heads_q, heads, dim
FORMS = [(2, 32, 128, 128), (4, 32, 64, 0), (2, 4, 8, 8), (4, 2, 40, 24), (2, 12, 96, 5), (4, 128, 128, 300)]
FORMS += [(2, 64, 64, 0, 64, 4, 0.02), (4, 8, 40, 24, 24, 3, 0.2), (2, 32, 128, 30, 1, 0, 0.1), (4, 16, 16, 8, 16, 1)]
FORMS += [(4, 32, 64, 70, 64, 4), (2, 64, 64, 0, 64, 0, 0.02), (2, 32, 64, 30, 16, 4, 0.02)]
SCALE = 0.2


@pytest.fixture(params=EACH, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param, spans) as target:
        yield target


class Form(NamedTuple):
    """Bits, numbers that share a step (or as many as a line of values has), slots of a block of keys, how many of the
    newest values lie as they were made, and slots of a block of values; rank and share of numbers apart added."""

    bits: int
    group: int
    rows: int
    tail: int
    of: int = 1
    rank: int = 0
    sparse: float = 0.0

    def format(self, dim: int) -> Approximated:
        cuts = BlockCut(self.rows), BlockCut(self.of, self.tail)
        return Approximated(self.bits, self.group, cuts, rank=self.rank, sparse=self.sparse)

    @property
    def of_keys(self) -> int:
        return min(self.group, self.rows)

    def of_values(self, dim: int) -> int:
        return min(self.group, dim)

    def fits(self, dim: int) -> bool:
        """Whether a format packs heads like that, and the kernels read them."""
        keys, values, format = self.of_keys, self.of_values(dim), self.format(dim)
        whole = self.rows % keys == 0 and dim % values == 0
        apart = 2 * max(format.outliers(format.form(side, dim)[1]) for side in SIDES)
        return whole and all(
            spans.opens(self.bits, group, rows, dim, self.rank, apart)
            for group, rows in ((keys, self.rows), (values, 8))
        )


class Kept(NamedTuple):
    """A span as the kernel reads it; and as float64 [H, N, D]: what keys and values are, and how large what is added to
    their levels may get on its way."""

    few: Few
    k: Tensor
    v: Tensor
    added: tuple[Tensor, Tensor]


def added(format: Approximated, side: int, planes: list[Tensor], dim: int) -> Tensor:
    """Magnitudes of the products of thin matrices, and of numbers apart: float64 [h, blocks * rows, D]."""
    planes = [plane.double().abs() for plane in planes]
    step = planes[-3]
    lines = torch.zeros(*step.shape[:3], format.form(side, dim)[1], dtype=torch.float64)
    if format.sparse:
        values, places = planes[-5:-3]
        lines.scatter_add_(-1, places.long(), values)
    rows = format.rows(side, lines)
    return rows + (planes[0] @ planes[1].mT).flatten(1, 2) if format.rank else rows


def make(
    shape: tuple[int, int, int], form: Form, rows: int, n: int, seed: int, start: int | None = None, tree: bool = False
) -> Kept:
    """The first slots that are packed when n - rows are there. Rows before `start`, at most all that both sides have
    packed, are in no memory."""
    heads_q, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads_q + 2 * heads, dim, generator=generator).bfloat16()[:, :heads_q]
    size = 10.0 ** torch.randint(-2, 2, (2, heads, 1, dim), generator=generator)  # of channels
    made = [(torch.randn(heads, n, dim, generator=generator) * size[i] * 0.3).bfloat16() for i in range(2)]
    format, sides, found, more = form.format(dim), list[Side](), list[Tensor](), list[Tensor]()
    each = form.of_keys, form.of_values(dim)
    for side in SIDES:
        cut = format.cuts[side]
        count, raw = cut.sealed(n - rows), made[side]
        room = cut.rows * (count // cut.rows + 2)
        spare = torch.full((heads, room - count, dim), 7.0)
        planes = format.seal(side, torch.cat((raw[:, :count].float(), spare), 1))
        there = [p[:, : count // cut.rows] for p in planes]
        whole = format.open(side, there, KVShape(heads, dim, torch.float64))
        found.append(torch.cat((whole, raw[:, count:].double()), 1))
        more.append(torch.zeros_like(found[side]))
        more[side][:, :count] = added(format, side, there, dim)
        step, low, levels = planes[-3:]
        thin, apart = planes[:2] if form.rank else (), planes[-5:-3] if form.sparse else ()
        sides.append(Side(levels, step, low, count, cut.rows, form.bits, each[side], thin, apart))
    base = min(side.slots for side in sides) if start is None else start
    sees = ancestors([i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(rows)]) if tree else None
    k, v = (x[:, base:].contiguous() for x in made)
    return Kept(Few(q, k, v, sees, base, sealed=(sides[KEYS], sides[VALUES])), found[0], found[1], (more[0], more[1]))


def sight(few: Few, window: int | None) -> Tensor:
    """bool [1, R, N]: causal, or the span's tree; within its window."""
    rows, n = few.q.shape[0], few.start + few.k.shape[1]
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    if window is not None:
        mask &= torch.arange(n) > torch.arange(n - rows, n)[:, None] - window
    return mask[None]


def levels_of(side: Side, numbers: int) -> tuple[Tensor, Tensor]:
    """Levels, and the step of each: float64 [H, blocks, lines, numbers]."""
    levels = unpack(side.levels, numbers, side.bits).double()
    return levels, side.step.double().repeat_interleave(side.group, -1).expand_as(levels)


class Truth(NamedTuple):
    """Attention and its log-sum-exp by sums in float64, and how far off from each a kernel may be: one that multiplies
    levels with whole numbers, and one that does with bfloat16."""

    want: Tensor  # [Hq, R, D]
    want_lse: Tensor  # [Hq, R]
    limits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

    def holds(self, got: Tensor, lse: Tensor | None) -> None:
        bound, most = self.limits[in_pairs(spans)]
        assert bool(((got.double().transpose(0, 1) - self.want).abs() <= bound).all())
        assert lse is None or bool(((lse.double().T - self.want_lse).abs() <= most + 1e-5).all())


def hold(truths: list[Truth], batch: list[Few], sets: list[str]) -> None:
    """The kernels of these instruction sets read spans together as they are to be read."""
    sizes = [few.q.shape[0] for few in batch]
    for target in sets:
        with running(target, spans):
            out, lse = spans.attend(batch, SCALE, with_lse=True)
            assert lse is not None
            for truth, rows, rows_lse in zip(truths, out.split(sizes), lse.split(sizes), strict=True):
                truth.holds(rows, rows_lse)


def check(got: Tensor, lse: Tensor | None, kept: Kept, softcap: float = 0.0, window: int | None = None) -> None:
    bounds(kept, softcap, window).holds(got, lse)


def bounds(kept: Kept, softcap: float = 0.0, window: int | None = None) -> Truth:
    few, k, v, (k_added, v_added) = kept
    assert few.sealed is not None
    keys, values = few.sealed
    group, dim = few.q.shape[1] // k.shape[0], k.shape[2]
    q, mask = few.q.double().transpose(0, 1), sight(few, window)  # [Hq, R, D]
    wide = k.repeat_interleave(group, 0)
    scores = q @ wide.mT * SCALE
    levels, steps = levels_of(keys, keys.rows)  # [H, blocks, D, rows]
    levels, steps = [x[:, : keys.slots // keys.rows].transpose(2, 3).flatten(1, 2) for x in (levels, steps)]
    of_queries, wide_steps = levels.repeat_interleave(group, 0), steps.repeat_interleave(group, 0)
    off = 4e-6 * (q.abs() @ wide.abs().mT)
    lows = (wide[:, : keys.slots] - of_queries * wide_steps).abs() + wide_steps * 15
    off[..., : keys.slots] = 4e-6 * (q.abs() @ lows.mT)
    off += 4e-6 * (q.abs() @ k_added.repeat_interleave(group, 0).mT)
    # a query's numbers times the steps of a group are 1 / 32512 of the largest number times the largest step apart; or
    # off by a 256th of themselves, and then levels are counted from their mean
    mean = (2**keys.bits - 1) / 2
    largest = q.abs().amax(-1)[..., None] * wide_steps.amax(-1)[:, None]  # [Hq, R, slots]
    roundings = (
        largest / 65024 * of_queries.sum(-1)[:, None],
        q.abs() @ ((of_queries - mean).abs() * wide_steps).mT / 255,
    )
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    shares = scores.softmax(-1)  # [Hq, R, N]
    want, want_lse = shares @ v.repeat_interleave(group, 0), scores.logsumexp(-1)
    # weights times steps are 1 / 32512 of what is largest in a block apart; or off by a 256th of themselves
    added = shares[..., values.slots :] @ v[:, values.slots :].abs().repeat_interleave(group, 0) / 250
    added += want.abs() / 250 + 1e-5 * (shares @ v_added.repeat_interleave(group, 0))
    added += 1e-5 * (shares @ v.abs().repeat_interleave(group, 0)) + 1e-5 * 15 * float(values.step.double().max())
    levels, steps = (x[:, : values.slots // values.rows].flatten(1, 2) for x in levels_of(values, dim))  # [H, slots, D]
    worth = torch.zeros_like(want)
    for at in range(0, values.slots, 64):
        some = slice(at, min(at + 64, values.slots))
        most_worth = steps[:, some].amax(1).repeat_interleave(group, 0)  # [Hq, D]
        of_block = shares[:, :, at : at + 64].amax(2)[..., None] * most_worth[:, None]  # [Hq, R, D]
        worth += 1.01 * of_block / 65024 * levels[:, some].sum(1).repeat_interleave(group, 0)[:, None]
    lost = worth, shares[..., : values.slots] @ ((levels - mean).abs() * steps).repeat_interleave(group, 0) / 255
    limits = list[tuple[Tensor, Tensor]]()
    for rounding, own in zip(roundings, lost, strict=True):
        each = off.clone()
        each[..., : keys.slots] += rounding
        most = (each * SCALE).masked_fill(~mask, 0).amax(-1) + 2e-6 * (1 + want_lse.abs())  # [Hq, R]
        # shares of a sum move as scores do, twice
        moved = torch.expm1(2 * most)[..., None] * (shares @ v.abs().repeat_interleave(group, 0))
        limits.append((moved + added + own, most))
    return Truth(want, want_lse, (limits[0], limits[1]))


CASES = [(shape, Form(*form)) for shape in SHAPES for form in FORMS if Form(*form).fits(shape[2])]


@pytest.mark.parametrize(("draw", "sets"), drawn(4, 4))
@NATIVE
def test_near_exact_sums(draw: int, sets: list[str]) -> None:
    """Single rows, several, trees; nothing packed, less than a block to more than a part; beside one another. Of forms
    with and without thin products and numbers apart, in turn."""
    shape, form = seeds.draw("sealed", draw).choice([case for case in CASES if (case[1].of > 1) == draw % 2])
    cases = [(1, 1), (1, 9), (1, 65), (1, 130), (3, 200), (1, 300), (2, 517), (16, 1030), (1, 2500)]
    batch = [make(shape, form, rows, n, seed) for seed, (rows, n) in enumerate(cases)]
    batch += [make(shape, form, 7, 7, 90, tree=True), make(shape, form, 9, 400, 91, start=0, tree=True)]
    hold([bounds(kept) for kept in batch], [kept.few for kept in batch], sets)


@pytest.mark.parametrize("form", [(4, 32, 128, 128), (2, 64, 64, 0, 64, 4, 0.02)], ids=str)
@pytest.mark.usefixtures("target")
def test_near_the_plain_twin(form: Any) -> None:
    """Blocks opened, and attention over bfloat16: the two are as near as rounding opened blocks to it allows."""
    kept = make((9, 3, 64), Form(*form), 1, 900, 3)
    twin = attention(kept.few.q, kept.k.bfloat16(), kept.v.bfloat16(), None, SCALE)
    got, _ = spans.attend([kept.few], SCALE)
    assert float((got.float() - twin.float()).norm() / twin.float().norm()) < 2e-2


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.usefixtures("target")
def test_capped_scores(softcap: float) -> None:
    kept = make((6, 2, 64), Form(2, 32, 64, 64), 3, 700, 5)
    out, lse = spans.attend([kept.few], SCALE, with_lse=True, softcap=softcap)
    check(out, lse, kept, softcap=softcap)


@pytest.mark.parametrize(
    ("window", "form"),
    [(3, FORMS[0]), (64, (4, 8, 40, 24, 24, 3, 0.2)), (300, FORMS[4]), (1100, (2, 32, 64, 70, 64, 4))],
    ids=str,
)
@pytest.mark.usefixtures("target")
def test_windows(window: int, form: Any) -> None:
    kept = make((9, 3, 96), Form(*form), 5, 1500, 7)
    out, lse = spans.attend([kept.few], SCALE, window, with_lse=True)
    check(out, lse, kept, window=window)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 1400), bits=st.sampled_from([2, 4]),
    group=st.sampled_from([4, 8, 12, 16, 32, 64]),
    blocks=st.integers(1, 6), tail=st.integers(0, 150), heads=st.integers(1, 3), each=st.integers(1, 9),
    dim=st.sampled_from([32, 64, 128, 192]), threads=st.integers(1, 3),
    more=st.sampled_from([(1, 0, 0.0), (8, 4, 0.05), (40, 2, 0.1), (16, 0, 0.02), (64, 4, 0.02)]),
)  # fmt: skip
@pytest.mark.usefixtures("target")
def test_mates_threads_and_cuts_change_no_bit(
    seed: int, n: int, bits: int, group: int, blocks: int, tail: int, heads: int, each: int, dim: int, threads: int,
    more: tuple[int, int, float],
) -> None:  # fmt: skip
    """Beside spans of other forms, and of rows as they were made; and rows of one span by themselves."""
    form, shape = Form(bits, group, 2 * group * blocks, tail, *more), (heads * each, heads, dim)
    assume(form.fits(dim))
    batch = [make(shape, form, rows, n + extra, seed + rows) for rows, extra in ((1, 0), (4, 500), (12, 12))]
    other = Form(6 - bits, 8, 16, 8)
    mates = [make(shape, other, 2, 150, seed).few, _opened(make(shape, other, 3, 70, seed + 1))]
    change_nothing(batch, mates, SCALE, threads, check)


def _opened(kept: Kept) -> Few:
    return Few(kept.few.q, kept.k.bfloat16(), kept.v.bfloat16())


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("form", [(2, 32, 128, 100, 24, 4, 0.05), (2, 64, 64, 0, 64, 4, 0.02)], ids=str)
def test_what_is_packed_is_read_there_and_nothing_else_is(form: Any) -> None:
    """Rows that are packed as well may hold anything, and so may blocks beyond."""
    form, shape = Form(*form), (4, 2, 64)
    kept = make(shape, form, 2, 700, 3, start=0)
    want = spans.attend([kept.few], SCALE)[0]
    assert kept.few.sealed is not None
    assert torch.equal(spans.attend([make(shape, form, 2, 700, 3).few], SCALE)[0], want)
    for side, plane in zip(kept.few.sealed, (kept.few.k, kept.few.v)):
        assert 0 < side.slots < 700
        plane[:, : side.slots] = float("nan")
        side.step[:, side.slots // side.rows :] = float("nan")
        side.low[:, side.slots // side.rows :] = float("nan")
        for beyond in (*side.thin, *side.apart[:1]):
            beyond[:, side.slots // side.rows :] = float("nan")
    assert torch.equal(spans.attend([kept.few], SCALE)[0], want)


@pytest.mark.usefixtures("target")
def test_nothing_and_bad_numbers() -> None:
    """Queries of zeros read the mean; what is not a number spoils those who read it, and no others."""
    kept = make((4, 2, 64), Form(4, 32, 64, 64), 1, 300, 3)
    nothing = kept._replace(few=kept.few._replace(q=torch.zeros_like(kept.few.q)))
    check(*spans.attend([nothing.few], SCALE, with_lse=True), nothing)
    sealed = kept.few.sealed
    assert sealed is not None
    for bad in (float("nan"), float("inf")):
        q = kept.few.q.clone()
        q[0, 1, 5] = bad
        got = spans.attend([kept.few._replace(q=q)], SCALE)[0][0]
        assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()
    for side in SIDES:
        for name in ("step", "low"):
            plane = getattr(sealed[side], name).clone()
            plane[1, 0, 0, 0] = float("nan")
            spoilt = list(sealed)
            spoilt[side] = sealed[side]._replace(**{name: plane})
            some = kept.few._replace(sealed=(spoilt[0], spoilt[1]))
            out = spans.attend([some, kept.few], SCALE)[0]
            hit = out[0, 2:] if side == KEYS else out[0, 2:, :32]
            assert hit.isnan().all() and out[0, :2].isfinite().all() and out[1:].isfinite().all()


def test_other_numbers_are_left_to_the_open_path() -> None:
    kept = make((4, 2, 64), Form(4, 32, 64, 64), 1, 300, 3)
    few = kept.few
    assert spans.fits(few) == bool(HERE)
    assert not spans.fits(few._replace(q=few.q.float(), k=few.k.float(), v=few.v.float()))
    assert not spans.opens(3, 32, 128, 64) and not spans.opens(2, 2, 128, 64) and not spans.opens(2, 32, 12, 64)
    assert not spans.opens(2, 4, 128, 48) and spans.opens(2, 4, 8, 32)
    assert not Form(2, 64, 768, 0, 40, 2, 0.1).fits(64) and Form(2, 64, 640, 0, 40, 2, 0.1).fits(64)
    assert spans.opens(2, 4, 8, 32, 16, 64) and not spans.opens(2, 4, 8, 32, 17) and not spans.opens(2, 4, 8, 32, 0, 65)
