"""Slots that spans have in common, read once for all: not a bit changes, for every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from phasewise.ops import native
from phasewise.ops.native import spans
from phasewise.ops.native.spans import BLOCK, Common, Few
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.targets import EACH

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (4, 4, 128), (6, 3, 20), (3, 1, 7), (2, 2, 256)]  # heads_q, heads, dim
ROWS = (1, 1, 5, 1, 7, 1, 16, 1)  # of the spans
OWN = (3, 40, 70, 1, 7, 1100, 20, 64)  # slots behind what they share


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(spans, "library", lambda: kernels)
    return str(request.param)


def levels(*stops: int) -> list[Common]:
    """All spans but the last up to the first stop, then halves, then a quarter; one level for each stop."""
    members = [[tuple(range(7))], [(0, 1, 2), (3, 4, 5, 6)], [(4, 6)]]
    bounds = (0, *stops)
    return [Common(m, bounds[i], stop, i) for i, stop in enumerate(stops) for m in members[i]]


def make(shape: tuple[int, int, int], kind: torch.dtype, commons: Sequence[Common]) -> list[Few]:
    heads_q, heads, dim = shape
    reach = spans.reaches(commons, len(ROWS))
    batch = []
    for rows, own, before in zip(ROWS, OWN, reach):
        n = before + max(rows, own)
        q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
        k, v = (torch.randn(heads, n + 9, dim).to(kind)[:, :n] for _ in range(2))
        sees = ancestors([-1, 0, 0, 1, 1, 2, 2]) if rows == 7 else None
        batch.append(Few(q, k, v, sees))
    for common in commons:
        first, at = batch[common.members[0]], slice(common.start, common.stop)
        for member in common.members[1:]:
            batch[member].k[:, at], batch[member].v[:, at] = first.k[:, at], first.v[:, at]
    return batch


STOPS = [(64,), (1024,), (1088,), (64, 640), (320, 1024, 1216), (1984, 2048, 3200), (128, 192, 256)]


@pytest.mark.parametrize(("stops", "kind"), zip(STOPS, KINDS * 4), ids=str)
@pytest.mark.usefixtures("target")
def test_not_a_bit_changes(stops: tuple[int, ...], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    commons = levels(*stops)
    for shape in seeds.some(SHAPES, 3, "commons", stops):
        batch = make(shape, kind, commons)
        want, want_lse = spans.attend(batch, 0.2, with_lse=True)
        got, lse = spans.attend(batch, 0.2, with_lse=True, commons=commons)
        assert lse is not None and want_lse is not None
        assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize(("stops", "kind"), zip([(1,), (32,), (96, 97), (100, 1025, 1030)], KINDS * 2), ids=str)
@pytest.mark.usefixtures("target")
def test_between_blocks_only_roundings_change(stops: tuple[int, ...], kind: torch.dtype) -> None:
    torch.manual_seed(1)
    commons = levels(*stops)
    assert any(stop % BLOCK for stop in stops)
    for shape in seeds.some(SHAPES, 3, "commons between blocks", stops):
        batch = make(shape, kind, commons)
        want, want_lse = spans.attend(batch, 0.2, with_lse=True)
        got, lse = spans.attend(batch, 0.2, with_lse=True, commons=commons)
        tolerance = 1e-2 if kind == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("target")
def test_only_the_first_members_rows_are_read() -> None:
    """The other members' are not even there: their tensors begin where nothing is shared any more."""
    torch.manual_seed(2)
    commons = levels(128, 256)
    for kind in KINDS:
        batch = make((6, 2, 64), kind, commons)
        want, _ = spans.attend(batch, 0.2)
        start = [0, 256, 256, 128, 256, 256, 256, 0]  # span 3 is first among its own half only
        own = [Few(q, k[:, at:].clone(), v[:, at:].clone(), sees, at) for (q, k, v, sees, *_), at in zip(batch, start)]
        assert torch.equal(spans.attend(own, 0.2, commons=commons)[0], want)
        changed = [few._replace(k=few.k.clone(), v=few.v.clone()) for few in batch]
        for few, at in zip(changed, start):
            few.k[:, :at] = float("nan")
            few.v[:, :at] = float("nan")
        assert torch.equal(spans.attend(changed, 0.2, commons=commons)[0], want)


@pytest.mark.usefixtures("target")
def test_a_window_that_hides_nothing_in_common() -> None:
    torch.manual_seed(3)
    commons = levels(192)
    batch = make((6, 2, 64), torch.bfloat16, commons)
    want, _ = spans.attend(batch, 0.2, 2000)
    assert torch.equal(spans.attend(batch, 0.2, 2000, commons=commons)[0], want)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: torch.dtype) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    torch.manual_seed(4)
    before, commons = torch.get_num_threads(), levels(320, 1024, 1216)
    batch = make((14, 2, 64), kind, commons)
    want, _ = spans.attend(batch, 0.125)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(spans.attend(batch, 0.125, commons=commons)[0], want)
    finally:
        torch.set_num_threads(before)
