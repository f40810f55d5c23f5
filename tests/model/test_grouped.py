"""Layers in groups: against a twin written out by hand, and what really waits for what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.grouped import GroupedModel, grouped
from phasewise.model.model import Model
from phasewise.model.norm import RMSNorm
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.span import Span
from tests import tiny, uncached

TOKENS = tiny.prompts(13)[0]
LAYERS = 6


@pytest.fixture(autouse=True)
def no_autograd() -> Iterator[None]:
    with torch.inference_mode():
        yield


def served(model: Model, tokens: Sequence[int], cuts: Sequence[int] = ()) -> tuple[Tensor, KV]:
    """The rows of the last layer, in pieces cut at `cuts`, and the KV."""
    request, rows = Request(tokens), []
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    kv = store.open(request, len(tokens))
    for start, end in zip([0, *cuts], [*cuts, len(tokens)]):
        span = Span(request, kv, uncached.PLAIN, tokens[start:end], range(start, end))
        rows.append(forward(model, [span], Counters()).x)
        kv.commit(end - start)
    return torch.cat(rows), kv


def by_hand(model: Model, tokens: Sequence[int], groups: Sequence[range]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The same of a tiny Llama: rows, keys and values [H, N, D] of every layer."""
    config, n = model.config, len(tokens)
    x, rotary = model.embed(torch.tensor(tokens)), model.rotary(torch.arange(n))
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    keys, values = [], []
    for group in groups:
        given = x
        for i in group:
            layer = model.layers[i]
            rows = (layer.before_attention(given) @ layer.qkv.dense().T).view(n, -1, config.head_dim)
            q, k, v = rows.split((config.heads, config.kv_heads, config.kv_heads), 1)
            turned = rotary(config.rope_of[i], torch.cat((q, k), 1))
            q, k = turned.split((config.heads, config.kv_heads), 1)
            keys.append(k.transpose(0, 1))
            values.append(v.transpose(0, 1))
            out = []
            for head in range(config.heads):
                own = head * config.kv_heads // config.heads
                scores = q[:, head] @ k[:, own].T / math.sqrt(config.head_dim)
                out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, own])
            x = x + torch.cat(out, 1) @ layer.o.dense().T
            gate, up = (layer.before_mlp(x) @ layer.mlp.gate_up.dense().T).chunk(2, 1)
            x = x + (F.silu(gate) * up) @ layer.mlp.down.dense().T
    return x, keys, values


@pytest.mark.parametrize(("size", "ends"), [(1, 1), (2, 1), (4, 1), (3, 0), (6, 0), (2, 2)])
def test_rows_and_kv_are_those_of_the_twin(size: int, ends: int) -> None:
    """As one slice, as two, and some token by token; and not those of the model as it is, unless groups are of one
    layer."""
    model = tiny.model(layers=LAYERS)
    groups = grouped(LAYERS, size, ends)
    x, keys, values = by_hand(model, TOKENS, groups)
    singly = [range(1, len(TOKENS))] if size in (2, 3) else []
    for cuts in ([], [5], *singly):
        rows, kv = served(GroupedModel(model, groups), TOKENS, cuts)
        torch.testing.assert_close(rows, x, atol=1e-4, rtol=1e-4)
        for layer, k, v in zip(kv.layers, keys, values):
            (part,) = layer.read()
            torch.testing.assert_close(part.k, k, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(part.v, v, atol=1e-4, rtol=1e-4)
    exact, _ = served(model, TOKENS)
    assert torch.allclose(exact, x, atol=1e-2) == (size == 1)


@pytest.mark.parametrize(("experts", "after"), [(0, False), (4, False), (0, True)])
def test_groups_of_one_layer_are_the_model_to_the_bit(experts: int, after: bool) -> None:
    model = Model.load(tiny.checkpoint(layers=LAYERS, experts=experts))
    if after:  # what attention adds has a norm of its own in some families
        for layer in model.layers:
            layer.after_attention = RMSNorm(torch.rand(model.config.hidden) + 0.5, model.config.eps)
    ones = GroupedModel(model, grouped(LAYERS, 1))
    assert ones.depth == model.depth == LAYERS
    (exact, kv), (rows, own) = served(model, TOKENS, [9]), served(ones, TOKENS, [9])
    assert torch.equal(exact, rows)
    for a, b in zip(kv.layers, own.layers):
        assert torch.equal(a.read()[0].k, b.read()[0].k) and torch.equal(a.read()[0].v, b.read()[0].v)
    rough, _ = served(GroupedModel(model, grouped(LAYERS, 2)), TOKENS, [9])
    assert not torch.allclose(exact, rough, atol=1e-2)


class Recorder:
    """A layer's context for one row: what attentions were asked, one of them answering nothing."""

    def __init__(self, model: Model, silent: int | None = None) -> None:
        self.rotary, self.silent = model.rotary(torch.tensor([3])), silent
        self.asked: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.asked[layer] = q.clone()
        return torch.zeros_like(q) if layer == self.silent else v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def count(self, counter: str, n: int) -> None:
        """Nothing."""


def asked(model: Model, silent: int | None = None) -> dict[int, Tensor]:
    recorder, x = Recorder(model, silent), model.embed(torch.tensor([7]))
    for i in range(model.config.layers):
        x = model.layer(i, x, recorder)
    assert sorted(recorder.asked) == list(range(model.config.layers)), "every layer once"
    return recorder.asked


def chain(model: Model) -> int:
    """The longest chain of attentions each of whose questions hangs on the answer of the one before."""
    want, lengths = asked(model), [1] * model.config.layers
    for i in range(model.config.layers):
        for j, q in asked(model, silent=i).items():
            if not torch.equal(q, want[j]):
                lengths[j] = max(lengths[j], lengths[i] + 1)
    return max(lengths)


@pytest.mark.parametrize(("ends", "size"), [(0, 1), (0, 4), (1, 2), (1, 9), (2, 3)])
def test_the_depth_is_what_waits_for_what(ends: int, size: int) -> None:
    model = tiny.model(layers=LAYERS)
    rough = GroupedModel(model, grouped(LAYERS, size, ends))
    assert chain(rough) == rough.depth == 2 * ends + math.ceil((LAYERS - 2 * ends) / size)
    assert chain(model) == model.depth == LAYERS


def test_groups_cut_all_layers() -> None:
    assert grouped(8, 4) == [range(1), range(1, 5), range(5, 7), range(7, 8)]
    assert grouped(8, 4, 0) == [range(4), range(4, 8)]
    assert grouped(1, 4) == [range(1)] and grouped(2, 4) == [range(1), range(1, 2)]
    for layers in range(1, 9):
        for size in range(1, 6):
            for ends in range(4):
                groups = grouped(layers, size, ends)
                assert [i for group in groups for i in group] == list(range(layers)) and all(groups)
