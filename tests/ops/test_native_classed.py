"""Native attention over rows packed in two classes against exact sums, for every instruction set of this machine.

How far off it may be follows from how queries and weights are rounded: see `bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.kv.format import KEYS, SIDES, VALUES, KVShape, form_of, packings
from phasewise.methods.store._classed import Classed
from phasewise.ops.attention import attention
from phasewise.ops.native import spans
from phasewise.ops.native.spans import Few, Side
from phasewise.ops.packing import unpack
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.mates import change_nothing
from tests.ops.targets import EACH, NATIVE, drawn, running
from tests.ops.test_native_sealed import Truth, hold

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 2, 128), (5, 1, 96), (2, 2, 256), (16, 1, 64), (20, 2, 32)]  # heads_q, heads, dim
FORMS = [Classed(4, 2, 100, 60), Classed(8, 4, 8, 3), Classed(8, 2, 65, 64), Classed(2, 2, 200, 0), Classed(4, 4, 7, 7)]
FORMS += [replace(FORMS[at], by_channel=True) for at in range(5)]
SCALE = 0.2


@pytest.fixture(params=EACH, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param, spans) as target:
        yield target


class Kept(NamedTuple):
    """A span as the kernel reads it; what keys and values are, float64 [H, N, D]; and of either what a level is worth
    in that slot, before it is scaled, float64 [slots], with the scales [H, D] and levels [H, slots, D]. Keys by channel
    have a scale for each slot, [H, slots, D], and steps of 1."""

    few: Few
    whole: tuple[Tensor, Tensor]
    steps: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    levels: tuple[Tensor, Tensor]

    @property
    def sealed(self) -> tuple[Side, Side]:
        assert self.few.sealed is not None
        return self.few.sealed


def make(
    shape: tuple[int, int, int], format: Classed, rows: int, n: int, seed: int, start: int | None = None,
    tree: bool = False, together: int = 3, alike: bool = True,
) -> Kept:  # fmt: skip
    """The first blocks that n - rows slots fill, `together` of them sealed at once, then some one by one, and the
    others at once; rows before `start`, at most all that are packed, are in no memory. `alike`: keys and values have
    the same classes."""
    heads_q, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads_q + 2 * heads, dim, generator=generator).bfloat16()[:, :heads_q]
    size = 10.0 ** torch.randint(-2, 2, (2, heads, 1, dim), generator=generator)  # of channels
    made = [(torch.randn(heads, n, dim, generator=generator) * size[i] * 0.3).bfloat16() for i in range(2)]
    blocks = (n - rows) // format.rows
    count, one = blocks * format.rows, KVShape(heads, dim, torch.bfloat16)
    cuts = [0, *range(min(together, blocks), min(together + 8, blocks)), blocks]
    lying = packings(format, one)
    assert lying is not None
    sides, whole, steps, scales, levels = (list[Tensor]() for _ in range(5))
    for side in SIDES:
        raw = made[side]
        settled = [plane[:, None] for plane in format.settle(side, raw)]
        kinds = format.kinds(side, form_of(format, one))
        planes = [torch.full((1, blocks + 1, *tail), 77, dtype=kind) for tail, kind in kinds]
        drawn = torch.Generator().manual_seed(seed if alike else seed + side)
        for a, b in pairwise(cuts):
            some = raw[:, a * format.rows : b * format.rows]
            marks = torch.rand(some.shape[1], generator=drawn)
            for plane, new in zip(planes, format.seal_ranked(side, some, marks, settled)):
                plane[:, a:b] = new
        there = [p[:, :blocks] for p in planes]
        opened = format.open(side, [*there, *settled], KVShape(heads, dim, torch.float64))
        whole.append(torch.cat((opened, raw[:, count:].double()), 1))
        sides.append(lying[side].side([*planes, *settled], count, format.rows))
        if settled:
            scales.append(settled[0].double().view(heads, 1, dim))
            steps.append(by_slot(format, there, [p[..., None].double() for p in (there[1], there[4])])[:, 0])
        else:
            worth = zip((there[1], there[4]), format.classes)
            own = [p.double()[:, :, None].expand(-1, -1, n, -1) for p, (n, _) in worth]
            own = [p if p.shape[2] else p.new_empty((1, blocks, 0, heads * dim)) for p in own]
            scales.append(by_slot(format, there, own).view(count, heads, dim).transpose(0, 1))
            steps.append(torch.ones(count, dtype=torch.float64))
        data = [unpack(there[at], heads * dim, bits).double() for at, (_, bits) in zip((3, 6), format.classes)]
        levels.append(by_slot(format, there, data).view(count, heads, dim).transpose(0, 1))
    base = count if start is None else start
    sees = ancestors([i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(rows)]) if tree else None
    k, v = (x[:, base:].contiguous() for x in made)
    few = Few(q, k, v, sees, base, sealed=(sides[KEYS], sides[VALUES]))  # type: ignore[arg-type]
    return Kept(few, *((each[0], each[1]) for each in (whole, steps, scales, levels)))  # type: ignore[arg-type]


def by_slot(format: Classed, planes: list[Tensor], of: list[Tensor]) -> Tensor:
    """What either class has [1, blocks, n, x], slot by slot [slots, x]."""
    chosen = unpack(planes[0], format.rows, 1).bool().flatten()
    found = torch.empty(len(chosen), of[0].shape[-1], dtype=torch.float64)
    for mine, each in zip((chosen, ~chosen), of):
        found[mine] = each.flatten(0, 2)
    return found


def sight(few: Few, window: int | None) -> Tensor:
    """bool [1, R, N]: causal, or the span's tree; within its window."""
    rows, n = few.q.shape[0], few.start + few.k.shape[1]
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    if window is not None:
        mask &= torch.arange(n) > torch.arange(n - rows, n)[:, None] - window
    return mask[None]


