"""A bias on the scores of the first slot, in the native kernels against their plain twin, for every instruction set of
this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import attention
from phasewise.ops.native import prefill, spans
from phasewise.ops.native.spans import Few, SeenWindow
from phasewise.step.span import ancestors
from tests import seeds
from tests.ops import test_native_sealed as packed
from tests.ops.targets import EACH, NATIVE, drawn, running

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (6, 3, 20), (3, 1, 7), (2, 2, 256)]  # heads_q, heads, dim
SIZES = [(1, 1), (3, 9), (1, 65), (1, 300), (1, 2500), (5, 70), (16, 1030), (7, 2050)]  # rows, slots
SIGHTS = [SeenWindow(0), SeenWindow(30), SeenWindow(70, 4), SeenWindow(300, 130), SeenWindow(3, 1)]
SCALE = 0.2


@pytest.fixture(params=EACH, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param, spans, prefill) as target:
        yield target


def make(
    shape: tuple[int, int, int],
    rows: int,
    n: int,
    kind: torch.dtype,
    rounded: bool = False,
    seen: SeenWindow = SIGHTS[0],
) -> Few:
    """Heads of which one has no bias; sinks have queries of their own."""
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n, dim).to(kind) for _ in range(2))
    bias = torch.randn(heads_q) * 4
    bias[0] = 0
    seen = seen._replace(bias=bias, far=torch.randn(rows, heads_q, dim).to(kind) if seen.sinks else None)
    if not rounded:
        return Few(q, k, v, seen=seen)
    k, k_scale, v, v_scale = Int8().format().encode(k, v)
    return Few(q, k, v, seen=seen, scales=(k_scale, v_scale))


def tree(few: Few) -> Few:
    """Its rows as a tree of which the first slot of all is an own one, that not all see, if there are no others."""
    return few._replace(sees=ancestors([i // 2 - 1 if i < 2 else (i - 1) // 2 for i in range(few.q.shape[0])]))


def twin(few: Few, softcap: float | None = None, bias: bool = True) -> Tensor:
    """By the book: scores as a model has them, the bias, what is not seen left out, a softmax."""
    rows, n, seen, k, v = few.q.shape[0], few.k.shape[1], few.seen, few.k, few.v
    assert seen is not None and seen.bias is not None
    if few.scales is not None:
        k, v = Int8().format().decode([k, few.scales[0], v, few.scales[1]], few.q.dtype)
    k, v, slots = k.float(), v.float(), torch.arange(n)
    logits = attention.scores(few.q.float(), k, SCALE, softcap)
    if seen.far is not None:
        logits[..., : seen.sinks] = attention.scores(seen.far.float(), k[:, : seen.sinks], SCALE, softcap)
    if bias:
        logits[..., 0] += seen.bias.view(*logits.shape[:2], 1)
    own = torch.ones(rows, rows).tril().bool() if few.sees is None else few.sees
    mask = torch.cat((torch.ones(rows, n - rows).bool(), own), 1)
    if seen.window:
        mask &= (slots < seen.sinks) | (slots > torch.arange(n - rows, n)[:, None] - seen.window)
    return attention.weigh(logits, v, mask[None])[0]


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def without(few: Few) -> Few:
    assert few.seen is not None
    return few._replace(seen=few.seen._replace(bias=None))


@pytest.mark.parametrize(("draw", "sets"), drawn(4))
@NATIVE
def test_few_rows_equal_the_twin(draw: int, sets: list[str]) -> None:
    """Single rows, several and trees, from one slot to more than a part, beside a span without it; and capped."""
    some, kind, rounded = seeds.draw("bias", draw), KINDS[draw % 2], draw // 2 % 2 == 1
    shape = some.choice(SHAPES)
    torch.manual_seed(some.getrandbits(32))
    for softcap in (None, 3.0):
        seen = SIGHTS[0] if (softcap is None) == (draw < 2) else some.choice(SIGHTS[1:])
        batch = [make(shape, *size, kind, rounded, seen) for size in SIZES]
        if not seen.window:
            batch += [tree(make(shape, 9, n, kind, rounded)) for n in (9, 200, 1500)]
        plain = without(make(shape, 3, 90, kind, rounded))
        want = torch.cat([twin(few, softcap) for few in batch])
        for target in sets:
            with running(target, spans):
                out, _ = spans.attend([*batch, plain], SCALE, softcap=softcap)
                alone = spans.attend([plain], SCALE, softcap=softcap)[0]
                assert torch.equal(out[-3:], alone), "a mate's bias was added"
                close(out[:-3], want)
        off = torch.cat([twin(few, softcap, bias=False) for few in batch]) - want
        assert off.abs().max() > 0.1, "it matters, or the test tests little"


@pytest.mark.parametrize(("draw", "sets"), drawn(4))
@NATIVE
def test_slices_of_prompts_equal_the_twin(draw: int, sets: list[str]) -> None:
    some, kind, rounded = seeds.draw("bias in slices", draw), KINDS[draw % 2], draw // 2 % 2 == 1
    shape = some.choice(SHAPES)
    torch.manual_seed(some.getrandbits(32))
    for seen in (SIGHTS[0], some.choice(SIGHTS[1:])):
        for rows, n in [(1, 1), (2, 300), (65, 65), (97, 1000) if seen.window else (300, 611)]:
            few = make(shape, rows, n, kind, rounded, seen)
            want, want_capped = twin(few), twin(few, 3.0)
            for target in sets:
                with running(target, prefill):
                    close(prefill.causal(few.q, few.k, few.v, SCALE, few.scales, few.seen), want)
                    capped = prefill.causal(few.q, few.k, few.v, (SCALE, 3.0), few.scales, few.seen)
                    close(capped, want_capped)


@pytest.mark.parametrize(("kind", "rounded"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.usefixtures("target")
def test_no_bias_is_one_of_nothing(rounded: bool, kind: torch.dtype) -> None:
    """Bit for bit."""
    torch.manual_seed(0)
    for size in [*SIZES, (97, 300)]:
        few = make((6, 2, 64), *size, kind, rounded)
        assert few.seen is not None
        none = few._replace(seen=few.seen._replace(bias=torch.zeros(6)))
        assert torch.equal(spans.attend([none], SCALE)[0], spans.attend([without(few)], SCALE)[0])
        both = [prefill.causal(few.q, few.k, few.v, SCALE, few.scales, one.seen) for one in (none, without(few))]
        assert torch.equal(*both)


@pytest.mark.parametrize(("kind", "rounded"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.usefixtures("target")
def test_rows_depend_on_nothing_else(rounded: bool, kind: torch.dtype) -> None:
    """Bit for bit: alone or in company, on any number of threads, and row by row or as one span."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    for seen in SIGHTS[:3]:
        sizes = ((1, 40), (9, 1027), (1, 1500), (12, 70), (3, 2500), (5, 5))
        batch = [make((6, 2, 64), *size, kind, rounded, seen) for size in sizes]
        try:
            torch.set_num_threads(3)
            together, at = spans.attend(batch, 0.1)[0], 0
        finally:
            torch.set_num_threads(before)
        for few in batch:
            rows, n = few.q.shape[0], few.k.shape[1]
            alone = spans.attend([few], 0.1)[0]
            assert torch.equal(alone, together[at : at + rows])
            for i in range(rows):
                assert torch.equal(spans.attend([cut(few, i, i + 1, n - rows + i + 1)], 0.1)[0], alone[i : i + 1])
            at += rows


