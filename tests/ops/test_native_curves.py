"""Activations and the mixture of experts of a native layer against torch's own, for every instruction set here.

The layer's attention adds nothing: what comes out of the call is the embedding, and what the MLP makes of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phasewise.model.mlp import ACTIVATION, MLP, MoE
from phasewise.ops import native
from phasewise.ops.linear import Linear
from phasewise.ops.native import stack, weights
from phasewise.ops.native.abi import PlanesStruct
from phasewise.ops.native.stack import Stack, StackExperts, StackGate, StackLayer, StackShape, StackSpan, Turns
from phasewise.ops.native.weights import FORMS, PackedWeights
from tests.ops.targets import EACH

DIM = 16


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    for module in (native, weights, stack):
        monkeypatch.setattr(module, "library", lambda: kernels)
    return str(request.param)


def packed(weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> PackedWeights:
    return PackedWeights(weight.bfloat16(), bias, FORMS[int8])


def layer(
    mlp: tuple[PackedWeights, PackedWeights] | StackExperts, activation: str, table: Tensor, int8: bool = False
) -> Stack:
    """A layer without norms, of one head that holds nothing."""
    hidden = table.shape[1]
    attention = packed(torch.zeros(3 * DIM, hidden), int8=int8), packed(torch.zeros(hidden, DIM), int8=int8)
    only = StackLayer(attention, mlp, [None] * 4, None, False, StackGate(activation), None, None, 1.0, None)
    return Stack([only], StackShape(hidden, 1, 1, DIM), table)


def run(call: Stack, tokens: Sequence[int]) -> Tensor:
    """Every token by itself, all in one call. -> [T, d]"""
    count = len(tokens)
    x, rows = torch.empty((count, call.hidden), dtype=torch.bfloat16), torch.zeros((count, 2, 1, 1, DIM)).bfloat16()
    planes = [PlanesStruct(k=row[0], v=row[1], head=DIM) for row in rows]
    spans = [StackSpan(1, 1, None, plane.address) for plane in planes]
    call(array("q", [*tokens, *[0] * count]), Turns([]), spans, x)
    return x


def steps(x: Tensor) -> Tensor:
    """Numbers of bfloat16 in order: neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("activation", ACTIVATION)
@pytest.mark.parametrize("inner", [64, 37])
@pytest.mark.usefixtures("target")
def test_activations_are_right_to_the_last_bit_but_one(activation: str, inner: int) -> None:
    """Gates of all sizes that matter; an up of 1 or 3 everywhere."""
    gates = torch.cat([torch.logspace(-8, 1.2, 1200), torch.arange(0, 13, 1 / 128), torch.tensor([0.0, 30.0, 1e4])])
    gates = torch.cat([gates, -gates]).bfloat16()
    gates = torch.cat([gates, gates.new_zeros(-len(gates) % inner)]).view(-1, inner)
    table = torch.cat([gates, torch.zeros_like(gates)], 1)  # the gates, and where their activations go
    up = 3.0 if inner == 64 else 1.0
    one, none = torch.eye(inner), torch.zeros(inner, inner)
    both = torch.cat([torch.cat([one, none], 1), torch.cat([none, none], 1)])
    mlp = packed(both, torch.tensor([0.0, up]).repeat_interleave(inner)), packed(torch.cat([none, one]))
    got = run(layer(mlp, activation, table), range(len(table)))
    assert torch.equal(got[:, :inner], gates)
    exact = ACTIVATION[activation](gates.double()) * up
    if activation == "gelu":  # torch's own loses its digits far below zero
        exact = gates.double() * torch.special.erfc(-gates.double() / 2**0.5) / 2 * up
    if activation == "gelu_pytorch_tanh":
        inside = (2 / torch.pi) ** 0.5 * (gates.double() + 0.044715 * gates.double() ** 3)
        exact = gates.double() * torch.sigmoid(2 * inside) * up
    want, seen = exact.bfloat16(), exact.abs() > 1e-30
    assert (steps(got[:, inner:]) - steps(want)).abs()[seen].max() <= 1
    assert (got[:, inner:].double() - exact)[~seen].abs().max() <= 1e-30


