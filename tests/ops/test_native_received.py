"""What slots get of many rows' weights, natively, against the whole matrix, for every instruction set that is here."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from phasewise.methods.evict._noise import gumbel
from phasewise.ops import attention, native
from phasewise.ops.native import received
from tests import seeds
from tests.ops.targets import EACH

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (9, 3, 32), (4, 4, 128), (6, 3, 20), (3, 1, 7), (2, 2, 256)]
CASES = [(1, 1), (1, 300), (2, 2), (5, 70), (64, 64), (65, 65), (97, 500), (300, 311)]


@pytest.fixture(params=EACH, autouse=True)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(received, "library", lambda: kernels)
    return str(request.param)


def make(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys are the first n rows of a longer slab, and the queries lie inside a fused buffer."""
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    return q, torch.randn(heads, n + 5, dim).to(kind)[:, :n]


def exact(q: Tensor, k: Tensor, ends: list[int], scale: float, softcap: float | None, window: int | None) -> Tensor:
    slots, limits = torch.arange(k.shape[1]), torch.tensor(ends)[:, None]
    seen = slots < limits
    if window is not None:
        seen &= slots >= limits - window
    scores = attention.scores(q.double(), k.double(), scale, softcap).double().masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).sum((1, 2)).float()


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 4, "received"), ids=str)
def test_sums_of_the_attention_matrix(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    for number, (rows, n) in enumerate(CASES):
        q, k = make(shape, rows, n, kind)
        some = sorted(random.Random(n).sample(range(rows), max(1, rows * 2 // 3)))
        for chosen in (list(range(rows)), some):
            ends = [n - rows + row + 1 for row in chosen]
            softcap, window = (None, 3.0)[number % 2], (None, 40)[number // 2 % 2]
            got = received.received(q[chosen], k, ends, received.Scoring(0.2, softcap, window))
            assert received.fits(q[chosen], k) and got.shape == (shape[1], n)
            torch.testing.assert_close(got, exact(q[chosen], k, ends, 0.2, softcap, window), rtol=2e-4, atol=2e-5)
            assert float(got.sum()) == pytest.approx(shape[0] * len(chosen), rel=1e-4)


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 4, "received noise"), ids=str)
def test_noise_and_temperatures(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    """Draws are those of the plain twin, wherever rows, keys and heads lie; scores are tempered without them, too."""
    torch.manual_seed(3)
    heads_q, heads, _ = shape
    for number, (rows, n) in enumerate(CASES):
        q, k = make(shape, rows, n, kind)
        ends, softcap = [n - rows + row + 1 for row in range(rows)], (None, 3.0)[number % 2]
        keys = torch.randint(0, 1 << 20, (heads if number % 2 else 1, n + 2), dtype=torch.int32)[:, :n]
        seeds, at = torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows) * 7 + 1
        inverse, which = torch.rand(rows) + 0.3, torch.arange(heads) * 3 + 1
        found = attention.scores(q.double(), k.double(), 0.2, softcap).double()
        noise = gumbel(seeds, at, keys.long(), which, heads_q // heads, 5).double()
        for drawn in (None, seeds):
            scores = (found if drawn is None else found + noise) * inverse[:, None]
            hidden = torch.arange(n) >= torch.tensor(ends)[:, None]
            want = scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((1, 2)).float()
            shaping = received.Shaping(inverse, drawn, at, keys, which, 5)
            got = received.received(q, k, ends, received.Scoring(0.2, softcap), None, shaping)
            torch.testing.assert_close(got, want, rtol=3e-4, atol=3e-5)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(1)
    q, k = make((9, 3, 64), 200, 777, torch.bfloat16)
    ends, before, found = list(range(578, 778)), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(received.received(q, k, ends, received.Scoring(0.125)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_large_scores_and_those_that_nobody_sees() -> None:
    torch.manual_seed(2)
    q, k = make((2, 1, 64), 3, 130, torch.float32)
    got = received.received(q * 100, k, [70, 70, 71], received.Scoring(1.0))
    assert torch.isfinite(got).all() and not got[:, 71:].any() and float(got.sum()) == pytest.approx(6, rel=1e-5)


def test_what_does_not_fit() -> None:
    q, k = make((4, 2, 16), 3, 9, torch.float32)
    assert received.fits(q, k)
    assert not received.fits(q.double(), k.double()) and not received.fits(q, k.bfloat16())
    assert not received.fits(q, k.transpose(1, 2))