def cut(few: Few, first: int, last: int, n: int) -> Few:
    """Some rows, as if they had come alone when there were n."""
    seen, scales = few.seen, few.scales
    assert seen is not None
    far = None if seen.far is None else seen.far[first:last].contiguous()
    scales = None if scales is None else (scales[0][:, :n], scales[1][:, :n])
    return few._replace(q=few.q[first:last], k=few.k[:, :n], v=few.v[:, :n], scales=scales,
                        seen=seen._replace(far=far))  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("target")
def test_any_slices_read_what_the_whole_reads(seed: int) -> None:
    """Bit for bit, however a prompt is cut."""
    draw = seeds.draw("slices with a bias", seed)
    torch.manual_seed(draw.getrandbits(32))
    n, rows = 700, draw.randint(100, 700)
    few = make((6, 2, 64), rows, n, draw.choice(KINDS), draw.random() < 0.5, draw.choice(SIGHTS))
    whole, at = prefill.causal(few.q, few.k, few.v, SCALE, few.scales, few.seen), 0
    while at < rows:
        own = min(draw.randint(1, 150), rows - at)
        one = cut(few, at, at + own, n - rows + at + own)
        assert torch.equal(prefill.causal(one.q, one.k, one.v, SCALE, one.scales, one.seen), whole[at : at + own])
        at += own


@pytest.mark.parametrize(
    ("shape", "form"), [((9, 3, 64), packed.Form(2, 32, 128, 128)), ((8, 2, 128), packed.Form(4, 32, 64, 0))], ids=str
)
@pytest.mark.usefixtures("target")
def test_packed_blocks(shape: tuple[int, int, int], form: packed.Form) -> None:
    """The first slot packed or not yet: as its weight in dense attention has it; company changes no bit."""
    torch.manual_seed(0)
    cases = [(1, 1), (1, 65), (3, 200), (2, 517), (1, 2500)]
    batch, bias = [packed.make(shape, form, *case, 0) for case in cases], torch.randn(shape[0]) * 4
    biased = [kept.few._replace(seen=SeenWindow(0, bias=bias)) for kept in batch]
    together = spans.attend(biased, SCALE)[0].split([few.q.shape[0] for few in biased])
    for kept, few, got in zip(batch, biased, together):
        assert torch.equal(spans.attend([few], SCALE)[0], got)
        plain, lse = spans.attend([kept.few], SCALE, with_lse=True)
        assert lse is not None
        group = shape[0] // shape[1]
        scores = (few.q.float() * kept.k[:, 0].float().repeat_interleave(group, 0)).sum(-1) * SCALE
        extra = bias.expm1() * (scores - lse).exp()
        first = kept.v[:, 0].float().repeat_interleave(group, 0)
        want = (plain.float() + extra[..., None] * first) / (1 + extra)[..., None]
        torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))
