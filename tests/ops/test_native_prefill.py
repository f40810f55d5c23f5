"""Native attention of prompt slices against its plain twin, for every instruction set that this machine runs."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import attention, native
from phasewise.ops.native import prefill, spans
from phasewise.ops.native.spans import Few, SeenWindow
from tests import seeds
from tests.ops.targets import EACH, alike, by_levels

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (4, 4, 128), (6, 3, 20), (3, 1, 7), (2, 2, 256), (5, 1, 96), (8, 1, 16)]
CASES = [(1, 1), (1, 300), (2, 2), (5, 70), (63, 64), (64, 64), (65, 65), (97, 1000), (128, 131), (300, 511)]


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    for module in (prefill, spans):
        monkeypatch.setattr(module, "library", lambda: kernels)
    return str(request.param)


def make(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values are the first n rows of a longer slab, and the queries lie inside a fused buffer."""
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n + 5, dim).to(kind)[:, :n] for _ in range(2))
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    return exact_lse(q, k, v, scale, softcap)[0]


def exact_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What is read, and the log-sum-exp of every query's scores."""
    rows, n = q.shape[0], k.shape[1]
    mask = torch.ones(1, rows, n, dtype=torch.bool).tril(n - rows)
    return attention.reference(q.float(), k.float(), v.float(), mask, scale, softcap)


