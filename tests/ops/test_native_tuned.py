"""Whole native steps in which some rows run with low-rank weights beside the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.lowrank import Delta, shapes
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.skip import Skip
from tests.model.families import FAMILIES
from tests.model.reference import save_random
from tests.watched import passes

LONG = [3 + i * 7 % 50 for i in range(200)]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


class Tunes(Skip):
    """skip: all layers run, with weights beside them."""

    def __init__(self, model: Model, seed: int, layers: Sequence[int], rank: int = 6) -> None:
        drawn = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(shape, generator=drawn) * (0.5 / shape[1]) ** 0.5
            for name, shape in shapes(model.config, layers, rank).items()
        }
        self.delta = Delta(tensors, torch.float32 if model.dtype == torch.float32 else torch.bfloat16, model.device)
        self.walk = tuple(range(model.config.layers))

    def rows(self, layer: int, span: Span, x: Tensor) -> None:
        """All."""


def phase(skip: Any) -> Phase:
    return Phase("decode", None, catalog.build("attend", "dense"), None, skip)  # type: ignore[arg-type]


class Runner:
    """Steps of requests, some of them tuned."""

    def __init__(self, model: Model, natively: bool, layers: Sequence[int]) -> None:
        self.model, self.stack = model, model.stack if natively else None
        self.store = Store(kv_shapes(model), Raw(), ledger=Ledger(64 << 20), counters=Counters())
        tunes = [Tunes(model, seed, layers) for seed in (1, 2)]
        self.phases = {0: phase(None), 1: phase(tunes[0]), 2: phase(tunes[0]), 3: phase(tunes[1])}
        self.held: dict[int, KV] = {}

    @torch.inference_mode()
    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        spans = {}
        for r, tokens in rows.items():
            kv = self.held.setdefault(r, self.store.open(Request([3], Params()), 1))
            n = kv.layers[0].n
            kv.reserve(len(tokens))
            spans[r] = Span(Request([3], Params()), kv, self.phases[r], tokens, range(n, n + len(tokens)))
        stack, self.model.stack = self.model.stack, self.stack
        try:
            x = forward(self.model, list(spans.values()), Counters()).x
        finally:
            self.model.stack = stack
        found = {r: x[span.slice].clone().float() for r, span in spans.items()}
        for span in spans.values():
            span.kv.commit(span.rows)
        return found


STEPS: list[dict[int, Sequence[int]]] = [
    {1: LONG[:90], 0: [5, 6], 2: LONG[:7], 3: [8]}, {2: [9], 1: LONG[90:170]}, {0: [4], 3: [5], 1: [6], 2: [7]}
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "qwen3_moe"])
def test_as_near_to_float32_as_the_open_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(FAMILIES[name](), tmp_path)
    half, full = (Model.load(tmp_path, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    layers = range(half.config.layers - 1)  # and one without
    runners = [Runner(half, True, layers), Runner(half, False, layers), Runner(full, False, layers)]
    plain, made = Runner(full, False, ()), passes(monkeypatch)
    away, tuned = list[tuple[float, float]](), list[float]()
    for rows in STEPS:
        ours, opened, wanted = (runner.step(rows) for runner in runners)
        without = plain.step(rows)
        for r, exact in wanted.items():
            away.append((far(ours[r], exact), far(opened[r], exact)))
            tuned.append(far(without[r], exact) if r else far(exact, without[r]) + 1)
    assert all(each.whole for each in made) and min(tuned) > 0.2
    if any(half.config.moe):  # of a few rows, rounding may send each to other experts
        assert sum(one for one, _ in away) < 1.5 * sum(other for _, other in away)
    else:
        assert all(one < 1.5 * other + 2e-3 for one, other in away)


def test_rows_depend_on_no_mates_and_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: in company or alone, and where a step is cut into calls."""
    save_random(FAMILIES["llama"](), tmp_path)
    model = Model.load(tmp_path, dtype=torch.bfloat16)
    layers = range(model.config.layers)
    together, alone, cut = (Runner(model, True, layers) for _ in range(3))
    for rows in STEPS:
        both, made = together.step(rows), passes(monkeypatch)
        single = {r: alone.step({r: tokens})[r] for r, tokens in rows.items()}
        with monkeypatch.context() as patch:
            patch.setattr("phasewise.step.fused.MOST", 66)
            pieces = cut.step(rows)
        assert all(each.whole for each in made)
        for r in rows:
            assert torch.equal(both[r], single[r]) and torch.equal(both[r], pieces[r])


def far(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())
