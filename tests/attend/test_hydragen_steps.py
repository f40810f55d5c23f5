"""Steps of a model under attend.hydragen: the traffic model on the counter, and not a bit but dense attention's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Sharing, Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.hydragen import Hydragen
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from tests import tiny
from tests.kv.harness import mixed, sliding

SHARED, OTHER = tiny.prompts(200, 150, seed=3)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.ops.native.spans.library", lambda: None)


class Party:
    """Requests with one store, stepped together by hand; a prompt is remembered when it is complete."""

    def __init__(self, model: Model, attend: Any, format: RowFormat | None = None) -> None:
        self.model, self.counters = model, Counters()
        self.phase = Phase("decode", None, attend)  # type: ignore[arg-type]
        self.store = Store(
            kv_shapes(model), format or Raw(), ledger=Ledger(1 << 40), counters=self.counters, sharing=Sharing("one")
        )
        self.requests: list[Request] = []

    def join(self, prompt: Sequence[int]) -> None:
        """A request whose prompt is computed alone, as far as it was not before."""
        request = Request(prompt, Params(max_tokens=1 << 20))
        request.kv = self.store.open(request, len(prompt) + 200)
        self.requests.append(request)
        at = len(self.requests) - 1
        self.step({at: list(prompt[request.computed :])})
        self.store.remember(request)

    @torch.inference_mode()
    def step(self, rows: dict[int, list[int]]) -> Tensor:
        """{request: tokens} -> logits [T, V], all of them committed."""
        spans = []
        for r, tokens in rows.items():
            request, kv = self.requests[r], self.kv(r)
            kv.reserve(len(tokens))
            spans.append(Span(request, kv, self.phase, tokens, range(request.computed, request.computed + len(tokens))))
        x = forward(self.model, spans, self.counters).x
        for span in spans:
            span.kv.commit(span.rows)
            span.request.computed += span.rows
        return self.model.head(x)

    def kv(self, r: int) -> KV:
        kv = self.requests[r].kv
        assert kv is not None
        return kv

    def read(self, rows: dict[int, list[int]]) -> int:
        """(row, layer) pairs of KV that a step reads."""
        before = self.counters.kv_bytes_read
        self.step(rows)
        return (self.counters.kv_bytes_read - before) // (self.store.row_bytes // len(self.store.shapes))


def half(**options: Any) -> Model:
    return Model.load(tiny.checkpoint(**options), dtype=torch.bfloat16)


MODELS: dict[str, Callable[[], Model]] = {"float32": tiny.model, "bfloat16": half}
PROMPTS = [SHARED + tiny.prompts(n, seed=5)[0] for n in (9, 30, 1)] + [SHARED[:130] + OTHER[:50], OTHER, [*OTHER, 7]]
ONE = {i: [5 + i] for i in range(6)}
FEW = {0: [4, 5, 6], 1: [7], 2: [8] * 12, 3: [9, 3], 4: [11], 5: [12] * 16}


def party(model: str, attend: Any) -> Party:
    made = Party(MODELS[model](), attend)
    for prompt in PROMPTS:
        made.join(prompt)
    return made


@pytest.mark.parametrize("model", MODELS)
def test_rows_read_are_the_traffic_model(model: str) -> None:
    """P + sum S instead of B P + sum S, level by level: 128 rows of four requests, 64 more of three, 128 of two."""
    layers = tiny.model().config.layers
    for rows in (ONE, FEW):
        dense, shared = party(model, Dense()), party(model, Hydragen())
        whole = sum(len(prompt) + len(rows[i]) for i, prompt in enumerate(PROMPTS))
        assert dense.read(rows) == whole * layers
        assert shared.read(rows) == (whole - 3 * 128 - 2 * 64 - 1 * 128) * layers
        assert shared.read({0: [5]}) == (len(PROMPTS[0]) + len(rows[0]) + 1) * layers  # nobody to share with
        assert shared.read({1: [5], 4: [6]}) == dense.read({1: [5], 4: [6]})  # nothing to share


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round otherwise")
@pytest.mark.parametrize("model", MODELS)
def test_natively_not_a_bit_differs_from_dense(model: str) -> None:
    dense, shared = party(model, Dense()), party(model, Hydragen())
    for rows in (ONE, FEW, ONE, {5: [3], 0: [4], 4: [9], 2: [8]}):
        assert torch.equal(shared.step(rows), dense.step(rows))


@pytest.mark.parametrize("model", MODELS)
def test_without_native_kernels_only_roundings_differ(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch)
    dense, shared = party(model, Dense()), party(model, Hydragen())
    dense.model.stack = shared.model.stack = None
    for rows in (ONE, FEW):
        got, want = shared.step(rows), dense.step(rows)
        assert float((got - want).norm() / want.norm()) < (1e-5 if model == "float32" else 0.03)


def test_who_computed_a_prompt_shares_it_too_and_whole_blocks_only() -> None:
    made = Party(tiny.model(), Hydragen())
    made.join(SHARED)
    made.join(SHARED[:127] + OTHER[:60])  # 96 rows of whole nodes, of which 64 are whole blocks of the kernel
    assert [len(request.kv.nodes) for request in made.requests] == [6, 5]  # type: ignore[union-attr]
    assert made.counters.prefix_hits == 96
    layers = tiny.model().config.layers
    assert made.read({0: [5], 1: [6]}) == (201 + 188 - 64) * layers
    finer = Party(tiny.model(), Hydragen(rows=32))
    finer.join(SHARED)
    finer.join(SHARED[:127] + OTHER[:60])
    assert finer.read({0: [5], 1: [6]}) == (201 + 188 - 96) * layers


def test_long_slices_read_alone() -> None:
    made = party("float32", Hydragen())
    layers = tiny.model().config.layers
    rows = {0: [5] * 70, 1: [6], 2: [7]}
    whole = sum(len(PROMPTS[i]) + len(tokens) for i, tokens in rows.items())
    assert made.read(rows) == (whole - 192) * layers  # the other two share


@pytest.mark.parametrize("name", ["sliding", "mixed", "softcap"])
def test_layers_of_other_kinds(name: str) -> None:
    """Where a window has begun to move nothing is shared; scores may be capped."""
    if name == "sliding":
        model, sharing = sliding(150, 4), 0
    elif name == "mixed":
        model, sharing = mixed(150), 2
    else:
        model, sharing = Model.load(tiny.checkpoint()), 4
        model.config = replace(model.config, attention=[replace(s, softcap=5.0) for s in model.config.attention])
    logits, read = [], []
    for attend in (Dense(), Hydragen()):
        made = Party(model, attend)
        for prompt in PROMPTS[:3]:
            made.join(prompt)
        before = made.counters.kv_bytes_read
        logits.append(torch.cat([made.step({0: [4], 1: [5, 6, 7], 2: [8]}), made.step({2: [3], 0: [9]})]))
        read.append(made.counters.kv_bytes_read - before)
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
    of_row = 2 * 2 * tiny.model().config.head_dim * 4
    assert read[0] - read[1] == sharing * (2 * 192 + 192) * of_row
