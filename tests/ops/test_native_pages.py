"""Spans that choose their pages within a whole step, against the same choice between two halves of each layer, on every
instruction set there is. What is listed and read there is held to its plain twins by test_native_listed.py."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.pages import By, PageKeys
from phasewise.methods.store.int8 import Int8
from phasewise.ops import native
from phasewise.ops.native import listed, stack, weights
from phasewise.ops.native.abi import LayerChoiceStruct, PlanesStruct, Structures
from phasewise.ops.native.choice import ALL, CHOSEN, PROMISE, Candidates, Chosen, Ways
from phasewise.ops.native.listed import Listed, Pages
from phasewise.ops.native.stack import Halves, PassBuffers, Stack, StackGate, StackLayer, StackShape, StackSpan, Turns
from phasewise.ops.native.weights import PackedWeights
from tests.ops.targets import EACH

HIDDEN, LAYERS, SCALE = 48, 3, 0.3


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    patch, kernels = pytest.MonkeyPatch(), native.load(request.param)
    native._share_threads(kernels)  # type: ignore[arg-type]
    for module in (native, weights, stack, listed):
        patch.setattr(module, "library", lambda: kernels)
    yield request.param
    patch.undo()


def model(heads: int, group: int, dim: int) -> Stack:
    """Layers of attention alone, in effect; embeddings for ten tokens."""
    generator = torch.Generator().manual_seed(dim)

    def packed(outputs: int, inputs: int, size: float) -> PackedWeights:
        return PackedWeights((torch.randn(outputs, inputs, generator=generator) * size).bfloat16(), None)

    qkv = heads * (group + 2) * dim
    layers = [
        StackLayer(
            (packed(qkv, HIDDEN, 0.3), packed(HIDDEN, heads * group * dim, 0.2)),
            (packed(32, HIDDEN, 0.2), packed(HIDDEN, 16, 0.2)),
            [None] * 4, None, False, StackGate("silu"), None, None, SCALE, None,
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    table = torch.randn(10, HIDDEN, generator=generator).bfloat16()
    return Stack(layers, StackShape(HIDDEN, heads * group, heads, dim), table)


@dataclass
class Held:
    """One request: committed rows in all layers, and how its next row chooses (`chosen` of the pages; dense below a
    layer), with room for the vectors of its pages. `sealed` of them are there."""

    kvs: list[LayerKV]
    n: int
    by: By
    size: int
    chosen: int
    dense: int
    keys: list[PageKeys] = field(default_factory=list)
    planes: Structures[PlanesStruct] = field(default_factory=lambda: Structures(PlanesStruct, []))
    ways: Structures[LayerChoiceStruct] = field(default_factory=lambda: Structures(LayerChoiceStruct, []))

    @property
    def pages(self) -> int:
        return self.n // self.size

    def span(self, choosing: bool, sealed: int) -> StackSpan:
        planes, table = list[PlanesStruct](), list[LayerChoiceStruct]()
        for layer, (kv, keys) in enumerate(zip(self.kvs, self.keys)):
            buffer = kv.slabs[0].buffer
            lies = PlanesStruct(head=buffer.cap * kv.shape.dim)
            if len(buffer.addresses) == 2:
                lies.k, lies.v = buffer.addresses
            else:
                lies.k, lies.k_scale, lies.v, lies.v_scale = buffer.addresses
                lies.scale_head = buffer.cap
            planes.append(lies)
            table.append(Ways.layer(keys.vectors, keys.sums, 0.0))
            table[-1].way = ALL if layer < self.dense else CHOSEN
        self.planes, self.ways = Structures(PlanesStruct, planes), Structures(LayerChoiceStruct, table)
        whole = StackSpan(self.n + 1, 1, None, self.planes.address)
        if not choosing:
            return whole
        among = Candidates(0, self.pages, self.size, self.chosen, PROMISE, False, 0, self.pages, step=self.size)
        among = among._replace(width=self.kvs[0].shape.dim)
        return whole._replace(choice=Chosen(among, sealed, Ways(self.ways), 0, lambda: None))


def held(
    seed: int, shape: tuple[int, int, int], format: RowFormat, n: int, by: By, size: int, chosen: int, dense: int
) -> Held:
    heads, _, dim = shape
    generator = torch.Generator().manual_seed(seed)
    kv_shape = KVShape(heads, dim, torch.bfloat16)
    kvs = [LayerKV(kv_shape, format, Ledger(1 << 30), n + 1) for _ in range(LAYERS)]
    one = Held(kvs, n, by, size, chosen, dense)
    for kv in kvs:
        k, v = (torch.randn(heads, n, dim, generator=generator).bfloat16() for _ in range(2))
        kv.append(k, v, range(n))
        kv.commit(n)
        (part,) = kv.read()
        one.keys.append(PageKeys.none(by, size, part.keys(0, 0)).roomy(one.pages + 1))
    return one


def whole(call: Stack, requests: Sequence[Held], sealed: int = 0) -> Tensor:
    x = torch.empty((len(requests), HIDDEN), dtype=torch.bfloat16)
    spans = [one.span(True, min(sealed, one.pages)) for one in requests]
    call(array("q", [*range(len(requests)), *[0] * len(requests)]), Turns([]), spans, x)
    return x


def in_halves(call: Stack, requests: Sequence[Held]) -> Tensor:
    """Queries are taken out of the middle of each layer, and what they read is put back there."""
    count, (heads_q, heads, dim) = len(requests), call.heads
    x, qkv, read, far = (torch.empty(size, dtype=torch.bfloat16) for size in (
        (count, HIDDEN), (count, heads_q + 2 * heads, dim), (count, heads_q, dim), (count, heads_q, dim)
    ))  # fmt: skip
    spans = [one.span(False, 0) for one in requests]
    halves = Halves(call, array("q", [*range(count), *[0] * count]), Turns([]), spans, PassBuffers(x, qkv, read, far))
    for layer in range(LAYERS):
        halves.upto(2 * layer + 1)
        queries, out = halves.between
        for i, one in enumerate(requests):
            if layer < one.dense:
                continue
            low, *high = one.keys[layer].known
            q, first = queries[i : i + 1], one.pages * one.size
            pages = Pages(q, low, high[0] if high else None, one.size, one.chosen, first, one.n + 1)
            [slots] = listed.choose([pages])
            planes = [plane[:, : one.n + 1] for plane in one.kvs[layer].slabs[0].buffer.planes]
            rows = (
                Listed(q, *planes, slots) if len(planes) == 2
                else Listed(q, planes[0], planes[2], slots, (planes[1], planes[3]))
            )  # fmt: skip
            out[i : i + 1] = listed.attend([rows], SCALE)[0]
            halves.done(i)
    halves.upto(2 * LAYERS)
    return x


def twins(requests: Sequence[Held]) -> None:
    """Vectors worked out by the plain twin."""
    for one in requests:
        for kv, keys in zip(one.kvs, one.keys):
            keys.upto = 0
            keys.fill(kv.read()[0], one.pages)


CASES: dict[str, tuple[tuple[int, int, int], RowFormat]] = {
    "one head": ((1, 1, 64), Raw()),
    "groups": ((3, 3, 64), Raw()),
    "odd": ((2, 2, 20), Raw()),
    "wide, int8": ((2, 4, 128), Int8().format()),
    "odd, int8": ((2, 3, 20), Int8().format()),
}


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("case", CASES)
def test_a_choice_within_a_step_is_one_between_halves(case: str) -> None:
    """Bit for bit, however many threads; and the vectors that the call adds are the twin's. Requests differ in length,
    size of pages, kind of vector and layers that read everything."""
    shape, format = CASES[case]
    call = model(*shape)
    requests = [
        held(1, shape, format, 700, "bounds", 16, 20, 1), held(2, shape, format, 331, "means", 5, 30, 0),
        held(3, shape, format, 100, "bounds", 1, 40, 2), held(4, shape, format, 64, "means", 16, 4, 0),
        held(5, shape, format, 33, "bounds", 16, 0, 0),
    ]  # fmt: skip
    twins(requests)
    want = in_halves(call, requests)
    known = [[keys.vectors.clone() for keys in one.keys] for one in requests]
    before = torch.get_num_threads()
    for threads, sealed in ((1, 0), (2, 3), (3, 1 << 30)):
        for one in requests:  # what was not there before the call is what it adds
            for keys in one.keys:
                keys.vectors[:, :, sealed:] = float("nan")
        try:
            torch.set_num_threads(threads)
            got = whole(call, requests, sealed)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(got, want)
        for one, vectors in zip(requests, known):
            for keys, wanted in list(zip(one.keys, vectors))[one.dense :]:
                assert torch.equal(keys.vectors[:, :, : one.pages], wanted[:, :, : one.pages])
                assert keys.vectors[:, :, one.pages :].isnan().all() or sealed > one.pages, "beyond what was asked for"
    alone = [whole(model(*shape), [one], 1 << 30) for one in requests[:1]]
    assert torch.equal(alone[0], want[:1])


@pytest.mark.usefixtures("target")
def test_all_pages_chosen_is_everything() -> None:
    """In another order of sums: near what a step without a choice reads."""
    shape = (2, 2, 64)
    call, one = model(*shape), held(7, shape, Raw(), 300, "bounds", 16, 18, 0)
    got = whole(call, [one])
    x = torch.empty((1, HIDDEN), dtype=torch.bfloat16)
    call(array("q", [0, 0]), Turns([]), [one.span(False, 0)], x)
    assert float((got - x).float().norm() / x.float().norm()) < 0.02


@pytest.mark.usefixtures("target")
def test_what_is_not_chosen_is_not_read() -> None:
    shape = (1, 2, 64)
    call, one = model(*shape), held(8, shape, Raw(), 200, "bounds", 10, 0, 0)
    want = whole(call, [one])
    for kv in one.kvs:
        for plane in kv.slabs[0].buffer.planes:
            plane[:, : one.n] = float("nan")
    assert torch.equal(whole(call, [one], 1 << 30), want) and want.isfinite().all()
