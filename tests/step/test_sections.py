"""Spans that run different layers share each layer that they both run, and no bit of either changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.kv.layer_kv import LayerKV
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.step.forward import forward
from phasewise.step.fused import _sections
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.skip import Skip
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
LAYERS = 6


def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64, layers=LAYERS), dtype=torch.bfloat16)


class Some(Skip):
    """skip: the rows after the prompt run these layers."""

    def __init__(self, *layers: int) -> None:
        self.walk = layers

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return None if layer in self.walk else torch.empty(0, dtype=torch.int64)


def begun(of: Model) -> list[Walk]:
    """Requests of several sets of layers, with a bias, an attention window, unequal heads and low-rank weights."""
    host = Host(of, None, Counters(), None, None)  # type: ignore[arg-type]

    def bound(verb: str, text: str) -> Any:
        return catalog.build(verb, text).bind(host)

    bias, window = bound("attend", "zero_tuning:gamma=20,weights=none"), "streaming:sinks=3,window=25"
    methods: list[dict[str, Any]] = [
        {}, {"skip": Some(0, 2, 3, 5)}, {"skip": Some(0, 5)}, {"skip": Some(1, 2), "attend": bias}, {"attend": bias},
        {"skip": Some(0, 3, 4, 5), "evict": bound("evict", window)},
        {"evict": bound("evict", "snapkv:keep=0.5,window=5,heads=ada")},
        {"skip": bound("skip", "unified:speedup=2.0,weights=random:0")},
    ]  # fmt: skip
    walks = []
    for seed, given in enumerate(methods):
        (prompt,) = tiny.prompts(30 + 3 * seed, seed=seed)
        walks.append(Walk(of, prompt, **given))
        walks[-1].feed(prompt)
    return walks


@torch.inference_mode()
def step(of: Model, walks: Sequence[Walk], counters: Counters) -> list[Tensor]:
    spans = [one.begin([5 + i] * (1 + i % 2)) for i, one in enumerate(walks)]
    x = forward(of, spans, counters).x
    found = [x[span.slice].clone() for span in spans]
    for i, one in enumerate(walks):
        one.commit([5 + i] * (1 + i % 2), 1 + i % 2)
    return found


def test_sections_are_the_layers_of_the_same_spans() -> None:
    walks: list[Any] = [None, (0, 2, 3, 5), (0, 5)]
    spans: list[Any] = [type("Given", (), {"walk": walk}) for walk in walks]
    assert _sections(spans, 6) == [((0,), [0, 1, 2]), ((1,), [0]), ((2, 3), [0, 1]), ((4,), [0]), ((5,), [0, 1, 2])]
    assert _sections(spans[1:], 6) == [((0,), [0, 1]), ((2, 3), [0]), ((5,), [0, 1])]


def _kept(layer: LayerKV) -> list[Tensor]:
    return [plane for part in layer.read() for plane in (part.k, part.v)]


def test_rows_keys_and_values_are_those_of_each_span_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of = model()
    together, alone = begun(of), begun(of)
    made, counters, single = passes(monkeypatch), Counters(), Counters()
    for number in range(5):
        made.clear()
        before = counters.forwards
        rows = step(of, together, counters)
        assert counters.forwards == before + 1
        layers = sum(each.rows * each.layers for each in made)
        for i, one in enumerate(alone):
            (mine,) = step_one(of, one, i, single)
            assert torch.equal(mine, rows[i]), f"span {i} in step {number}"
        assert layers == sum((1 + i % 2) * len(one.span.walk or range(LAYERS)) for i, one in enumerate(together))
    for one, other in zip(together, alone):
        for mine, theirs in zip(one.kv.layers, other.kv.layers):
            assert all(torch.equal(a, b) for a, b in zip(_kept(mine), _kept(theirs), strict=True))
    assert counters.row_layers == single.row_layers and counters.kv_bytes_written == single.kv_bytes_written
    assert counters.kv_bytes_read == single.kv_bytes_read


@torch.inference_mode()
def step_one(of: Model, one: Walk, i: int, counters: Counters) -> list[Tensor]:
    span = one.begin([5 + i] * (1 + i % 2))
    x = forward(of, [span], counters).x.clone()
    one.commit([5 + i] * (1 + i % 2), 1 + i % 2)
    return [x]
