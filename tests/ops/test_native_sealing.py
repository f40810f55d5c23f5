"""Rows packed natively against torch, bit for bit, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.kv.format import KEYS, SIDES, BlockCut
from phasewise.methods.store._grouped import Grouped
from phasewise.ops.native import sealing
from phasewise.ops.native.sealing import Sealing, Seals
from tests.ops.targets import EACH, running


@pytest.fixture(params=EACH, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param, sealing) as target:
        yield target


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), bits=st.sampled_from([2, 4]), group=st.sampled_from([4, 8, 12, 32]),
    size=st.integers(1, 3), blocks=st.integers(1, 3), heads=st.integers(1, 3), layers=st.integers(1, 4),
    dim=st.sampled_from([32, 64, 96]), start=st.integers(0, 2), threads=st.integers(1, 3), apart=st.booleans(),
)  # fmt: skip
@pytest.mark.usefixtures("target")
def test_as_torch_does(
    seed: int,
    bits: int,
    group: int,
    size: int,
    blocks: int,
    heads: int,
    layers: int,
    dim: int,
    start: int,
    threads: int,
    apart: bool,
) -> None:
    """In one call, or block by block. Numbers of all sizes, groups whose numbers are alike, what float16 has no number
    for; nothing else is written."""
    if dim % min(group, dim):
        return
    generator = torch.Generator().manual_seed(seed)
    format = Grouped(bits, group, (BlockCut(2 * group * size), BlockCut(1, 5)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for side in SIDES:
            rows, tasks, want = format.cuts[side].rows, list[Sealing](), []
            for _ in range(layers):
                x = torch.randn(heads, blocks * rows + 3, dim, generator=generator)
                x *= 10.0 ** torch.randint(-9, 7, (heads, 1, dim), generator=generator)
                x[:, :, 3] = x[:, :1, 3]
                x[:, 1::2, 5] = 0.0
                own = x.bfloat16()[:, 2 : 2 + blocks * rows]
                made = format.seal(side, own)
                planes = [p.new_full((heads, start + blocks + 1, *p.shape[2:]), 9) for p in made]
                want.append([p.clone() for p in planes])
                for plane, new in zip(want[-1], made):
                    plane[:, start : start + blocks] = new
                tasks.append(Sealing(own, planes[2], planes[0], planes[1], start, rows))
            assert all(sealing.fits(task.rows) for task in tasks)
            seals = Seals(tasks, side == KEYS, bits, format.form(side, dim)[2])
            for block in range(blocks) if apart else [0]:
                seals(rows if apart else blocks * rows, block * rows, block)
            for task, planes in zip(tasks, want):
                for got, plane in zip((task.step, task.low, task.levels), planes):
                    assert torch.equal(got, plane)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("target")
def test_what_is_not_a_number_stays_none() -> None:
    format = Grouped(4, 8, (BlockCut(8), BlockCut(1)))
    x = torch.randn(1, 8, 32).bfloat16()
    x[0, 2, 7] = float("nan")
    planes = format.seal(KEYS, x)
    task = Sealing(x, *(torch.zeros_like(planes[i]) for i in (2, 0, 1)), 0, 8)
    Seals([task], True, 4, 8)(8)
    for got, plane in ((task.step, planes[0]), (task.low, planes[1])):
        assert torch.equal(got.isnan(), plane.isnan()) and int(got.isnan().sum()) == 1
        assert torch.equal(got.nan_to_num(), plane.nan_to_num())