class Loads:
    def __init__(self) -> None:
        self.seen = 0

    def count(self, counter: str, n: int) -> None:
        self.seen += n


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("experts,top,renormalise", [(5, 2, True), (8, 3, False), (4, 4, True), (3, 1, False)])
@pytest.mark.usefixtures("target")
def test_mixtures(experts: int, top: int, renormalise: bool, int8: bool) -> None:
    """The same experts are loaded, and rows are what the twin makes of them; bit for bit alone or beside others."""
    torch.manual_seed(experts)
    hidden, inner, tokens = 48, 37, 70
    precision = "int8" if int8 else "as stored"

    def linear(outputs: int, inputs: int, precision: str = precision) -> Linear:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        return Linear(weight.bfloat16(), precision=precision)

    parts = [MLP(linear(2 * inner, hidden), linear(hidden, inner), "silu") for _ in range(experts)]
    twin = MoE(linear(experts, hidden, "as stored"), tuple(parts), top, renormalise)
    both = [(part.gate_up.native, part.down.native) for part in parts]
    assert twin.router.native is not None
    known = [(one, two) for one, two in both if one is not None and two is not None]
    table = torch.randn(tokens, hidden).bfloat16()
    table[7:20] = table[3]  # rows alike
    call = layer(StackExperts(twin.router.native, known, top, renormalise), "silu", table, int8)
    for some in ([3], [5, 6], range(7), range(tokens)):
        loads = Loads()
        want = twin(table[list(some)], loads, table[list(some)])
        got = run(call, some)
        assert call.loaded() == loads.seen and call.loaded() == 0
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
        alone = torch.cat([run(call, [token]) for token in some])
        assert torch.equal(got, alone)
        call.loaded()


@pytest.mark.usefixtures("target")
def test_of_experts_that_are_alike_the_first_are_taken() -> None:
    torch.manual_seed(0)
    hidden, inner, table = 48, 16, torch.randn(9, 48).bfloat16()
    products = [(packed(torch.randn(2 * inner, hidden)), packed(torch.randn(hidden, inner))) for _ in range(6)]
    router = torch.zeros(6, hidden)
    call = layer(StackExperts(packed(router), products, 2, True), "silu", table)
    first = layer(StackExperts(packed(router[:2]), products[:2], 2, True), "silu", table)
    assert torch.equal(run(call, range(9)), run(first, range(9)))
    assert call.loaded() == 2


@pytest.mark.usefixtures("target")
def test_a_row_that_is_not_a_number_spoils_no_other() -> None:
    torch.manual_seed(0)
    hidden, inner, table = 48, 16, torch.randn(9, 48).bfloat16()
    products = [(packed(torch.randn(2 * inner, hidden)), packed(torch.randn(hidden, inner))) for _ in range(6)]
    call = layer(StackExperts(packed(torch.randn(6, hidden)), products, 2, True), "silu", table)
    before = run(call, range(9))
    table[4] = float("nan")
    after = run(call, range(9))
    assert after[4].isnan().all()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(after[kept], before[kept])


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("int8", [False, True])
def test_threads_change_nothing(int8: bool) -> None:
    torch.manual_seed(0)
    hidden, inner, table = 256, 130, torch.randn(70, 256).bfloat16()
    products = [
        (packed(torch.randn(2 * inner, hidden), int8=int8), packed(torch.randn(hidden, inner), int8=int8))
        for _ in range(8)
    ]
    mixture = StackExperts(packed(torch.randn(8, hidden)), products, 3, True)
    dense = packed(torch.randn(2 * inner, hidden), int8=int8), packed(torch.randn(hidden, inner), int8=int8)
    before = torch.get_num_threads()
    try:
        for mlp in (mixture, dense):
            results = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append([run(layer(mlp, "gelu", table, int8), some) for some in (range(70), range(8))])
            assert all(torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1]) for got in results)
            assert torch.equal(results[0][0][:8], results[0][1])
    finally:
        torch.set_num_threads(before)
