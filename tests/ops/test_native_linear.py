"""The native linear kernels against their plain twins, for every instruction set that this machine runs."""

from __future__ import annotations

import gc
import logging
import weakref
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.ops import linear, native
from phasewise.ops.linear import Linear
from phasewise.ops.native import abi, weights
from phasewise.ops.native.weights import FORMS, GROUP, PackedWeights
from tests import seeds
from tests.ops.targets import EACH

SHAPES = [(64, 32), (1, 1), (7, 5), (65, 33), (130, 257), (200, 96), (320, 2051)]  # outputs, inputs
ROWS = [0, 1, 2, 3, 5, 6, 7, 8, 13, 32, 49, 100]
KINDS = [torch.bfloat16, torch.float32]


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(weights, "library", lambda: kernels)
    return str(request.param)


def twin(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """float64 over rows rounded to bfloat16."""
    y = x.bfloat16().double() @ weight.double().T
    y = y if bias is None else y + bias.double()
    return y if add is None else y + add.double()


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 rounds them with one scale each: whole steps float64 [T, n], and a step's worth float32 [T, 1]."""
    x = x.float()
    top = x.abs().amax(1, keepdim=True)
    inverse = torch.where(top >= 1e-35, torch.tensor(127.0) / top, 0.0)  # a tensor: 127 / top would round twice
    return (x.double() * inverse.double()).round(), top / 127


def twin8(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Whole sums within a group of inputs, worth the product of both steps in float32; over groups, in order, float32
    sums that are rounded once per group."""
    y = torch.zeros(len(x), len(weight))
    for some, own in zip(x.split(GROUP, 1), weight.split(GROUP, 1)):
        (xs, x_step), (ws, w_step) = rounded(some), rounded(own)
        y = ((xs @ ws.T) * (x_step * w_step.T).double() + y.double()).float()
    y = y if bias is None else y + bias.float()
    return y if add is None else y + add.float()


def near(got: Tensor, want: Tensor) -> bool:
    scale = want.abs().mean() + want.abs() + 1e-6 if want.numel() else want
    return bool(((got.double() - want).abs() <= 1e-2 * scale).all())


@pytest.mark.parametrize(("shape", "kind", "int8"), seeds.some(product(SHAPES, KINDS, [False, True]), 7, "linear"))
@pytest.mark.usefixtures("target")
def test_equals_the_twin(shape: tuple[int, int], kind: torch.dtype, int8: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    for rows in ROWS:
        bias = torch.randn(shape[0]).to(kind) if rows % 2 else None
        x, add = torch.randn(rows, shape[1]).to(kind), torch.randn(rows, shape[0]).to(kind)
        before = x.clone(), add.clone()
        layer = PackedWeights(weight, bias, FORMS[int8])
        for residual in (None, add):
            got, want = layer(x, residual), (twin8 if int8 else twin)(x, weight, bias, residual)
            assert got.dtype == kind and got.shape == (rows, shape[0])
            assert torch.equal(got, want.to(kind)) if int8 else near(got, want), (rows, residual is None)
        assert torch.equal(x, before[0]) and torch.equal(add, before[1]), "inputs were written to"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_strides(int8: bool) -> None:
    """Rows and residuals may be halves of fused results, transposed, or single rows expanded."""
    weight, both = torch.randn(70, 64).bfloat16(), torch.randn(9, 134).bfloat16()
    layer = PackedWeights(weight, None, FORMS[int8])
    x, add = both[:, :64], both[:, 64:]
    assert torch.equal(layer(x, add), layer(x.contiguous(), add.contiguous()))
    odd = both[:, 1:65]
    assert torch.equal(layer(odd), layer(odd.contiguous()))
    turned = torch.randn(64, 9).bfloat16().T
    assert torch.equal(layer(turned, add), layer(turned.contiguous(), add.contiguous()))
    assert torch.equal(layer(x[:1].expand(5, -1)), layer(x[:1]).expand(5, -1))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_rows_do_not_depend_on_each_other(kind: torch.dtype, int8: bool) -> None:
    """Bit for bit: this is what makes a request's tokens independent of its batch mates (DESIGN law 6)."""
    layer = PackedWeights(torch.randn(150, 2300).bfloat16(), torch.randn(150), FORMS[int8])
    x, add = torch.randn(75, 2300).to(kind), torch.randn(75, 150).to(kind)
    together = layer(x, add)
    for size in (1, 2, 3, 4, 5, 6, 7, 11, 48):
        apart = [layer(a, b) for a, b in zip(x.split(size), add.split(size))]
        assert torch.equal(torch.cat(apart), together), size


@pytest.mark.parametrize("inputs", [128, 300, 2304])
@pytest.mark.usefixtures("target")
def test_an_int8_row_is_its_own_in_steps_of_any_size(inputs: int) -> None:
    """513 rows fill tiles, blocks and the last of each otherwise than 64, 7 or 1 of them do. All instruction sets give
    the twin's bits, hence the same."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, inputs), torch.randn(130), torch.randn(513, inputs)
    layer = PackedWeights(weight, bias, "int8")
    together = layer(x)
    assert torch.equal(together, twin8(x, weight, bias, None))
    for size in (1, 7, 64):
        assert torch.equal(torch.cat([layer(some) for some in x.split(size)]), together), size


@pytest.mark.parametrize("rows", [1, 9, 49])
@pytest.mark.usefixtures("target")
def test_an_int8_group_has_a_scale_of_its_own(rows: int) -> None:
    """Of inputs and of each output's weights: numbers of very different sizes, a group of zeros, and one too small to
    be rounded. The way back has the same scales."""
    torch.manual_seed(0)
    weight, x = torch.randn(130, 5 * GROUP + 3), torch.randn(rows, 5 * GROUP + 3)
    sizes = torch.tensor([1e-4, 1e4, 0.0, 1e-38, 3.0]).repeat_interleave(GROUP)
    x *= torch.cat((sizes, torch.tensor([1e5, 1e-5, 1.0])))
    weight *= torch.cat((sizes.flip(0), torch.ones(3)))
    weight[torch.arange(130), torch.arange(130) * 4 + 1] = 1e3  # another group of each few outputs
    layer = PackedWeights(weight, None, "int8")
    assert torch.equal(layer(x), twin8(x, weight, None, None))
    parts = (rounded(some) for some in weight.split(GROUP, 1))
    assert torch.equal(layer.dense(), torch.cat([(steps.float() * step).bfloat16() for steps, step in parts], 1))


@pytest.mark.parametrize(("bad", "int8"), [(float("nan"), False), (float("inf"), True), (float("-inf"), False)])
@pytest.mark.usefixtures("target")
def test_bad_numbers_spoil_their_own_row_only(bad: float, int8: bool) -> None:
    layer = PackedWeights(torch.randn(70, 65).bfloat16(), None, FORMS[int8])
    x = torch.randn(8, 65).bfloat16()
    clean = layer(x)
    for column in (0, 31, 64):
        spoiled = x.clone()
        spoiled[3, column] = bad
        got = layer(spoiled)
        assert not got[3].isfinite().any()
        keep = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(got[keep], clean[keep])


@pytest.mark.usefixtures("target")
def test_bad_weights_spoil_their_own_output_only() -> None:
    weight, x = torch.randn(70, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    clean = PackedWeights(weight, None)(x)
    weight[20, 5] = float("nan")
    for int8 in (False, True):
        got = PackedWeights(weight, None, FORMS[int8])(x)
        assert got[:, 20].isnan().all() and got[:, torch.arange(70) != 20].isfinite().all()
    keep = torch.arange(70) != 20
    assert torch.equal(PackedWeights(weight, None)(x)[:, keep], clean[:, keep])


@pytest.mark.usefixtures("target")
def test_zero_rows_and_zero_weights_give_zero() -> None:
    for int8 in (False, True):
        layer = PackedWeights(torch.randn(70, 33).bfloat16(), None, FORMS[int8])
        assert torch.equal(layer(torch.zeros(2, 33).bfloat16()), torch.zeros(2, 70).bfloat16())
        layer = PackedWeights(torch.zeros(70, 33).bfloat16(), None, FORMS[int8])
        assert torch.equal(layer(torch.randn(2, 33).bfloat16()), torch.zeros(2, 70).bfloat16())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("target")
def test_packed_in_slices(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, and every row of the source is let go once."""
    weight, bias, x = torch.randn(330, 65).bfloat16(), torch.randn(330), torch.randn(3, 65).bfloat16()
    whole = PackedWeights(weight, bias, FORMS[int8])
    monkeypatch.setattr(weights, "SLICE", 140 * 65 * 2)
    done: list[Tensor] = []
    sliced = PackedWeights(weight, bias, FORMS[int8], done=done.append)
    assert [len(rows) for rows in done] == [128, 128, 74]
    assert torch.equal(torch.cat(done), weight)
    assert torch.equal(sliced(x), whole(x))
    assert torch.equal(sliced.dense(), whole.dense())


@pytest.mark.parametrize("shape", [(1, 1), (65, 33), (320, 2051)])
@pytest.mark.usefixtures("target")
def test_the_way_back(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    assert torch.equal(PackedWeights(weight, None).dense(), weight)
    parts = (rounded(some) for some in weight.split(GROUP, 1))
    back = PackedWeights(weight, None, "int8").dense()
    assert torch.equal(back, torch.cat([(steps.float() * step).bfloat16() for steps, step in parts], 1))
    which = torch.randint(0, shape[0], (5,))
    assert torch.equal(PackedWeights(weight, None).rows(which), weight[which])
    for int8 in (False, True):
        for absent in (-1, shape[0]):
            with pytest.raises(IndexError):
                PackedWeights(weight, None, FORMS[int8]).rows(torch.tensor([0, absent]))


@pytest.mark.parametrize("int8", [False, True])
def test_threads_change_nothing(int8: bool) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    before = torch.get_num_threads()
    weight, x = torch.randn(1000, 700).bfloat16(), torch.randn(20, 700)
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            layer = PackedWeights(weight, None, FORMS[int8])
            results.append((layer(x), layer.dense()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a[0], results[0][0]) and torch.equal(a[1], results[0][1]) for a in results)


def test_which_form_a_layer_takes() -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    half, single = torch.randn(16, 16).bfloat16(), torch.randn(16, 16)
    assert Linear(half).native is not None and Linear(half, packed=False).native is None
    assert Linear(single).native is None
    assert all(Linear(weight, precision="int8").native is not None for weight in (single, half))
    x = torch.randn(3, 16)
    assert torch.equal(Linear(half).dense(), half)
    assert torch.equal(Linear(half).rows(torch.tensor([3, 3])), half[[3, 3]])
    assert near(Linear(half)(x.bfloat16()), F.linear(x.bfloat16(), half).double())
    assert Linear(half, precision="int8").nbytes == 16 * 16 + 4 * 16
    assert Linear(torch.randn(16, 129), precision="int8").nbytes == 16 * 129 + 4 * 16 * 2
    with pytest.raises(UserError, match="int7"):
        Linear(half, precision="int7")


def test_a_pointer_leads_to_data_and_keeps_it() -> None:
    one = torch.tensor([7])  # it would pass for a number
    noise = abi.NoiseStruct(seeds=one, layer=3)
    assert (noise.seeds, noise.rows, noise.layer) == (one.data_ptr(), 0, 3)
    calls = abi.Structures(abi.ReceivedCallStruct, [abi.ReceivedCallStruct(noise=noise, scale=0.5)])
    assert (calls[0].noise, calls[0].scale) == (noise.address, 0.5)
    kept, where = weakref.ref(one), one.data_ptr()
    del one, noise
    gc.collect()
    assert kept() is not None and int(kept()[0]) == 7 and kept().data_ptr() == where
    with pytest.raises(AttributeError, match="widow"):
        abi.SightStruct(widow=1)  # type: ignore[call-arg]


def test_a_library_of_other_sources_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = next((target for target in native.TARGETS if native.load(target)), None)
    if target is None:
        pytest.skip("no native kernels here")
    monkeypatch.setitem(abi.STRUCTURES, "SightStruct", abi.NormStruct)
    with caplog.at_level(logging.WARNING):
        assert native.load(target) is None
    assert "other sources (Sight)" in caplog.text


def test_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """torch does the work, the log says so once, and int8, which was asked for, is refused."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    native.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert Linear(torch.randn(8, 8).bfloat16()).native is None
            assert Linear(torch.randn(8, 8).bfloat16()).native is None
        own = [record for record in caplog.records if record.name == native.__name__]
        assert "not built" in caplog.text and len(own) == 1  # oneDNN may have had something to say of its own
        with pytest.raises(UserError, match="native"):
            Linear(torch.randn(8, 8), precision="int8")
    finally:
        native.library.cache_clear()
    assert linear.native is native
