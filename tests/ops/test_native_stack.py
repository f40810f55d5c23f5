"""A whole step in one native call against the open path, and both against the same model in float32 (DESIGN law 14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.methods.store.int8 import Int8
from phasewise.model.families import FAMILIES as KNOWN
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.stack import SLICE
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step import fused
from phasewise.step.forward import forward
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span, ancestors, depths
from tests import tiny
from tests.model.families import FAMILIES, WITHOUT_CLASS
from tests.model.reference import save_random
from tests.watched import passes

TREE = [-1, 0, 0, 1, 1, 2]
PLAIN = Phase("decode", None, catalog.build("attend", "dense"), None, None)  # type: ignore[arg-type]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("families")
    for name, make in FAMILIES.items():
        save_random(make(), root / name)
    yield {name: root / name for name in FAMILIES}


class Runner:
    """Steps of a few requests over one model, with or without the stack."""

    def __init__(self, model: Model, *, stack: bool = False, format: RowFormat | None = None) -> None:
        self.model, self.stack = model, model.stack if stack else None
        self.counters = Counters()
        self.store = Store(kv_shapes(model), format or Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.held: dict[int, KV] = {}

    @torch.inference_mode()
    def step(self, rows: dict[int, Sequence[int]], tree: bool = False) -> Tensor:
        """{request: tokens} -> logits [T, V]; all rows are committed, of a tree only its first path."""
        spans = []
        for r, tokens in rows.items():
            kv = self.held.setdefault(r, self.store.open(Request([3], Params()), 1))
            n = kv.layers[0].n
            kv.reserve(len(tokens))
            at = [n + d for d in depths(TREE)] if tree else range(n, n + len(tokens))
            spans.append(Span(Request([3], Params()), kv, PLAIN, tokens, at, ancestors(TREE) if tree else None))
        kept, self.model.stack = self.model.stack, self.stack
        try:
            x = forward(self.model, spans, self.counters).x
        finally:
            self.model.stack = kept
        for span in spans:
            span.kv.commit([0, 1, 3] if tree else span.rows)
        return self.model.head(x)


def far(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def far_by_row(got: Tensor, exact: Tensor) -> float:
    """Of the row in the middle: where two experts are nearly alike to a router, rounding decides between them."""
    return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).median())


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-mha-wide-heads", "mistral-sliding"])
def test_int8_kv(name: str, directories: dict[str, Path]) -> None:
    """Rows are rounded as the format rounds them, and read as the open path reads them."""
    model, format = Model.load(directories[name], dtype=torch.bfloat16), Int8().format()
    steps: list[dict[int, list[int]]] = [{0: [5, 6, 7, 8], 1: [3]}, {0: [9], 1: [4, 5]}, {0: [2], 1: [7]}]
    raw, rounded = Runner(model, stack=True), Runner(model, stack=True, format=format)
    raw.step(steps[0])
    rounded.step(steps[0])
    for r in (0, 1):
        layer, wanted = rounded.held[r].layers[0].slabs[0], raw.held[r].layers[0].slabs[0]
        exact = format.encode(*(plane[:, : wanted.n] for plane in wanted.buffer.planes))
        assert all(torch.equal(p[:, : layer.n], e) for p, e in zip(layer.buffer.planes, exact, strict=True))
    opened = Runner(model, format=format)
    full = Runner(Model.load(directories[name], dtype=torch.float32))
    opened.step(steps[0])
    full.step(steps[0])
    for rows in steps[1:]:
        got, plain, want = rounded.step(rows), opened.step(rows), full.step(rows)
        assert far(got, want) < 1.5 * far(plain, want) + 1e-3
    same = ("row_layers", "kv_bytes_read", "kv_bytes_written")
    assert [getattr(rounded.counters, n) for n in same] == [getattr(opened.counters, n) for n in same]
    assert rounded.held[0].flat() is not None, "the native step was not taken"


@pytest.mark.parametrize("name", ["llama-biased-tied", "gemma2", "gemma3", "olmo2", "qwen3_moe"])
def test_int8(name: str, directories: dict[str, Path]) -> None:
    """Weights rounded to int8: the stack and the open path round the same, and the model stays near float32."""
    rounded, exact = (Model.load(directories[name], dtype=dtype) for dtype in (torch.int8, torch.float32))
    assert rounded.stack is not None and (rounded.table is None) == rounded.config.tied
    assert rounded.weight_bytes < (0.35 if rounded.config.tied else 0.4) * exact.weight_bytes
    away = far_by_row if any(rounded.config.moe) else far
    runners = [Runner(rounded, stack=True), Runner(rounded), Runner(exact)]
    for rows in ({0: range(3, 23), 1: range(9, 12)}, {0: [5], 1: [6]}):
        fused, opened, wanted = (runner.step(rows) for runner in runners)
        assert away(fused, opened) < 0.05 and away(fused, wanted) < 1.5 * away(opened, wanted) + 1e-3 < 0.2


@pytest.mark.parametrize("name", FAMILIES)
def test_no_further_from_float32_than_the_open_path(name: str, directories: dict[str, Path]) -> None:
    half, exact = (Model.load(directories[name], dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half.stack is not None and exact.stack is None
    runners = [Runner(half, stack=True), Runner(half), Runner(exact)]
    steps = [{0: range(3, 23), 1: range(9, 12)}, {0: [5]}, {0: [6], 1: [7], 2: [8]}]
    steps.append({2: range(3, 33), 1: [4, 5, 6], 0: [9]})
    found = [tuple(runner.step(rows) for runner in runners) for rows in steps]
    found.append(tuple(runner.step({0: [5, 6, 7, 8, 9, 10], 2: [8] * 6}, tree=True) for runner in runners))
    found.append(tuple(runner.step({0: [5], 2: [9]}) for runner in runners))
    if any(half.config.moe):  # rows of all steps together: of a few, rounding may send each to other experts
        fused, opened, wanted = (torch.cat(each) for each in zip(*found, strict=True))
        assert far_by_row(fused, wanted) < 1.5 * far_by_row(opened, wanted) + 1e-3
    else:
        for fused, opened, wanted in found:
            assert far(fused, wanted) < 1.5 * far(opened, wanted) + 1e-3
    whole, parts, _ = (runner.counters for runner in runners)
    for counter in ("row_layers", "kv_bytes_read", "kv_bytes_written"):
        assert getattr(whole, counter) == getattr(parts, counter), counter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_every_family_is_native(dtype: torch.dtype, directories: dict[str, Path]) -> None:
    seen = set()
    for directory in directories.values():
        model = Model.load(directory, dtype=dtype)
        assert model.stack is not None, directory.name
        seen.add(model.config.family)
    assert seen == set(KNOWN) - WITHOUT_CLASS, "a family without a configuration in tests/model/families.py"


@pytest.mark.parametrize("name", ["llama", "qwen3-sliding", "gemma2", "olmo2", "mixtral", "qwen3_moe"])
def test_rows_depend_on_nothing_else(name: str, directories: dict[str, Path]) -> None:
    """Bit for bit: in company or alone, in one span or row by row."""
    model = Model.load(directories[name], dtype=torch.bfloat16)
    together, alone = Runner(model, stack=True), Runner(model, stack=True)
    first = together.step({0: range(3, 20), 1: range(5, 9)})
    second = together.step({0: [7], 1: [8, 9, 10]})
    one = torch.cat([alone.step({0: [token]}) for token in range(3, 20)])
    other = alone.step({1: range(5, 9)})
    assert torch.equal(torch.cat((one, other)), first)
    rest = [alone.step({1: [8]}), alone.step({0: [7]}), alone.step({1: [9]}), alone.step({1: [10]})]
    assert torch.equal(torch.cat([rest[1], rest[0], *rest[2:]]), second)


@pytest.mark.parametrize("format", [Raw(), Int8().format()], ids=["raw", "int8"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-mha-wide-heads", "qwen3", "phi3-partial-longrope", "olmo2", "qwen3_moe"]
)
def test_slices_of_prompts(
    name: str, format: RowFormat, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than attention of few takes, first and later slices, beside decodes and one another: as near to float32
    as the open path is, with KV that later rows read."""
    model = Model.load(directories[name], dtype=torch.bfloat16)
    made = passes(monkeypatch)
    native_, opened = Runner(model, stack=True, format=format), Runner(model, format=format)
    exact = Runner(Model.load(directories[name], dtype=torch.float32))
    long = [3 + i * 7 % 50 for i in range(200)]
    steps: list[dict[int, Sequence[int]]] = [
        {0: long[:SLICE + 1], 1: [5, 6]}, {1: [7], 0: long[65:150], 2: long[100:]}, {0: [9], 1: [8], 2: [4]}
    ]  # fmt: skip
    away = far_by_row if any(model.config.moe) else far
    for rows in steps:
        got, plain, want = native_.step(rows), opened.step(rows), exact.step(rows)
        assert away(got, want) < 1.5 * away(plain, want) + 1e-3
    assert [each.rows for each in made if each.whole] == [sum(map(len, rows.values())) for rows in steps]
    for counter in ("row_layers", "kv_bytes_read", "kv_bytes_written"):
        assert getattr(native_.counters, counter) == getattr(opened.counters, counter), counter


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3-sliding"])
def test_slices_longer_than_a_window(name: str, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    half, full = (Model.load(directories[name], dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    runners = [Runner(half, stack=True), Runner(half), Runner(full)]
    long = [3 + i * 7 % 50 for i in range(300)]
    steps: list[dict[int, Sequence[int]]] = [{0: long[:150], 1: [5]}, {0: [9], 1: [6]}, {1: long, 0: long[:80]}]
    for rows in steps:
        fused, opened, wanted = (runner.step(rows) for runner in runners)
        assert far(fused, wanted) < 1.5 * far(opened, wanted) + 1e-3
    assert [each.rows for each in made if each.whole] == [151, 2, 380], "a step was no native call"


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_tokens_without_an_embedding(token: int) -> None:
    runner = Runner(Model.load(tiny.checkpoint(), dtype=torch.bfloat16), stack=True)
    with pytest.raises(IndexError, match=str(token)):
        runner.step({0: [5, token]})
    assert runner.step({0: [5, 6]}).isfinite().all()


def test_taps_are_copied_out_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stops, and nobody's rows change by a bit; in float32 the open path gives the taps."""
    half, exact = (Model.load(tiny.checkpoint(), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    made, tokens = passes(monkeypatch), [5, 6, 7]

    def tapped(model: Model, taps: set[int]) -> Hidden:
        runner = Runner(model)
        kv = runner.store.open(Request([3], Params()), 8)
        with torch.inference_mode():
            return forward(model, [Span(Request([3], Params()), kv, PLAIN, tokens, range(3))], runner.counters, taps)

    hidden, plain, open_ = tapped(half, {1, 3}), tapped(half, set()), tapped(exact, {1, 3})
    assert [each.stops for each in made] == [[4, 8], [8]] and half.config.layers == 4
    assert torch.equal(hidden.x, plain.x) and torch.equal(hidden.taps[3], plain.x)
    assert set(hidden.taps) == set(open_.taps) and all(far(hidden.taps[i], open_.taps[i]) < 0.02 for i in (1, 3))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-unnormalised"])
def test_experts_are_counted_once_per_forward(
    name: str, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many native calls a forward takes; and no more than there are."""
    model = Model.load(directories[name], dtype=torch.bfloat16)
    whole, cut = Runner(model, stack=True), Runner(model, stack=True)
    steps: list[dict[int, Sequence[int]]] = [{0: [3 + i * 7 % 50 for i in range(200)], 1: [5, 6]}, {0: [9]}, {1: [8]}]
    most = sum(spec.experts for spec in model.config.moe if spec is not None)
    chosen = sum(spec.top_k for spec in model.config.moe if spec is not None)
    for rows in steps:
        before = whole.counters.expert_loads
        whole.step(rows)
        loads = whole.counters.expert_loads - before
        assert chosen <= loads <= most if sum(map(len, rows.values())) > 1 else loads == chosen
    monkeypatch.setattr(fused, "MOST", 66)
    made = passes(monkeypatch)
    for rows in steps:
        cut.step(rows)
    assert len(made) > len(steps) and cut.counters.expert_loads == whole.counters.expert_loads
