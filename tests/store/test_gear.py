"""store.gear: each part brings a block nearer, the product is next to the best of its rank, and bytes count all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.kv.format import KEYS, SIDES, VALUES, BlockCut, KVShape, Raw, block_bytes
from phasewise.methods.store._approximated import Approximated, approximation
from phasewise.methods.store._grouped import Grouped
from phasewise.methods.store.gear import Gear
from tests import tiny
from tests.kv.sealing import through

DIM, BLOCK = 64, 64


def format(bits: int = 2, rank: int = 4, sparse: float = 0.02, group: int = 64) -> Approximated:
    return Approximated(bits, group, (BlockCut(BLOCK), BlockCut(BLOCK)), rank=rank, sparse=sparse)


def rows(seed: int, outliers: int = 20) -> torch.Tensor:
    """A block with some structure, some noise, a channel far from zero and single numbers far from the rest."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCK, 6, generator=gen) @ torch.randn(6, DIM, generator=gen)
    x += torch.randn(BLOCK, DIM, generator=gen)
    x[:, 5] += 15
    places = torch.randperm(BLOCK * DIM, generator=gen)[:outliers]
    x.view(-1)[places] += 25 * torch.randn(outliers, generator=gen).sign()
    return x


def error(of: Grouped, side: int, x: torch.Tensor) -> float:
    return float((through(of)(side, x) - x).norm())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SIDES))
@pytest.mark.parametrize("bits", [2, 4])
def test_every_part_brings_a_block_nearer(bits: int, seed: int, side: int) -> None:
    x = rows(seed)
    plain = Grouped(bits, 64, (BlockCut(BLOCK), BlockCut(BLOCK)))
    bare, product, apart = error(plain, side, x), error(format(bits, sparse=0), side, x), error(format(bits), side, x)
    assert bare > product > apart
    assert error(format(bits, rank=0, sparse=0), side, x) == bare, "nothing is added to nothing"


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SIDES), st.integers(1, 8))
def test_the_product_is_next_to_the_best_of_its_rank(seed: int, side: int, rank: int) -> None:
    x, plain = rows(seed), Grouped(2, 64, (BlockCut(BLOCK), BlockCut(BLOCK)))
    missed = x - through(plain)(side, x)
    left, right = approximation(missed, rank)
    best = float(torch.linalg.svdvals(missed)[rank:].norm())
    assert best * (1 - 1e-5) <= float((missed - left @ right.T).norm()) <= 1.1 * best
    assert error(format(rank=rank, sparse=0), side, x) <= 1.11 * best, "in 16 bits"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("sparse", [0.0, 0.02])
def test_full_rank_is_exact(side: int, sparse: float) -> None:
    """To what 16 bits leave of what rounding missed."""
    x = rows(3)
    bare = error(format(rank=0, sparse=sparse), side, x)
    assert error(format(rank=DIM, sparse=sparse), side, x) < 2e-3 * bare + 2.0**-11 * float(x.norm())


@pytest.mark.parametrize(("bits", "side"), zip([2, 3, 4, 8], SIDES * 2))
def test_full_rank_in_float32_is_exact_whatever_the_bits(bits: int, side: int) -> None:
    """Without the rounding of the factors to 16 bits, which is all that is missing."""
    x = rows(4)
    rounded = through(format(bits, rank=0, sparse=0))(side, x)
    left, right = approximation(x - rounded, DIM)
    whole, short = (float((rounded + left[:, :r] @ right[:, :r].T - x).norm()) for r in (DIM, DIM - 1))
    assert left.dtype == torch.float32 and whole < 1e-6 * float(x.norm()) < short


