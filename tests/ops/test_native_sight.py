"""Windows with sinks in the native kernels against their plain twin, for every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phasewise.ops import attention, native
from phasewise.ops.native import prefill, spans
from phasewise.ops.native.spans import Few, SeenWindow
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops.targets import EACH, NATIVE, drawn, running

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (6, 3, 20), (3, 1, 7), (2, 2, 256)]  # heads_q, heads, dim
SIGHTS = [(1, 0), (3, 4), (64, 4), (100, 4), (70, 130), (300, 65), (1000, 0), (1500, 4), (20, 1100), (5000, 4)]


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(prefill, "library", lambda: kernels)
    monkeypatch.setattr(spans, "library", lambda: kernels)
    return str(request.param)


def make(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype, seen: SeenWindow, far: bool = True) -> Few:
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n + 5, dim).to(kind)[:, :n] for _ in range(2))
    return Few(q, k, v, seen=seen._replace(far=torch.randn(rows, heads_q, dim).to(kind) if far else None))


def twin(few: Few, scale: float) -> Tensor:
    """Scores of all slots by both queries, and those that are not seen left out."""
    assert few.seen is not None
    rows, n, seen = few.q.shape[0], few.k.shape[1], few.seen
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    seats = torch.arange(n - rows, n) if seen.seats is None else seen.seats
    slots = torch.arange(n)
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    mask &= (slots < seen.sinks) | (slots > seats[:, None] - seen.window)
    q, k, v = few.q.float(), few.k.float(), few.v.float()
    logits = attention.scores(q, k, scale)
    if seen.far is not None:
        logits[..., : seen.sinks] = attention.scores(seen.far.float(), k[:, : seen.sinks], scale)
    return attention.weigh(logits, v, mask[None])[0]


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def tree(few: Few, window: int) -> Few:
    rows, n = few.q.shape[0], few.k.shape[1]
    parents = [i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(rows)]
    depth = [0] * rows
    for i in range(1, rows):
        depth[i] = 0 if parents[i] < 0 else depth[parents[i]] + 1
    assert few.seen is not None and max(depth) < window
    seats = torch.tensor(depth) + n - rows
    return few._replace(sees=ancestors(parents), seen=few.seen._replace(seats=seats))


@pytest.mark.parametrize(("draw", "sets"), drawn(4))
@NATIVE
def test_few_rows_equal_the_twin(draw: int, sets: list[str]) -> None:
    """Single rows, several and trees, from one slot to more than a part, beside spans that see everything."""
    some, kind = seeds.draw("sight", draw), KINDS[draw % 2]
    shape = some.choice(SHAPES)
    torch.manual_seed(some.getrandbits(32))
    cases = [(1, 1), (1, 65), (1, 300), (1, 2500), (5, 70), (16, 1030), (7, 2050)]
    for window, sinks in some.sample(SIGHTS, 4):
        seen = SeenWindow(window, sinks)
        batch = [make(shape, rows, n, kind, seen, far=bool(n % 5)) for rows, n in cases]
        if window > 3:
            batch += [tree(make(shape, 9, n, kind, seen), window) for n in (9, 200, 1500)]
        batch.append(make(shape, 3, 90, kind, SeenWindow(0)))
        wants = torch.cat([twin(few, 0.2) for few in batch[:-1]])
        for target in sets:
            with running(target, spans):
                out, _ = spans.attend(batch, 0.2)
                plain = spans.attend([batch[-1]._replace(seen=None)], 0.2)[0].float()
                close(out, torch.cat((wants, plain)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_few_rows_depend_on_nothing_else(kind: torch.dtype) -> None:
    """Bit for bit: alone or in company, row by row or as one span, and not on what they do not see."""
    torch.manual_seed(0)
    for window, sinks in seeds.draw("sight in company", kind).sample(SIGHTS, 3):
        sizes = ((1, 40), (9, 1027), (1, 1500), (12, 70), (3, 2500))
        batch = [make((6, 2, 64), rows, n, kind, SeenWindow(window, sinks)) for rows, n in sizes]
        together, _ = spans.attend(batch, 0.1)
        start = 0
        for few in batch:
            rows, n = few.q.shape[0], few.k.shape[1]
            assert few.seen is not None and few.seen.far is not None
            alone, _ = spans.attend([few], 0.1)
            assert torch.equal(alone, together[start : start + rows])
            for i in range(rows):
                seen = few.seen._replace(far=few.seen.far[i : i + 1])
                own = few.q[i : i + 1], few.k[:, : n - rows + i + 1], few.v[:, : n - rows + i + 1]
                assert torch.equal(spans.attend([Few(*own, seen=seen)], 0.1)[0], alone[i : i + 1])
            first = n - rows + 1 - window
            if first > sinks:
                k, v = few.k.clone(), few.v.clone()
                k[:, sinks:first], v[:, sinks:first] = 3.0, -7.0
                assert torch.equal(spans.attend([few._replace(k=k, v=v)], 0.1)[0], alone)
            start += rows


@pytest.mark.parametrize(("draw", "sets"), drawn(4))
@NATIVE
def test_slices_of_prompts_equal_the_twin(draw: int, sets: list[str]) -> None:
    some, kind = seeds.draw("sight in slices", draw), KINDS[draw % 2]
    shape = some.choice(SHAPES)
    torch.manual_seed(some.getrandbits(32))
    for window, sinks in some.sample(SIGHTS, 3):
        for rows, n in [(1, 1), (2, 300), (65, 65), (97, 1000), (300, 611)]:
            few = make(shape, rows, n, kind, SeenWindow(window, sinks), far=bool(n % 5))
            want = twin(few, 0.2)
            for target in sets:
                with running(target, prefill):
                    close(prefill.causal(few.q, few.k, few.v, 0.2, seen=few.seen), want)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("target")
def test_any_slices_read_what_the_whole_reads(seed: int) -> None:
    """Bit for bit, however a prompt is cut; and what no row sees may be anything."""
    draw = seeds.draw("slices in sight", seed)
    torch.manual_seed(draw.getrandbits(32))
    n, rows = 700, draw.randint(100, 600)
    few = make((6, 2, 64), rows, n, draw.choice(KINDS), SeenWindow(draw.randint(1, 400), draw.choice([0, 4, 70])))
    assert few.seen is not None and few.seen.far is not None
    whole = prefill.causal(few.q, few.k, few.v, 0.2, seen=few.seen)
    start = 0
    while start < rows:
        own = min(draw.randint(1, 150), rows - start)
        seen, upto = few.seen._replace(far=few.seen.far[start : start + own]), n - rows + start + own
        k, v = few.k[:, :upto].clone(), few.v[:, :upto].clone()
        first = max(few.seen.sinks, upto - own + 1 - few.seen.window)
        k[:, few.seen.sinks : first], v[:, few.seen.sinks : first] = 3.0, -7.0
        part = prefill.causal(few.q[start : start + own], k, v, 0.2, seen=seen)
        assert torch.equal(part, whole[start : start + own])
        start += own
