"""Rows chosen by the largest numbers of a query, over keys in lines, and what stands for all others, by the book."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.attend.instinfer import _Index
from phasewise.methods.store.int8 import Int8
from phasewise.ops import native
from phasewise.ops.native import choice, listed
from phasewise.ops.native.choice import SHARE, Ballot, Candidates, UnlistedRest, Ways, choose, takes
from phasewise.ops.native.listed import Listed
from tests import seeds
from tests.ops.targets import EACH

SCALE = 0.3


@pytest.fixture(params=EACH, autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    patch, kernels = pytest.MonkeyPatch(), native.load(request.param)
    native._share_threads(kernels)  # type: ignore[arg-type]
    for module in (native, choice, listed):
        patch.setattr(module, "library", lambda: kernels)
    yield request.param
    patch.undo()


class Case(NamedTuple):
    ballot: Ballot
    k: Tensor  # [H, n, D]
    v: Tensor
    index: _Index


def made(seed: int, shape: tuple[int, int, int], n: int, some: tuple[int, int], int8: bool = False) -> Case:
    """One row at the last of n slots, `some` = (numbers it looks at, rows it reads beside its own), of whose index two
    thirds are there; where nothing is, no number is one."""
    heads, group, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads * group, dim, generator=generator).bfloat16()
    k, v = (torch.randn(heads, n, dim, generator=generator).bfloat16() for _ in range(2))
    planes: list[Tensor | None] = [k, None, v, None]
    if int8:
        format = Int8().format()
        planes = [*format.encode(k, v)]
        k, v = format.decode([each for each in planes if each is not None], torch.bfloat16)
    known, (largest, chosen) = (n - 1) * 2 // 3, some
    lines = torch.full((heads, dim, n + 3), float("nan")).bfloat16()
    lines[..., :known] = k[:, :known].mT
    index = _Index(lines, v[:, :known].float().sum(1), known)
    rest = UnlistedRest(torch.empty(heads * group), torch.empty(heads, dim))
    among = Candidates(0, n - 1, 1, chosen, SHARE, False, 0, n, width=dim, largest=largest)
    keys, k_scale, values, v_scale = planes
    assert keys is not None
    layer = Ways.layer(index.vectors, index.sums, SCALE)
    return Case(Ballot(q, keys, k_scale, among, known, layer, values, v_scale, rest), k, v, index)


def weights(case: Case) -> Tensor:
    """What each slot gets of each query by the book, float64 [H, G, n]."""
    heads, _, dim = case.k.shape
    q, k = case.ballot.q[0].double().view(heads, -1, dim), case.k.double()
    found = []
    for mine, keys in zip(q, k):
        channels = mine.abs().sum(0).sort(descending=True, stable=True).indices[: case.ballot.candidates.largest]
        heat = (mine[:, channels].abs().sum(1) / mine.abs().sum(1)).sqrt()
        found.append((mine[:, channels] @ keys[:, channels].T * SCALE / heat[:, None]).softmax(-1))
    return torch.stack(found)


def check(case: Case, slots: Tensor) -> None:
    among, rest = case.ballot.candidates, case.ballot.rest
    n, each, index = case.k.shape[1], weights(case), case.index
    votes = each.sum(1)
    assert rest is not None and slots.shape == (len(case.k), 1, among.chosen + 1)
    for head, own in enumerate(slots[:, 0].tolist()):
        assert own == sorted(set(own)) and own[-1] == n - 1 and own[0] >= 0
        left = [slot for slot in range(n - 1) if slot not in set(own)]
        if left and len(own) > 1:
            assert float(votes[head, own[:-1]].min()) >= float(votes[head, left].max()) * (1 - 1e-3)
    held = each.gather(2, slots.long().expand(-1, each.shape[1], -1)).sum(-1).flatten()
    torch.testing.assert_close(rest.held.double(), held, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rest.mean, case.v.float().mean(1), atol=1e-5, rtol=1e-4)
    assert index.sums is not None
    assert torch.equal(index.lines[..., :n], case.k.mT) and bool(index.lines[..., n:].isnan().all())
    torch.testing.assert_close(index.sums, case.v[:, :-1].float().sum(1), atol=1e-4, rtol=1e-4)


SHAPES = [(3, 3, 64), (1, 1, 16), (2, 4, 20), (2, 1, 128), (1, 6, 256), (2, 2, 64)]


@pytest.mark.parametrize(
    ("shape", "n", "int8"), seeds.some(product(SHAPES, [5, 40, 700, 4400], [False, True]), 8, "lines")
)
def test_by_the_book(shape: tuple[int, int, int], n: int, int8: bool) -> None:
    case = made(n, shape, n, (max(1, shape[2] // 5), n // 5), int8)
    assert takes(case.ballot)
    check(case, choose([case.ballot])[0])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000), shape=st.sampled_from(SHAPES), n=st.integers(2, 300), numbers=st.floats(0, 1),
    rows=st.floats(0, 1),
)  # fmt: skip
def test_any_numbers_of_any(seed: int, shape: tuple[int, int, int], n: int, numbers: float, rows: float) -> None:
    some = max(1, round(numbers * shape[2])), round(rows * (n - 1))
    case = made(seed, shape, n, some)
    check(case, choose([case.ballot])[0])


def test_mates_and_threads_change_no_bit() -> None:
    def results(together: bool) -> list[Tensor]:
        cases = [made(seed, (2, 3, 64), n, (9, n // 7)) for seed, n in enumerate((30, 900, 5000))]
        ballots = [case.ballot for case in cases]
        slots = choose(ballots) if together else [choose([ballot])[0] for ballot in ballots]
        found = list(slots)
        for case in cases:
            assert case.ballot.rest is not None and case.index.sums is not None
            found += [*case.ballot.rest, case.index.sums]
        return found

    before, want = torch.get_num_threads(), results(False)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(results(True), want, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_rest_is_joined_with_what_is_listed(shape: tuple[int, int, int]) -> None:
    """As the plain twin joins them, to a rounding."""
    heads, group, dim = shape
    case = made(3, shape, 200, (4, 20))
    q, k = case.ballot.q, case.k
    slots = torch.arange(0, 200, 7, dtype=torch.int32).expand(heads, 1, -1).contiguous()
    rest = UnlistedRest(torch.rand(heads * group), torch.randn(heads, dim))
    [exact], [joined] = (listed.attend([Listed(q, k, case.v, slots, None, each)], SCALE) for each in (None, rest))
    torch.testing.assert_close(joined, rest.joined(exact), atol=0, rtol=2**-7)
    assert not torch.equal(joined, exact)


def test_a_layer_that_chooses_says_where_its_vectors_lie() -> None:
    index = made(0, (2, 1, 16), 10, (3, 4)).index
    assert index.sums is not None
    layer = Ways.layer(index.vectors, index.sums, 0.5)
    assert (layer.low, layer.high, layer.sums) == (index.lines.data_ptr(), 0, index.sums.data_ptr())
    assert (layer.way, layer.head, layer.line, layer.scale) == (1, index.lines.stride(0), index.lines.stride(1), 0.5)
