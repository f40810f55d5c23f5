"""Layers whose parts have weights in unlike forms, for every instruction set that this machine runs."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from phasewise.ops import native
from phasewise.ops.native import head, stack, weights
from phasewise.ops.native.head import Head
from phasewise.ops.native.stack import Stack, StackGate, StackLayer, StackShape
from phasewise.ops.native.weights import PackedPart, PackedWeights, pack
from tests.ops.targets import EACH
from tests.ops.test_native_curves import DIM, run

HIDDEN, INNER = 192, 70  # parts of the layers below begin in the middle of 64 outputs
SIZES = (1, 7, 64, 130)


@pytest.fixture(params=EACH, autouse=True)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    for module in (native, head, weights, stack):
        monkeypatch.setattr(module, "library", lambda: kernels)
    torch.manual_seed(3)
    return str(request.param)


def part(outputs: int, inputs: int, form: str) -> PackedPart:
    return pack((torch.randn(outputs, inputs) / inputs**0.5).bfloat16(), form)


def apart(layer: PackedWeights, bias: Tensor | None, x: Tensor, add: Tensor) -> Tensor:
    """The product of each part by itself."""
    ends = accumulate((each.outputs for each in layer.parts), initial=0)
    return torch.cat([
        PackedWeights.of([each], None if bias is None else bias[a:b])(x, add[:, a:b])
        for each, (a, b) in zip(layer.parts, pairwise(ends))
    ], 1)  # fmt: skip


@pytest.mark.parametrize("forms", [("int8", "bfloat16", "bfloat16"), ("bfloat16", "int8", "bfloat16")])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_layer_gives_what_its_parts_give(forms: tuple[str, ...], kind: torch.dtype) -> None:
    """To the bit, on any number of threads; and its rows are theirs."""
    parts = [part(outputs, 257, form) for outputs, form in zip((130, 33, 64), forms)]
    bias, x, add = torch.randn(227), torch.randn(130, 257).to(kind), torch.randn(130, 227).to(kind)
    layer, before = PackedWeights.of(parts, bias), torch.get_num_threads()
    assert torch.equal(layer.dense(), torch.cat([PackedWeights.of([each], None).dense() for each in parts]))
    try:
        for size in SIZES:
            want = apart(layer, bias, x[:size], add[:size])
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert torch.equal(layer(x[:size], add[:size]), want), (size, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("qkv", [("bfloat16",) * 3, ("int8", "bfloat16", "bfloat16")])
def test_a_stack_whose_layers_mix_forms(qkv: tuple[str, ...]) -> None:
    """Tokens that see only themselves read their own value; ReLU is exact. So products apart give the same bits."""
    attention = (
        PackedWeights.of([part(DIM, HIDDEN, form) for form in qkv], None),
        PackedWeights.of([part(HIDDEN, DIM, "int8")], None),
    )
    gate_up = PackedWeights.of([part(INNER, HIDDEN, form) for form in ("int8", "bfloat16")], None)
    down = PackedWeights.of([part(HIDDEN, INNER, "bfloat16")], None)
    table = PackedWeights.of([part(70, HIDDEN, "bfloat16"), part(60, HIDDEN, "int8")], None)
    layer = StackLayer(attention, (gate_up, down), [None] * 4, None, False, StackGate("relu"), None, None, 1.0, None)
    call = Stack([layer], StackShape(HIDDEN, 1, 1, DIM), table)
    for size in SIZES:
        tokens = range(130 - size, 130)
        x = table.rows(torch.tensor(tokens))
        value = apart(attention[0], None, x, torch.zeros(size, 3 * DIM).bfloat16())[:, 2 * DIM :]
        y = attention[1](value, x)
        both = apart(gate_up, None, y, torch.zeros(size, 2 * INNER).bfloat16()).float()
        gated = both[:, :INNER].relu() * both[:, INNER:]
        assert torch.equal(run(call, tokens), down(gated.bfloat16(), y)), size


def test_the_largest_logit_of_a_head_in_parts() -> None:
    """Masks count outputs over all parts, and of equal ones the first counts, whatever part has it."""
    same = torch.randn(50, 96).bfloat16()
    layer = PackedWeights.of([pack(same, "int8"), pack(same, "int8"), part(130, 96, "bfloat16")], None)
    made, x = Head(layer, torch.ones(96), 1e-5), torch.randn(7, 96).bfloat16()
    logits = made.logits(x)
    assert made.best(x) == logits.argmax(1).tolist()
    counts = torch.rand(7, 256) < 0.1
    counts[:, 230:] = False
    words = counts.view(7, 8, 32).long() @ (1 << torch.arange(32))
    masks = list(torch.where(words < 1 << 31, words, words - (1 << 32)).int())
    assert made.best(x, masks) == logits.masked_fill(~counts[:, :230], -torch.inf).argmax(1).tolist()
