"""KV heads that lie by themselves, some seeing sinks and a window, in the native kernel against their plain twin, for
every instruction set of this machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import attention, native
from phasewise.ops.native import fit, spans
from phasewise.ops.native.abi import HeadStruct, PrefillCallStruct, SightStruct, Structures
from phasewise.ops.native.spans import Few, SeenWindow
from phasewise.step.span import ancestors, depths
from tests import seeds
from tests.ops.targets import EACH, NATIVE, alike, drawn, running

KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(8, 4, 64), (14, 2, 64), (6, 3, 20), (32, 2, 128), (2, 2, 256)]  # heads_q, heads, dim
SIZES = [(1, 1), (1, 65), (1, 300), (1, 2500), (5, 70), (16, 1030), (7, 2050), (40, 400)]  # rows, slots


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    monkeypatch.setattr(spans, "library", lambda: kernels)
    return str(request.param)


@dataclass
class Lying:
    """Queries [R, Hq, D] and heads of n slots, of which each has those from its `begin` on, amid rows of NaN; so many
    of them are sinks of those with a window."""

    q: Tensor
    n: int
    begins: list[int]
    windows: list[int]
    sinks: list[int]
    k: Tensor  # [H, n, D], whatever there is
    v: Tensor
    rounded: bool = False
    sees: Tensor | None = None
    seats: Tensor | None = None

    def lie(self) -> tuple[Structures[HeadStruct], list[Tensor], list[Tensor]]:
        """Where each lies, rows as they are kept, and what must outlive a call."""
        n, structs, kept, format = self.n, list[HeadStruct](), list[Tensor](), Int8().format()
        planes = list(format.encode(self.k, self.v) if self.rounded else (self.k, self.v))
        for h, begin in enumerate(self.begins):
            lie = []
            for plane in planes:
                room = torch.full((n - begin + 9, *plane.shape[2:]), 99).to(plane.dtype)
                room = room if plane.dtype == torch.int8 else room * float("nan")
                room[4 : 4 + n - begin] = plane[h, begin:]
                kept.append(room)
                lie.append(room.data_ptr() + (4 - begin) * room.stride(0) * room.element_size())
            k, k_scale, v, v_scale = lie if self.rounded else (lie[0], 0, lie[1], 0)
            struct = HeadStruct(k=k, v=v, k_scale=k_scale, v_scale=v_scale, begin=begin)
            struct.window, struct.sinks = self.windows[h], self.sinks[h]
            structs.append(struct)
        return Structures(HeadStruct, structs), planes, kept

    def few(self) -> tuple[Few, object]:
        """And what it must not outlive."""
        words, planes, kept = self.lie()
        seen = None if self.seats is None else SeenWindow(0, seats=self.seats)
        scales = (planes[1], planes[3]) if self.rounded else None
        k, v = (planes[0], planes[2]) if self.rounded else (self.k, self.v)
        return Few(self.q, k, v, self.sees, 0, scales, seen, heads=words.address), (words, planes, kept)

    def slice(self, kernels: Any) -> Tensor:
        """As a slice of a prompt reads it."""
        (rows, heads_q, dim), (words, planes, kept) = self.q.shape, self.lie()
        out = torch.empty((rows, heads_q, dim), dtype=self.q.dtype)
        rounded = int(self.rounded)  # whether there are scales; where they are, the heads say
        call = PrefillCallStruct(
            q=self.q, out=out, q_row=self.q.stride(0), q_head=self.q.stride(1), k_row=dim, v_row=dim, n=self.n,
            rows=rows, heads_q=heads_q, heads=len(self.begins), dim=dim, kind=fit.KIND[self.q.dtype], threads=2,
            scale=0.2, k_scale=rounded, v_scale=rounded, sight=SightStruct(block=1), unequal=words,
        )  # fmt: skip
        kernels.prefill(call.address)
        assert planes and kept, "alive until now"
        return out

    def mask(self) -> Tensor:
        """By the book: bool [H, R, n]."""
        rows, slots = self.q.shape[0], torch.arange(self.n)
        own = torch.ones(rows, rows).tril().bool() if self.sees is None else self.sees
        below = torch.cat((torch.ones(rows, self.n - rows).bool(), own), 1)
        seats = torch.arange(self.n - rows, self.n) if self.seats is None else self.seats
        found = []
        for begin, window, sinks in zip(self.begins, self.windows, self.sinks):
            near = (slots < begin + sinks) | (slots > seats[:, None] - window)
            found.append(below & (slots >= begin) & (near if window else True))
        return torch.stack(found)

    def rows(self, first: int, last: int) -> Lying:
        """Some rows, as if they had come alone."""
        n = self.n - self.q.shape[0] + last
        return replace(self, q=self.q[first:last], n=n, k=self.k[:, :n], v=self.v[:, :n])


def made(shape: tuple[int, int, int], rows: int, n: int, kind: torch.dtype, draw: random.Random) -> Lying:
    heads_q, heads, dim = shape
    q = torch.randn(rows, heads_q + 2 * heads, dim).to(kind)[:, :heads_q]
    k, v = (torch.randn(heads, n, dim).to(kind) for _ in range(2))
    before = n - rows
    begins, windows, sinks = [], [], []
    for _ in range(heads):
        windows.append(draw.choice([0, draw.randint(1, 12), draw.randint(30, 90), draw.randint(1, 2000)]))
        begins.append(draw.choice([0, draw.randint(0, before)]))
        there = before - begins[-1]
        sinks.append(draw.choice([0, draw.randint(0, min(20, there)), draw.randint(0, there)]))
        if draw.random() < 0.5:  # sinks, some rows that wait to be dropped, a window
            sinks[-1] = min(draw.randint(0, 20), before)
            begins[-1] = max(0, before + 1 - windows[-1] - draw.randint(0, 31) - sinks[-1])
            sinks[-1] = min(sinks[-1], before - begins[-1])
    return Lying(q, n, begins, windows, sinks, k, v)


def tree(lying: Lying) -> Lying:
    """Its rows as a tree whose depth no window is shorter than."""
    rows = lying.q.shape[0]
    parents = [-1, *((i - 1) // 2 for i in range(1, rows))]
    seats = torch.tensor(depths(parents)) + lying.n - rows
    windows = [window and max(window, max(depths(parents)) + 1) for window in lying.windows]
    return replace(lying, sees=ancestors(parents), seats=seats, windows=windows)


def read(batch: list[Lying], softcap: float | None = None) -> Tensor:
    given = [lying.few() for lying in batch]
    return spans.attend([few for few, _ in given], 0.2, softcap=softcap)[0]


@pytest.mark.parametrize(("number", "sets"), drawn(4))
@NATIVE
def test_equals_the_twin(number: int, sets: list[str]) -> None:
    """Single rows, several and trees, from one slot to more than a part; nothing that no row sees is read."""
    draw, kind, rounded = seeds.draw("heads", number), KINDS[number % 2], number // 2 % 2 == 1
    shape = draw.choice(SHAPES)
    torch.manual_seed(draw.getrandbits(32))
    for _ in range(2):
        batch = [replace(made(shape, *size, kind, draw), rounded=rounded) for size in SIZES]
        batch += [tree(made(shape, 9, n, kind, draw)) for n in (9, 200, 1500)]
        cap = draw.choice([None, 5.0])
        wants, tolerance = [twin(lying, kind, cap) for lying in batch], 2e-2 if kind == torch.bfloat16 else 1e-5
        for target in sets:
            with running(target, spans):
                for mine, want in zip(read(batch, cap).split([len(want) for want in wants]), wants, strict=True):
                    atol = tolerance * float(want.abs().max())
                    torch.testing.assert_close(mine.float(), want, rtol=tolerance, atol=atol)


def twin(lying: Lying, kind: torch.dtype, cap: float | None = None) -> Tensor:
    k, v = lying.k, lying.v
    if lying.rounded:
        k, v = Int8().format().decode(Int8().format().encode(k, v), kind)
    return attention.reference(lying.q.float(), k.float(), v.float(), lying.mask(), 0.2, cap)[0]


@pytest.mark.parametrize(("kind", "rounded"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.usefixtures("target")
def test_rows_depend_on_nothing_else(kind: torch.dtype, rounded: bool) -> None:
    """Bit for bit: alone or in company, and row by row or as one span."""
    draw = seeds.draw("heads in company", kind)
    torch.manual_seed(draw.getrandbits(32))
    sizes = SIZES + [(draw.randint(2, 5), draw.randint(50, 300)) for _ in range(60)]
    batch = [replace(made((6, 2, 64), *size, kind, draw), rounded=rounded) for size in sizes]
    together, at = read(batch), 0
    for lying in batch:
        rows = lying.q.shape[0]
        alone = read([lying])
        assert torch.equal(alone, together[at : at + rows])
        for i in range(rows):
            assert torch.equal(read([lying.rows(i, i + 1)]), alone[i : i + 1])
        at += rows


@pytest.mark.parametrize(("number", "sets"), drawn(4))
@NATIVE
def test_slices_of_prompts(number: int, sets: list[str]) -> None:
    """As the twin has them; what a row reads is the same bit for bit however they are cut."""
    draw, kind, rounded = seeds.draw("heads in slices", number), KINDS[number % 2], number // 2 % 2 == 1
    shape = draw.choice(SHAPES)
    torch.manual_seed(draw.getrandbits(32))
    for rows, n in [
        (1, 1),
        (2, 300),
        (65, 65),
        (97, 1000) if number % 2 else (300, 611),
        (draw.randint(1, 99), 300),
    ]:
        lying = replace(made(shape, rows, n, kind, draw), rounded=rounded)
        want, tolerance = twin(lying, kind), 2e-2 if kind == torch.bfloat16 else 1e-5
        for target in sets:
            kernels, at = native.load(target), 0
            got = lying.slice(kernels)
            torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
            with running(target, spans):
                assert kind == torch.float32 or not alike(target) or torch.equal(read([lying]), got), target
            while at < rows:
                own = min(draw.randint(1, 80), rows - at)
                assert torch.equal(lying.rows(at, at + own).slice(kernels), got[at : at + own]), target
                at += own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("target")
def test_heads_that_hold_and_see_all_are_read_as_any(kind: torch.dtype) -> None:
    """Bit for bit, wherever they lie."""
    torch.manual_seed(0)
    for rows, n in SIZES:
        lying = made((6, 2, 64), rows, n, kind, random.Random(n))
        lying.begins, lying.windows = [0, 0], [0, 0]
        assert torch.equal(read([lying]), spans.attend([Few(lying.q, lying.k, lying.v)], 0.2)[0])
        lying.windows, lying.sinks = [37, 37], [3, 3]
        same = Few(lying.q, lying.k, lying.v, seen=SeenWindow(37, 3))
        assert torch.equal(read([lying]), spans.attend([same], 0.2)[0])