def test_outliers_are_kept_apart_exactly_and_the_rest_has_finer_levels() -> None:
    x = torch.randn(BLOCK, DIM, generator=torch.Generator().manual_seed(0))
    x[::, 7] = 1.5  # a line whose numbers are all alike
    x[9, 20], x[30, 20] = 50.0, -50.0
    for side in SIDES:
        assert error(format(4, rank=0), side, x) < 0.5 * error(format(4, rank=0, sparse=0), side, x)
    got = through(format(4, rank=0))(KEYS, x)
    assert bool((got[:, 7] == 1.5).all())
    half_a_step = float(x[:, 20].abs().sort().values[-3]) * 2 / 15 / 2
    assert float((got[[9, 30], 20] - x[[9, 30], 20]).abs().max()) <= half_a_step + 0.05


@pytest.mark.parametrize(("bits", "rank", "sparse"), [(2, 4, 0.0625), (4, 0, 0.0625), (4, 4, 0.0)])
def test_bytes_count_parameters_products_and_indices(bits: int, rank: int, sparse: float) -> None:
    """A share s of outliers takes 32 s bits a number, the product 16 r (n + D) bits a block."""
    shape, of = KVShape(2, DIM, torch.bfloat16), format(bits, rank, sparse, group=32)
    for side in SIDES:
        planes = of.seal(side, torch.randn(2, 3 * BLOCK, DIM))
        kinds = of.kinds(side, shape)
        assert [(tuple(p.shape[2:]), p.dtype) for p in planes] == [(tuple(tail), dtype) for tail, dtype in kinds]
        taken = 8 * sum(plane.nbytes for plane in planes) / (2 * 3 * BLOCK * DIM)
        want = bits + 32 / 32 + 16 * rank * (BLOCK + DIM) / (BLOCK * DIM) + 32 * sparse
        assert taken == want == 8 * block_bytes(of, shape, side) / (BLOCK * DIM)


@pytest.mark.parametrize("side", SIDES)
def test_two_in_a_hundred_outliers_take_0_64_bits_a_number(side: int) -> None:
    """Where lines are long enough for just so many: 200 numbers of a channel, 100 of a token."""
    dim, block = 100, 200
    cut = BlockCut(block)
    with_them, without = (Approximated(4, 50, (cut, cut), rank=4, sparse=sparse) for sparse in (0.02, 0.0))
    x = torch.randn(2, block, dim, generator=torch.Generator().manual_seed(6))
    taken, bare = (sum(plane.nbytes for plane in of.seal(side, x)) for of in (with_them, without))
    assert 8 * (taken - bare) / x.numel() == pytest.approx(0.64)
    shape = KVShape(2, dim, torch.float32)
    apart, together = (float((of.open(side, of.seal(side, x), shape) - x).norm()) for of in (with_them, without))
    assert apart < 0.95 * together, "and are worth them"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([VALUES, KEYS]))
def test_a_blocks_form_depends_on_that_block_alone(seed: int, sizes: list[int], side: int) -> None:
    of = Approximated(2, 4, (BlockCut(8), BlockCut(8)), rank=2, sparse=0.1)
    x = torch.randn(2, 8 * sum(sizes), 12, generator=torch.Generator().manual_seed(seed))
    whole = of.seal(side, x)
    pieces = [of.seal(side, piece) for piece in x.split([8 * size for size in sizes], 1)]
    shape = KVShape(2, 12, torch.float32)
    got = torch.cat([of.open(side, planes, shape) for planes in pieces], 1)
    assert torch.allclose(of.open(side, whole, shape), got, atol=2e-3)


def test_sixteen_bits_are_as_is() -> None:
    assert type(Gear(bits=16).format()) is Raw


@pytest.mark.parametrize(
    ("knobs", "fix"),
    [
        ("bits=8", "choose one of 2, 4, 16"),
        ("block=0", "at least 1"),
        ("rank=-1", "0 .* or more"),
        ("sparse=0.9", "0.5"),
        ("group=4,block=8,rank=12", "choose 8"),
        ("group=4,block=1,rank=1,sparse=0.1", "or 0"),
    ],
)
def test_bad_knobs_name_value_and_fix(knobs: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        tiny.engine({"store": f"gear:{knobs}"})
