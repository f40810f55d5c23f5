"""Native attention over a list of spans against its plain twin, for every instruction set that this machine runs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import attention, native
from phasewise.ops.native import spans
from phasewise.ops.native.spans import Few
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.targets import EACH, by_levels

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (4, 4, 128), (6, 3, 20), (3, 1, 7), (2, 2, 256), (5, 1, 96)]  # heads_q, heads, dim


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(spans, "library", lambda: kernels)
    return str(request.param)


def make(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype, tree: bool = False) -> Few:
    """Keys and values are the first n rows of a longer slab, and the queries lie inside a fused buffer."""
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n + 5, dim).to(kind)[:, :n] for _ in range(2))
    sees = ancestors([i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(rows)]) if tree else None
    return Few(q, k, v, sees)


def twin(few: Few, scale: float, window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    rows, n = few.q.shape[0], few.k.shape[1]
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    if window is not None:
        slots, at = torch.arange(n)[None], torch.arange(n - rows, n)[:, None]
        mask &= at - slots < window
    q, k, v = few.q.float(), few.k.float(), few.v.float()
    return attention.reference(q, k, v, mask[None], scale, softcap)


def check(batch: list[Few], scale: float, window: int | None = None, softcap: float | None = None) -> None:
    out, lse = spans.attend(batch, scale, window, with_lse=True, softcap=softcap)
    assert lse is not None and out.dtype == batch[0].q.dtype
    want = [twin(few, scale, window, softcap) for few in batch]
    exact, exact_lse = torch.cat([w[0] for w in want]), torch.cat([w[1] for w in want])
    tolerance = 1e-2 if out.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))
    torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 5, "attention"))
@pytest.mark.usefixtures("target")
def test_equals_the_twin(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    """Ragged: single rows, several, a tree; one slot, a few, more than a block, more than a part."""
    torch.manual_seed(0)
    cases = [(1, 1), (1, 2), (1, 17), (1, 64), (1, 65), (1, 300), (1, 1024), (1, 2500)]
    cases += [(3, 3), (5, 70), (16, 1030), (7, 2050)]
    batch = [make(shape, rows, n, kind) for rows, n in cases]
    batch += [make(shape, 7, 7, kind, tree=True), make(shape, 9, 200, kind, tree=True)]
    check(batch, 0.3)
    check(batch[:1], 1.0)


@pytest.mark.parametrize(("window", "kind"), zip([1, 3, 64, 100, 1000, 5000], KINDS * 3))
@pytest.mark.usefixtures("target")
def test_windows(window: int, kind: torch.dtype) -> None:
    cases = [(1, 1), (1, 50), (4, 300), (1, 2500), (7, 2050)]
    check([make((4, 2, 64), rows, n, kind) for rows, n in cases], 0.2, window)


@pytest.mark.parametrize(("softcap", "kind"), [(0.5, torch.float32), (4.0, torch.bfloat16), (50.0, torch.float32)])
@pytest.mark.usefixtures("target")
def test_capped_scores(softcap: float, kind: torch.dtype) -> None:
    """From scores that hardly feel the cap to such that all but reach it; with windows, trees and bad numbers."""
    torch.manual_seed(0)
    batch = [make((6, 2, 40), rows, n, kind) for rows, n in [(1, 1), (1, 50), (4, 300), (1, 2500), (7, 2050)]]
    for scale in (0.01, 0.3, 2.0):
        check(batch, scale, softcap=softcap)
        check(batch, scale, 90, softcap)
        check([make((6, 2, 40), 9, 200, kind, tree=True)], scale, softcap=softcap)
    bad = make((6, 2, 40), 1, 100, kind)
    bad.q[0, 0, 5] = float("nan")
    out, _ = spans.attend([bad, batch[0]], 0.3, softcap=softcap)
    assert out[0, 0].isnan().all() and out[0, 1:].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "window", "dim"),
    [(torch.bfloat16, None, 64), (torch.float32, 90, 64), (torch.bfloat16, None, 40), (torch.bfloat16, 90, 96),
     (torch.float32, None, 256)],
)  # fmt: skip
@pytest.mark.usefixtures("target")
def test_rows_depend_on_nothing_else(kind: torch.dtype, window: int | None, dim: int) -> None:
    """Bit for bit: alone or in company, row by row or as one span (as after a preemption)."""
    batch = [make((6, 2, dim), rows, n, kind) for rows, n in ((1, 40), (9, 1027), (1, 1500), (4, 4), (12, 70))]
    together, _ = spans.attend(batch, 0.1, window)
    start = 0
    for q, k, v, *_ in batch:
        rows, n = q.shape[0], k.shape[1]
        alone, _ = spans.attend([Few(q, k, v)], 0.1, window)
        assert torch.equal(alone, together[start : start + rows])
        one_by_one = [
            spans.attend([Few(q[i : i + 1], k[:, : n - rows + i + 1], v[:, : n - rows + i + 1])], 0.1, window)[0]
            for i in range(rows)
        ]
        assert torch.equal(torch.cat(one_by_one), alone)
        start += rows


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 4, "rounded attention"))
def test_rounded_rows_are_read_as_they_are(shape: tuple[int, int, int], kind: torch.dtype, target: str) -> None:
    """Bit for bit what attention over the decoded rows gives, beside spans that are not rounded, from any slot on; or,
    where no row is decoded, nearer to exact sums over levels (see test_native_levels), and the others as ever."""
    format = Int8().format()
    batch = [make(shape, rows, n, kind, tree) for rows, n, tree in ((1, 1, False), (1, 300, False), (3, 1100, False),
                                                                    (7, 40, True), (1, 65, False))]  # fmt: skip
    rounded, decoded, exact = [batch[0]], [batch[0]], []
    for few in batch[1:]:
        longer = [torch.nn.functional.pad(x, (0, 0, 0, 9)) for x in (few.k, few.v)]
        planes = [plane[:, : few.k.shape[1]] for plane in format.encode(*longer)]  # the first rows of a slab
        k, k_scale, v, v_scale = planes
        rounded.append(Few(few.q, k, v, few.sees, 0, (k_scale, v_scale)))
        decoded.append(Few(few.q, *format.decode(planes, kind), few.sees))
        exact.append((few, *format.decode(planes, torch.float32)))
    assert all(spans.fits(few) for few in rounded)
    got, got_lse = spans.attend(rounded, 0.2, with_lse=True)
    want, want_lse = spans.attend(decoded, 0.2, with_lse=True)
    assert got_lse is not None and want_lse is not None
    if by_levels(target, shape[2], kind):
        assert torch.equal(got[:1], want[:1]) and torch.equal(got_lse[:1], want_lse[:1])
        wide = [few._replace(q=few.q.float(), k=k, v=v, scales=None) for few, k, v in exact]
        full, _ = spans.attend(wide, 0.2)
        assert (got[1:].float() - full).norm() < (want[1:].float() - full).norm()
        return
    assert torch.equal(got, want) and torch.equal(got_lse, want_lse)


@pytest.mark.usefixtures("target")
def test_large_scores_and_bad_numbers() -> None:
    few = make((4, 2, 64), 1, 100, torch.float32)
    check([Few(few.q * 100, few.k * 100, few.v)], 1.0)
    for what in ("q", "k", "v"):
        bad = make((4, 2, 64), 1, 100, torch.float32)
        getattr(bad, what)[0, 0, 5] = float("nan")
        out, _ = spans.attend([bad, few], 0.1)
        seen = {"q": [0], "k": [0, 1], "v": [0, 1]}[what]  # one query head; all those of the KV head
        others = [h for h in range(4) if h not in seen]
        assert out[0, seen].isnan().any(1).all() and out[0, others].isfinite().all() and out[1].isfinite().all()


@pytest.mark.usefixtures("target")
def test_what_does_not_fit() -> None:
    few = make((4, 2, 64), 1, 100, torch.float32)
    assert spans.fits(few)
    assert not spans.fits(Few(few.q.half(), few.k.half(), few.v.half()))
    assert not spans.fits(Few(few.q, few.k.bfloat16(), few.v.bfloat16()))
    assert not spans.fits(Few(few.q, few.k.char(), few.v.char()))
    scales = torch.ones(few.k.shape[:2], dtype=torch.bfloat16), torch.ones(few.v.shape[:2], dtype=torch.bfloat16)
    assert spans.fits(Few(few.q, few.k.char(), few.v.char(), scales=scales))
    assert not spans.fits(Few(few.q, few.k, few.v, scales=scales))
    assert not spans.fits(make((2, 1, 264), 1, 10, torch.float32))
    assert not spans.fits(Few(few.q, few.k.transpose(1, 2).contiguous().transpose(1, 2), few.v))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: torch.dtype) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    before = torch.get_num_threads()
    batch = [make((14, 2, 64), rows, n, kind) for rows, n in ((1, 5000), (1, 200), (8, 1500))]
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(spans.attend(batch, 0.125)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