def check(got: Tensor, lse: Tensor | None, kept: Kept, softcap: float = 0.0, window: int | None = None) -> None:
    bounds(kept, softcap, window).holds(got, lse)


def bounds(kept: Kept, softcap: float = 0.0, window: int | None = None) -> Truth:
    """Against sums in float64. A query's numbers times scales are 1 / 32512 of the largest apart, and so are the
    weights of 64 slots times what a level of theirs is worth, whichever slots are read together."""
    few, (k, v) = kept.few, kept.whole
    group, packed = few.q.shape[1] // k.shape[0], kept.steps[KEYS].shape[0]
    q, mask = few.q.double().transpose(0, 1), sight(few, window)  # [Hq, R, D]
    wide = [x.repeat_interleave(group, 0) for x in (k, v)]
    scale = [x.repeat_interleave(group, 0) for x in kept.scales]  # [Hq, 1 or slots, D]
    scores = q @ wide[KEYS].mT * SCALE
    off = 6e-6 * (q.abs() @ wide[KEYS].abs().mT)
    met = (q[:, :, None] * scale[KEYS][:, None]).abs()  # [Hq, R, 1 or slots, D]
    largest = met.amax(-1)
    sums = kept.levels[KEYS].sum(-1).repeat_interleave(group, 0)[:, None]  # [Hq, 1, slots]
    ends = (wide[KEYS][:, :packed] / scale[KEYS].clamp(min=1e-30)).abs().amax(-1)[:, None]
    off[..., :packed] += 1.01 * largest / 65024 * sums * kept.steps[KEYS]
    off[..., :packed] += 1e-5 * met.sum(-1) * (ends + kept.steps[KEYS] * 255)
    off *= SCALE
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    shares, most = scores.softmax(-1), off.masked_fill(~mask, 0).amax(-1)  # [Hq, R, N], [Hq, R]
    want, want_lse = shares @ wide[VALUES], scores.logsumexp(-1)
    most = most + 2e-6 * (1 + want_lse.abs())
    bound = torch.expm1(2 * most)[..., None] * (shares @ wide[VALUES].abs()) + want.abs() / 250
    alike = torch.equal(*(side.rest.upper[:, : packed // side.rows] for side in kept.sealed if side.rest is not None))
    for at in range(0, packed, 64):
        some = slice(at, min(at + 64, packed))
        beside = slice(packed) if alike else some  # class by class, the slots of a class are read together
        worth = (shares[..., beside] * kept.steps[VALUES][beside]).amax(-1, keepdim=True)  # [Hq, R, 1]
        levels = kept.levels[VALUES][:, some].sum(1).repeat_interleave(group, 0)[:, None]
        bound += 1.01 * worth / 65024 * levels * scale[VALUES]
    bound += shares[..., packed:] @ wide[VALUES][:, packed:].abs() / 250
    bound += 1e-5 * (shares @ wide[VALUES].abs()) + 1e-5 * scale[VALUES] * 256 * float(kept.steps[VALUES].sum() > 0)
    return Truth(want, want_lse, ((bound, most), (bound, most)))


@pytest.mark.parametrize(("draw", "sets"), drawn(10, 3))
@NATIVE
def test_near_exact_sums(draw: int, sets: list[str]) -> None:
    """Single rows, several, trees; nothing packed, less than a block to more than a part; beside one another."""
    shape, form = seeds.draw("classed", draw).choice(SHAPES), FORMS[draw % len(FORMS)]
    cases = [(1, 1), (1, 9), (1, 65), (1, 130), (3, 200), (1, 301), (2, 517), (16, 1030), (1, 2500)]
    batch = [make(shape, form, rows, n, seed) for seed, (rows, n) in enumerate(cases)]
    batch += [make(shape, form, rows, n, 80 + n, alike=False) for rows, n in cases[3:]]
    batch += [make(shape, form, 7, 7, 90, tree=True), make(shape, form, 9, 400, 91, start=0, tree=True)]
    hold([bounds(kept) for kept in batch], [kept.few for kept in batch], sets)


@pytest.mark.usefixtures("target")
def test_near_the_plain_twin() -> None:
    """Blocks opened, and attention in float32."""
    kept = make((9, 3, 64), FORMS[0], 1, 2500, 3)
    twin = attention(kept.few.q.float(), kept.whole[KEYS].float(), kept.whole[VALUES].float(), None, SCALE)
    got, _ = spans.attend([kept.few], SCALE)
    assert float((got.float() - twin).norm() / twin.norm()) < 4e-3, "bfloat16 rounds by that much"


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.usefixtures("target")
def test_capped_scores(softcap: float) -> None:
    for form in (FORMS[0], FORMS[5]):
        kept = make((6, 2, 64), form, 3, 700, 5)
        out, lse = spans.attend([kept.few], SCALE, with_lse=True, softcap=softcap)
        check(out, lse, kept, softcap=softcap)


@pytest.mark.parametrize("window", [3, 300])
@pytest.mark.usefixtures("target")
def test_windows(window: int) -> None:
    for form in (FORMS[0], FORMS[5]):
        kept = make((9, 3, 96), form, 5, 1500, 7)
        out, lse = spans.attend([kept.few], SCALE, window, with_lse=True)
        check(out, lse, kept, window=window)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 1400), bits=st.sampled_from([(8, 2), (4, 2), (8, 4), (2, 2), (8, 8)]),
    rows=st.integers(1, 200), upper=st.floats(0, 1), together=st.integers(1, 40), heads=st.integers(1, 3),
    each=st.integers(1, 9), dim=st.sampled_from([32, 64, 96, 128]), threads=st.integers(1, 3), alike=st.booleans(),
    by_channel=st.booleans(),
)  # fmt: skip
@pytest.mark.usefixtures("target")
def test_mates_threads_and_cuts_change_no_bit(
    seed: int, n: int, bits: tuple[int, int], rows: int, upper: float, together: int, heads: int, each: int, dim: int,
    threads: int, alike: bool, by_channel: bool,
) -> None:  # fmt: skip
    """Any pattern of classes; beside spans of other forms, and of rows as they were made; and rows by themselves."""
    format, shape = Classed(*bits, rows, round(upper * rows), by_channel), (heads * each, heads, dim)
    sizes = [(1, 0), (4, 500), (12, 12)]
    batch = [make(shape, format, some, n + more, seed + some, together=together, alike=alike) for some, more in sizes]
    other = make(shape, FORMS[2], 3, 70, seed + 1)
    bare = Few(other.few.q, other.whole[KEYS].bfloat16(), other.whole[VALUES].bfloat16())
    mates = [make(shape, FORMS[0], 2, 150, seed).few, bare]
    change_nothing(batch, mates, SCALE, threads, check)


@pytest.mark.usefixtures("target")
def test_what_is_packed_is_read_there_and_nothing_else_is() -> None:
    """Rows that are packed as well may hold anything, and so may blocks beyond."""
    kept = make((4, 2, 64), FORMS[0], 2, 750, 3, start=0)
    want = spans.attend([kept.few], SCALE)[0]
    assert torch.equal(spans.attend([make((4, 2, 64), FORMS[0], 2, 750, 3).few], SCALE)[0], want)
    for side, plane in zip(kept.sealed, (kept.few.k, kept.few.v)):
        assert side.slots == 700 and side.rest is not None
        plane[:, :700] = float("nan")
        for beyond in (side.step, side.low, side.rest.step, side.rest.low):
            beyond[:, 7:] = float("nan")
        side.rest.upper[:, 7:] = 255
    assert torch.equal(spans.attend([kept.few], SCALE)[0], want)


@pytest.mark.usefixtures("target")
def test_nothing_and_bad_numbers() -> None:
    """Queries of zeros read the mean; what is not a number spoils those who read it, and no others."""
    kept = make((4, 2, 64), FORMS[0], 1, 350, 3)
    nothing = kept._replace(few=kept.few._replace(q=torch.zeros_like(kept.few.q)))
    check(*spans.attend([nothing.few], SCALE, with_lse=True), nothing)
    for bad in (float("nan"), float("inf")):
        q = kept.few.q.clone()
        q[0, 1, 5] = bad
        got = spans.attend([kept.few._replace(q=q)], SCALE)[0][0]
        assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()
    for side in SIDES:
        for name in ("step", "low"):
            plane = getattr(kept.sealed[side], name).clone()
            plane[0, 0, 7] = float("nan")
            spoilt = list(kept.sealed)
            spoilt[side] = spoilt[side]._replace(**{name: plane})
            out = spans.attend([kept.few._replace(sealed=(spoilt[0], spoilt[1])), kept.few], SCALE)[0]
            assert out[0].isnan().all() and out[1].isfinite().all()


def test_other_numbers_are_left_to_the_open_path() -> None:
    def fits(format: Classed, dim: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return packings(format, KVShape(2, dim, dtype)) is not None

    assert fits(FORMS[0], 64) and fits(FORMS[4], 32) and not fits(FORMS[0], 48) and not fits(FORMS[0], 512)
    assert not fits(FORMS[0], 64, torch.float32) and not fits(Classed(3, 2, 8, 4), 64)