def check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    assert prefill.fits(q, k, v)
    want, want_lse = exact_lse(q, k, v, scale)
    tolerance = 2e-2 if q.dtype == torch.bfloat16 else 1e-5
    also, lse = prefill.causal_lse(q, k, v, scale)
    assert torch.equal(also, prefill.causal(q, k, v, scale))
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    most = tolerance * float(want.abs().max())
    for read in (prefill.causal, attention.causal_plain):
        out = read(q, k, v, scale)
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=most)


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 5, "prefill"))
@pytest.mark.usefixtures("target")
def test_equals_the_twin(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, n in CASES:
        check(*make(shape, rows, n, kind), 0.3 if n % 2 else shape[2] ** -0.5)


@pytest.mark.parametrize(("softcap", "kind"), [(0.5, torch.float32), (4.0, torch.bfloat16), (50.0, torch.float32)])
@pytest.mark.usefixtures("target")
def test_capped_scores(softcap: float, kind: torch.dtype) -> None:
    """From scores that hardly feel the cap to such that all but reach it; a slice reads what the whole reads."""
    torch.manual_seed(0)
    tolerance = 2e-2 if kind == torch.bfloat16 else 1e-5
    for scale in (0.01, 0.3, 2.0):
        for rows, n in CASES:
            q, k, v = make((6, 2, 40), rows, n, kind)
            out, want = prefill.causal(q, k, v, (scale, softcap)), exact(q, k, v, scale, softcap)
            most = tolerance * float(want.abs().max())
            torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=most)
            seen = n - rows + rows // 2
            part = prefill.causal(q[: rows // 2], k[:, :seen], v[:, :seen], (scale, softcap))
            assert torch.equal(part, out[: rows // 2])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("target")
def test_any_shape(seed: int) -> None:
    draw = seeds.draw("prefill of any shape", seed)
    torch.manual_seed(draw.getrandbits(32))
    heads, rows = draw.randint(1, 4), draw.randint(1, 300)
    shape = (heads * draw.randint(1, 8), heads, draw.choice([draw.randint(1, 256), 2 * draw.randint(8, 128)]))
    check(*make(shape, rows, rows + draw.choice([0, draw.randint(0, 700)]), draw.choice(KINDS)), shape[2] ** -0.5)


@pytest.mark.parametrize(("shape", "kind"), [((6, 2, 64), torch.bfloat16), ((7, 1, 40), torch.float32)])
@pytest.mark.usefixtures("target")
def test_slices_read_what_the_whole_reads(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    """Bit for bit: a prompt at once, in slices of any length, and with the keys of later rows unwritten."""
    torch.manual_seed(0)
    q, k, v = make(shape, 230, 330, kind)
    whole, start = prefill.causal(q, k, v, 0.2), 0
    for rows in (1, 2, 7, 60, 65, 95):
        seen = 100 + start + rows
        part = prefill.causal(q[start : start + rows], k[:, :seen], v[:, :seen], 0.2)
        assert torch.equal(part, whole[start : start + rows])
        start += rows
    assert start == 230


@pytest.mark.parametrize(("shape", "kind"), seeds.some(product(SHAPES, KINDS), 4, "rounded prefill"))
def test_rounded_rows_are_read_as_they_are(shape: tuple[int, int, int], kind: torch.dtype, target: str) -> None:
    """What the decoded rows give, out of a longer slab with rows of very different sizes: bit for bit, unless levels
    meet the query undecoded, as in attention of few rows."""
    torch.manual_seed(0)
    format = Int8().format()
    for rows, n in CASES:
        q, k, v = make(shape, rows, n, kind)
        k, v = (torch.nn.functional.pad(x * torch.rand(*x.shape[:2], 1) ** 4, (0, 0, 0, 9)).to(kind) for x in (k, v))
        planes = [plane[:, :n] for plane in format.encode(k, v)]
        k_levels, k_scale, v_levels, v_scale = planes
        assert prefill.fits(q, k_levels, v_levels, (k_scale, v_scale))
        got = prefill.causal(q, k_levels, v_levels, 0.2, (k_scale, v_scale))
        want = prefill.causal(q, *format.decode(planes, kind), 0.2)
        if alike(target) and by_levels(target, shape[2], kind):
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        else:
            assert torch.equal(got, want)


SEEN = [
    None, SeenWindow(100), SeenWindow(70, sinks=5), SeenWindow(300, sinks=70), SeenWindow(0, block=32),
    SeenWindow(0, bias=torch.ones(16)),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_few_and_many_rows_read_the_same(seed: int, target: str) -> None:
    """Bit for bit, whichever kernel reads: plain rows and int8, windows, sinks that queries of their own read, blocks,
    biases, caps, and more slots than a part has."""
    if not alike(target):
        pytest.skip("the matrix unit sums in an order of its own")
    draw = seeds.draw("few and many rows", seed)
    torch.manual_seed(draw.getrandbits(32))
    for shape, seen in product([(8, 4, 64), (6, 3, 20), (2, 2, 128), (7, 1, 40), (3, 1, 7)], SEEN):
        rows = draw.choice([1, 7, 33, 64, 65, 130])
        q, k, v = make(shape, rows, rows + draw.choice([0, 31, 200, 1100]), torch.bfloat16)
        if seen is not None and seen.bias is not None:
            seen = seen._replace(bias=torch.randn(shape[0]))
        if seen is not None and seen.sinks and draw.random() < 0.5:
            seen = seen._replace(far=torch.randn(rows, shape[0], shape[2]).bfloat16())
        scales = None
        if draw.random() < 0.4:
            k, k_scale, v, v_scale = Int8().format().encode(k, v)
            scales = k_scale, v_scale
        cap = draw.choice([None, None, 3.0])
        few, lse = spans.attend([Few(q, k, v, scales=scales, seen=seen)], 0.2, with_lse=True, softcap=cap)
        many = prefill.causal(q, k, v, (0.2, cap or 0.0), scales, seen)
        assert torch.equal(many, few)
        if cap is None:
            assert torch.equal(prefill.causal_lse(q, k, v, 0.2, scales, seen)[1], lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_large_scores_and_bad_numbers(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = make((4, 2, 64), 70, 100, kind)
    check(q * 60, k * 60, v, 1.0)
    clean = prefill.causal(q, k, v, 0.1)
    for what in range(3):
        bad = [t.clone() for t in (q, k, v)]
        bad[what][0, 0, 5] = float("nan")
        out = prefill.causal(bad[0], bad[1], bad[2], 0.1)
        rows, heads = (slice(0, 1), [0]) if what == 0 else (slice(None), [0, 1])  # a KV head is read by two
        assert out[rows, heads].isnan().any(-1).all()
        assert torch.equal(out[:, 2:], clean[:, 2:]) and (what > 0 or torch.equal(out[1:], clean[1:]))


def masks(heads: int, rows: int, n: int, draw: random.Random) -> Tensor:
    """Causal with holes: of whole blocks, of single slots, and a row that sees itself alone."""
    own = torch.ones(heads, rows, n, dtype=torch.bool).tril(n - rows)
    blocks = torch.rand(heads, -(-rows // 16), -(-n // 32)) < draw.choice([0.05, 0.4])
    mask = blocks.repeat_interleave(16, 1).repeat_interleave(32, 2)[:, :rows, :n] & (torch.rand(heads, rows, n) < 0.9)
    mask[:, draw.randrange(rows)] = False
    return (mask | torch.eye(rows, n, dtype=torch.bool).roll(n - rows, 1)) & own


@pytest.mark.parametrize(
    ("shape", "kind"), [(seeds.draw("masked prefill", kind).choice(SHAPES), kind) for kind in KINDS]
)
@pytest.mark.usefixtures("target")
def test_masked_equals_the_twin(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    """One mask for all heads, or each its own; the last slots lie at the end of the mask's memory."""
    torch.manual_seed(0)
    tolerance = 2e-2 if kind == torch.bfloat16 else 1e-5
    for number, (rows, n) in enumerate(CASES):
        q, k, v = make(shape, rows, n, kind)
        mask = masks(1 if number % 2 else shape[1], rows, n, random.Random(number))
        for cap in (None, 3.0):
            want = attention.reference(q.float(), k.float(), v.float(), mask, 0.2, cap)[0]
            for read in (prefill.masked, attention.attention_plain):
                scale = (0.2, cap) if read is prefill.masked and cap else 0.2
                out = read(q, k, v, mask, scale) if read is prefill.masked else read(q, k, v, mask, 0.2, cap)
                torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_what_a_mask_hides_is_as_if_it_were_not_there(kind: torch.dtype) -> None:
    """Bit for bit: the mask of causal attention, rows alone and among others, int8 too, and blocks full of NaN that
    nobody sees."""
    torch.manual_seed(0)
    q, k, v = make((6, 2, 64), 130, 500, kind)
    causal = torch.ones(1, 130, 500, dtype=torch.bool).tril(370)
    assert torch.equal(prefill.masked(q, k, v, causal, 0.2), prefill.causal(q, k, v, 0.2))
    mask = masks(2, 130, 500, random.Random(0))
    mask[:, :, 256:512] = False
    mask[:, 5] = False
    whole = prefill.masked(q, k, v, mask, 0.2)
    assert not whole[5].any()
    for rows in (slice(0, 1), slice(3, 40), slice(77, 130)):
        assert torch.equal(prefill.masked(q[rows], k, v, mask[:, rows], 0.2), whole[rows])
    holes = [x.clone() for x in (k, v)]
    for hole in holes:
        hole[:, 256:] = float("nan")
    assert torch.equal(prefill.masked(q, *holes, mask, 0.2), whole)
    format = Int8().format()
    planes = list(format.encode(k, v))
    k, v, scales = planes[0], planes[2], (planes[1], planes[3])
    rounded = prefill.masked(q, k, v, causal, 0.2, scales)
    assert torch.equal(rounded, prefill.causal(q, k, v, 0.2, scales))
    whole, part = prefill.masked(q, k, v, mask, 0.2, scales), prefill.masked(q[40:], k, v, mask[:, 40:], 0.2, scales)
    assert torch.equal(part, whole[40:])
    decoded = prefill.masked(q, *format.decode(planes, kind), mask, 0.2)
    torch.testing.assert_close(whole.float(), decoded.float(), rtol=2e-2, atol=2e-2 * float(decoded.abs().max()))


def test_what_does_not_fit() -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    q, k, v = make((4, 2, 64), 70, 100, torch.bfloat16)
    assert prefill.fits(q, k, v)
    assert not prefill.fits(q.half(), k.half(), v.half())
    assert not prefill.fits(q, k.float(), v.float())
    scales = torch.ones(k.shape[:2], dtype=torch.bfloat16), torch.ones(v.shape[:2], dtype=torch.bfloat16)
    assert prefill.fits(q, k.char(), v.char(), scales)
    assert not prefill.fits(q, k.char(), v.char()) and not prefill.fits(q, k, v, scales)
    assert not prefill.fits(*make((2, 1, 264), 10, 10, torch.float32))
    apart = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert not prefill.fits(q, apart, v)
    torch.testing.assert_close(attention.causal(q, apart, v, 0.1), attention.causal(q, k, v, 0.1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: torch.dtype) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    before = torch.get_num_threads()
    q, k, v = make((14, 2, 64), 200, 500, kind)
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(prefill.causal(q, k, v, 0.125))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
