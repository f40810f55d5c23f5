"""ops.packing: what was packed is unpacked, in as many bytes as it says; no number is off by more than half a step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.ops.packing import dequantise, pack, packed, quantise, unpack


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 10**6))
def test_levels_come_back_from_as_few_bytes_as_hold_them(bits: int, n: int, seed: int) -> None:
    levels = torch.randint(0, 1 << bits, (2, 3, n), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    data = pack(levels, bits)
    assert data.dtype == torch.uint8 and data.shape == (2, 3, packed(n, bits))
    assert packed(n, bits) == -(-n * bits // 8)
    assert torch.equal(unpack(data, n, bits), levels)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_the_first_level_lies_lowest(bits: int, numbers: list[int]) -> None:
    """The form, against integers of any length."""
    levels = [number % (1 << bits) for number in numbers]
    whole = sum(level << (i * bits) for i, level in enumerate(levels))
    data = pack(torch.tensor(levels, dtype=torch.uint8), bits)
    assert bytes(data.tolist()) == whole.to_bytes(packed(len(levels), bits), "little")


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 40), st.floats(-3, 3), st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_no_number_is_off_by_more_than_half_a_step(
    bits: int, g: int, magnitude: float, seed: int, dtype: torch.dtype
) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = (torch.randn(4, 5, g, generator=gen) * 10.0**magnitude + torch.randn(4, 5, 1, generator=gen)).to(dtype)
    x[0, 0] = 0
    x[1, 1] = 2.5
    levels, step, low = quantise(x, bits)
    assert levels.dtype == torch.uint8 and int(levels.max()) < 1 << bits
    assert step.dtype == low.dtype == torch.float16 and step.shape == low.shape == x.shape[:-1]
    got, wide = dequantise(levels, step, low, torch.float64), x.double()
    ends = wide.abs().amax(-1) * 2.0**-11 + 2.0**-24  # how far rounding to 16 bits moves the lowest level
    ends += step.double() * (2.0**-11 * (1 << bits)) + 2.0**-24 * (1 << bits)  # and the highest
    assert bool(((got - wide).abs().amax(-1) <= step.double() / 2 + ends).all())
    spread = wide.amax(-1) - wide.amin(-1)
    coarse = (spread + 2 * ends) / ((1 << bits) - 1) * (1 + 2.0**-10) + 2.0**-24
    assert bool((step.double() <= coarse).all()), "no coarser than need be"
    assert not got[0, 0].any(), "nothing stays nothing"
    assert bool((got[1, 1] == 2.5).all())


def test_numbers_beyond_sixteen_bits_stay_finite() -> None:
    levels, step, low = quantise(torch.tensor([[-3e38, 0.0, 3e38]]), 2)
    assert bool(dequantise(levels, step, low, torch.float32).isfinite().all())
