"""The packed linear layer against its plain twin, and the way back to the twin where packing is impossible."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from phasewise.ops import linear
from phasewise.ops.linear import Linear
from tests import seeds

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_native_linear.py is about the native kernels; here is what happens where there are none."""
    monkeypatch.setattr(linear.native, "library", lambda: None)


@pytest.fixture
def forget() -> Iterator[None]:
    """What this machine can pack is found out again."""
    linear._can_pack.cache_clear()
    yield
    linear._can_pack.cache_clear()


@pytest.mark.parametrize(("dtype", "rows", "shape", "with_bias"), seeds.some(product(
    [torch.float32, torch.bfloat16], [0, 1, 3, 16, 65], [(96, 64), (40, 24), (7, 5), (1, 128)], [False, True],
), 12, "linear in torch"))  # fmt: skip
def test_packed_equals_plain(dtype: torch.dtype, rows: int, shape: tuple[int, int], with_bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    x, add = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
    before = x.clone(), add.clone()
    plain, packed = Linear(weight.clone(), bias, packed=False), Linear(weight.clone(), bias, packed=True)
    if not linear._can_pack(dtype):
        pytest.skip(f"oneDNN cannot pack {dtype} on this machine")
    assert packed.packed and not plain.packed
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for name, layer in (("plain", plain), ("packed", packed)):
        for want, got in ((exact, layer(x)), (exact + add.double(), layer(x, add))):
            assert got.dtype == dtype and got.shape == (rows, shape[0])
            # two roundings at most: the product's, and the sum's
            error = (got.double() - want).abs() / (1 + want.abs() + (want - add.double()).abs())
            assert rows == 0 or error.max() < 8 * ROUNDING[dtype], name
    assert torch.equal(x, before[0]) and torch.equal(add, before[1]), "inputs were written to"
    assert torch.equal(packed.dense(), weight) and torch.equal(plain.dense(), weight)
    assert packed.nbytes == plain.nbytes == weight.nbytes + (0 if bias is None else bias.nbytes)


def test_strided_rows() -> None:
    """Halves of a fused output are handed in as views."""
    both = torch.randn(6, 128).bfloat16()
    weight = torch.randn(32, 64).bfloat16()
    for half in both.chunk(2, -1):
        torch.testing.assert_close(Linear(weight)(half), Linear(weight, packed=False)(half), atol=0.1, rtol=0.02)


def test_which_weights_are_packed() -> None:
    if not linear._can_pack(torch.bfloat16):
        pytest.skip("oneDNN cannot pack bfloat16 on this machine")
    assert Linear(torch.zeros(16, 16, dtype=torch.bfloat16)).packed
    assert not Linear(torch.zeros(16, 16, dtype=torch.float32)).packed
    assert not Linear(torch.zeros(16, 16, dtype=torch.float16)).packed


def test_packing_lets_the_source_go() -> None:
    if not linear._can_pack(torch.bfloat16):
        pytest.skip("oneDNN cannot pack bfloat16 on this machine")
    weight = torch.zeros(16, 16, dtype=torch.bfloat16)
    alive = weakref.ref(weight)
    layer = Linear(weight)
    del weight
    gc.collect()
    assert alive() is None
    assert layer.packed


@pytest.mark.usefixtures("forget")
def test_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on this processor")

    monkeypatch.setattr(linear, "_pack", refuse)
    weight, x = torch.randn(8, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    with caplog.at_level(logging.WARNING):
        layers = [Linear(weight), Linear(weight)]
    assert not any(layer.packed for layer in layers)
    assert torch.equal(layers[0](x), torch.nn.functional.linear(x, weight))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not on this processor" in caplog.text
