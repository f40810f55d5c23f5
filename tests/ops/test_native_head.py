"""The head in one native call against its plain twin, for every instruction set that this machine runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native import head, weights
from phasewise.ops.native.head import Head
from phasewise.ops.native.weights import FORMS, GROUP, PackedWeights
from phasewise.ops.sampling import allowed
from tests import seeds
from tests.model.families import FAMILIES
from tests.model.reference import save_random
from tests.ops.targets import EACH

SHAPES = [(64, 32), (1, 1), (7, 5), (65, 33), (130, 257), (1000, 96), (331, 2051)]  # outputs, inputs
ROWS = [0, 1, 2, 3, 5, 6, 7, 16, 47, 49, 70]
EPS = 1e-6
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    for module in (weights, head):
        monkeypatch.setattr(module, "library", lambda: kernels)
    return str(request.param)


def make(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    int8: bool = False,
    norm: Tensor | None = None,
    cap: float | None = None,
) -> Head:
    return Head(
        PackedWeights(weight, bias, FORMS[int8]), torch.ones(weight.shape[1]) if norm is None else norm, EPS, cap
    )


def steps(x: Tensor) -> Tensor:
    """Numbers that share a scale, row by row, as int8 sees them, float64."""
    top = x.float().abs().amax(1, keepdim=True)
    inverse = torch.where(top > 0, torch.tensor(127.0) / top, 0.0)  # a tensor: 127 / top would round twice
    return (x.double() * inverse.double()).round() * (top / 127).double()


def twin(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, int8: bool) -> Tensor:
    """Logits in float64 of the norm in float32, rounded to bfloat16."""
    normed = F.rms_norm(x.float(), norm.shape, norm.float(), EPS).bfloat16()
    if int8:
        y = torch.zeros(len(x), len(weight), dtype=torch.double)
        for some, own in zip(normed.split(GROUP, 1), weight.split(GROUP, 1)):
            y += steps(some) @ steps(own).T
    else:
        y = normed.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def same_best(got: Head, x: Tensor) -> bool:
    """torch, too, takes the first of equal numbers, and NaN for the largest."""
    return got.best(x) == got.logits(x).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("shape", "kind", "int8"), seeds.some(product(SHAPES, [torch.bfloat16, torch.float32], [False, True]), 7, "head")
)
@pytest.mark.usefixtures("target")
def test_equals_the_twin(shape: tuple[int, int], kind: torch.dtype, int8: bool) -> None:
    """`kind` of the norm's weight and the bias: Gemma's norm is float32 beside bfloat16."""
    torch.manual_seed(0)
    weight, norm = torch.randn(shape).bfloat16(), (1 + torch.randn(shape[1]) / 4).to(kind)
    for rows in ROWS:
        bias = torch.randn(shape[0]).to(kind) if rows % 2 else None
        x = torch.randn(rows, shape[1]).bfloat16() * 3
        before, got = x.clone(), make(weight, bias, int8=int8, norm=norm)
        logits, want = got.logits(x), twin(x, weight, bias, norm, int8)
        assert logits.dtype == torch.float32 and logits.shape == (rows, shape[0])
        scale = want.abs().mean() + want.abs() + 1e-6 if rows else want
        assert ((logits.double() - want).abs() <= 1e-2 * scale).all(), rows
        assert same_best(got, x), rows
        assert torch.equal(x, before), "inputs were written to"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_logits_are_the_sums_unrounded(int8: bool) -> None:
    """Rows of ones of either sign come out of the norm as they are, so only the product is left to differ."""
    weight, x = torch.randn(200, 96).bfloat16(), torch.randn(9, 96).sign().bfloat16()
    logits = make(weight, int8=int8).logits(x)
    want = x.double() @ (steps(weight) if int8 else weight.double()).T
    assert ((logits.double() - want).abs() <= 1e-5 * (1 + want.abs())).all()
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize(("cap", "int8"), [(0.5, False), (0.5, True), (30.0, False)])
@pytest.mark.usefixtures("target")
def test_capped_logits(int8: bool, cap: float) -> None:
    """torch's cap of the logits as they were; where a low cap makes large ones equal, the first of them is best."""
    torch.manual_seed(0)
    weight, x = torch.randn(333, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    plain, capped = make(weight, int8=int8), make(weight, int8=int8, cap=cap)
    logits, want = capped.logits(x), plain.logits(x).double().div(cap).tanh() * cap
    torch.testing.assert_close(logits.double(), want, rtol=2e-6, atol=0)
    assert same_best(capped, x)
    assert (cap > 1) == (plain.best(x) == capped.best(x)), "the lowest cap makes several as large as can be"
    bias = torch.zeros(333)
    bias[100], bias[200], bias[300] = INF, INF, -INF
    assert make(weight, bias, int8=int8, cap=cap).logits(x)[:, [100, 200, 300]].unique().tolist() == [-cap, cap]
    bias[222] = NAN
    got = make(weight, bias, int8=int8, cap=cap)
    assert got.best(x) == [222] * 50 and same_best(got, x)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_of_equal_logits_the_first_is_best(int8: bool) -> None:
    torch.manual_seed(1)
    few, x = torch.randn(5, 64).bfloat16(), torch.randn(70, 64).bfloat16()
    for outputs in (5, 64, 65, 333, 1024):
        which = torch.randint(0, 5, (outputs,))
        got = make(few[which], int8=int8)
        assert (got.logits(x)[:, which == which[0]].diff(dim=1) == 0).all(), "no ties were made"
        assert same_best(got, x)
        first = [int((which == which[best]).nonzero()[0]) for best in got.best(x)]
        assert got.best(x) == first
    assert make(torch.zeros(200, 64).bfloat16(), int8=int8).best(x) == [0] * 70
    below = torch.full((200,), -3.0)  # what fills up the last panel must not win
    assert make(torch.zeros(200, 64).bfloat16(), below, int8=int8).best(x) == [0] * 70


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_infinite_and_undefined_logits(int8: bool) -> None:
    weight, x = torch.randn(333, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    for places, value, want in (
        ([100, 200], INF, 100),
        ([70, 20, 330], NAN, 20),
        ([332], NAN, 332),
        (range(333), -INF, 0),
        (range(333), NAN, 0),
    ):
        bias = torch.zeros(333)
        bias[list(places)] = value
        got = make(weight, bias, int8=int8)
        assert got.best(x) == [want] * 7 and same_best(got, x)
    bias = torch.zeros(333)
    bias[10], bias[200] = INF, NAN  # NaN is larger than infinity
    assert make(weight, bias, int8=int8).best(x) == [200] * 7
    bias = torch.full((333,), -INF)
    bias[130] = -1e4
    assert make(weight, bias, int8=int8).best(x) == [130] * 7


def masked(chance: float, rows: int, outputs: int) -> tuple[list[Tensor | None], Tensor]:
    """A mask for each row but every fifth, that lets so many outputs count, and the same as bool [rows, outputs]."""
    counts = torch.rand(rows, outputs) < chance
    counts[::5] = True
    bits = np.packbits(F.pad(counts, (0, -outputs % 32)).numpy(), axis=1, bitorder="little").view(np.int32)
    return [torch.from_numpy(bits[i]) if i % 5 else None for i in range(rows)], counts


@pytest.mark.parametrize(("chance", "int8"), [(0.0, False), (0.01, False), (0.5, True), (1.0, True)])
@pytest.mark.usefixtures("target")
def test_the_best_that_a_mask_allows(chance: float, int8: bool) -> None:
    """As of logits that are -inf elsewhere: of equal ones the first; -1 where nothing is left. The plain twin too."""
    torch.manual_seed(3)
    few = torch.randn(40, 64).bfloat16()
    for outputs in (1, 31, 32, 33, 64, 65, 96, 97, 333, 1024):
        weight = few[torch.randint(0, 40, (outputs,))]  # ties
        bias = torch.zeros(outputs)
        bias[torch.rand(outputs) < 0.1] = -INF
        got, x = make(weight, bias, int8=int8), torch.randn(21, 64).bfloat16()
        masks, counts = masked(chance, 21, outputs)
        logits = got.logits(x)
        left = logits.masked_fill(~counts, -INF)
        none = (left == -INF).all(1) & torch.tensor([mask is not None for mask in masks])
        want = left.argmax(1).masked_fill(none, -1).tolist()
        assert got.best(x, masks) == want, outputs
        assert allowed(logits.clone(), masks) == want, outputs
        assert got.best(x) == logits.argmax(1).tolist(), "a call's masks are its own"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_undefined_logits_under_a_mask(int8: bool) -> None:
    bias = torch.zeros(333)
    bias[10], bias[200] = INF, NAN
    got, x = make(torch.zeros(333, 64).bfloat16(), bias, int8=int8), torch.randn(2, 64).bfloat16()
    for among, want in ((range(333), 200), (range(200), 10), (range(11, 200), 11), ([5, 220, 200], 200)):
        counts = torch.zeros(1, 352, dtype=torch.bool)
        counts[0, list(among)] = True
        bits = np.packbits(counts.numpy(), axis=1, bitorder="little").view(np.int32)
        assert got.best(x, [torch.from_numpy(bits[0]), None]) == [want, 200]


@pytest.mark.parametrize(("bad", "int8"), [(NAN, False), (INF, True), (-INF, False), (NAN, True)])
@pytest.mark.usefixtures("target")
def test_bad_rows_spoil_only_themselves(bad: float, int8: bool) -> None:
    got = make(torch.randn(130, 65).bfloat16(), int8=int8)
    x = torch.randn(8, 65).bfloat16()
    logits, best, keep = got.logits(x), got.best(x), [0, 1, 2, 4, 5, 6, 7]
    for column in (0, 31, 64):
        spoiled = x.clone()
        spoiled[3, column] = bad
        assert torch.equal(got.logits(spoiled)[keep], logits[keep])
        assert [got.best(spoiled)[i] for i in keep] == [best[i] for i in keep]
        assert got.logits(spoiled)[3].isnan().all() and got.best(spoiled)[3] == 0


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_rows_do_not_depend_on_each_other(int8: bool) -> None:
    """Bit for bit, and however they lie: this is what makes a request's tokens independent of its batch mates."""
    got, wide = make(torch.randn(150, 300).bfloat16(), int8=int8), torch.randn(75, 411).bfloat16()
    x = wide[:, 1:301]
    logits, best = got.logits(x), got.best(x)
    for size in (1, 2, 3, 5, 6, 7, 48):
        assert torch.equal(torch.cat([got.logits(part) for part in x.contiguous().split(size)]), logits), size
        assert [i for part in x.split(size) for i in got.best(part)] == best, size
    assert torch.equal(got.logits(x.T.contiguous().T), logits)
    assert torch.equal(got.logits(x[:1].expand(5, -1)), logits[:1].expand(5, -1))


@pytest.mark.parametrize("int8", [False, True])
def test_threads_change_nothing(int8: bool) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    before = torch.get_num_threads()
    torch.manual_seed(2)
    few, bias = torch.randn(300, 256).bfloat16(), torch.zeros(5003)
    bias[[2600, 4900]] = NAN  # in the shares of whichever threads
    weight = few[torch.randint(0, 300, (5003,))]  # ties across the shares
    heads = [make(weight, int8=int8), make(weight, bias, int8=int8)]
    x = torch.randn(70, 256).bfloat16()
    x[13, 5] = NAN
    try:
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for rows in [x.clone() for _ in range(5)]:  # rows in another memory, or the threads would not count
                results.append([(h.logits(rows), h.best(rows)) for h in heads])
    finally:
        torch.set_num_threads(before)
    for which, (logits, best) in enumerate(results[0]):
        assert best == logits.argmax(-1).tolist()
        for result in results:
            assert torch.equal(result[which][0].nan_to_num(), logits.nan_to_num())
            assert result[which][1] == best


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root, names = tmp_path_factory.mktemp("families"), ("llama", "llama-biased-tied", "gemma2", "mixtral")
    for name in names:
        save_random(FAMILIES[name](), root / name)
    yield {name: root / name for name in names}


@pytest.mark.parametrize(("name", "dtype"), [
    ("llama", torch.bfloat16), ("llama-biased-tied", torch.int8), ("gemma2", torch.bfloat16), ("gemma2", torch.int8),
    ("mixtral", torch.bfloat16),
])  # fmt: skip
@torch.inference_mode()
def test_models_use_it(name: str, dtype: torch.dtype, directories: dict[str, Path]) -> None:
    """As near to torch's operators as bfloat16 is, and `best` is always the argmax of `head`, capped or not."""
    if native.library() is None:
        pytest.skip("no native kernels here")
    model = Model.load(directories[name], dtype=dtype)
    x = torch.randn(40, model.config.hidden).bfloat16()
    logits, best = model.head(x), model.best(x)
    assert model.whole_head is not None and logits.dtype == torch.float32
    assert best == logits.argmax(-1).tolist()
    model.whole_head = None
    plain = model.head(x)
    assert 0 < float((logits - plain).norm() / plain.norm()) < 1e-2
    assert model.best(x) == plain.argmax(-1).tolist()


@torch.inference_mode()
def test_a_cap_makes_large_logits_equal(directories: dict[str, Path]) -> None:
    """The most likely token is the first of those at the cap, not the one whose logit was largest below it."""
    model = Model.load(directories["gemma2"], dtype=torch.bfloat16)
    model.norm.weight.fill_(1000.0)
    if model.whole_head is not None:
        cap = model.config.logit_softcap
        model.whole_head = Head(model.whole_head.weights, model.norm.weight, model.config.eps, cap)
    x = torch.randn(5, model.config.hidden).bfloat16()
    logits = model.head(x)
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).all(), "the test must have ties"
    assert model.best(x) == logits.argmax(-1).tolist()


def test_other_models_do_without(directories: dict[str, Path]) -> None:
    model = Model.load(directories["llama"], dtype=torch.float32)
    x = torch.randn(3, model.config.hidden)
    assert model.whole_head is None
    assert torch.equal(model.head(x), model.unembed(model.norm(x)))
    assert model.best(x) == model.head(x).argmax(-1).tolist()
