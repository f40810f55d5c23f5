"""skip.unified: fewer layers for every generated row, and what they no longer need is gone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.cli.evaluate import judge_of
from phasewise.cli.options import EngineOptions
from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.skip.unified import Unified, kept
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.kv.harness import drafting
from tests.merged import merged

LAYERS = 8
N = 14


def model() -> Model:
    return tiny.model(layers=LAYERS)


def engine(speedup: float, **verbs: str) -> Engine:
    placed = tiny.engine({"skip": f"unified:speedup={speedup},weights=none", **verbs}, of=model())
    assert isinstance(placed, Engine)
    return placed


@pytest.mark.parametrize("layers", range(2, 40))
def test_kept_layers_are_spread_evenly(layers: int) -> None:
    for speedup in (1, 1.2, 1.5, 2, 3, 5, 10, 1000):
        chosen = kept(layers, speedup)
        assert chosen[0] == 0 and chosen[-1] == layers - 1 and sorted(set(chosen)) == chosen
        assert len(chosen) == max(2, int(layers / speedup))
        gaps = [b - a for a, b in pairwise(chosen)]
        assert max(gaps) - min(gaps) <= 1
        assert chosen == torch.linspace(0, layers - 1, len(chosen), dtype=torch.float64).round().int().tolist()
    assert kept(layers, 1) == list(range(layers)) and kept(1, 3) == [0]


class ByHand:
    """A layer's context written from scratch: plain lists of keys and values, one row at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.rotary: Any = None

    def count(self, counter: str, n: int) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self.rows.setdefault(layer, [])
        rows.append((k[0].clone(), v[0].clone()))
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            keys = torch.stack([key[head // group] for key, _ in rows])
            values = torch.stack([value[head // group] for _, value in rows])
            weights = (keys @ q[0, head] * self.model.config.attention[layer].scale).softmax(0)
            out[0, head] = weights @ values
        return out

    def run(self, token: int, position: int, layers: Sequence[int]) -> int:
        """One token through some of the layers. -> the next."""
        x = self.model.embed(torch.tensor([token]))
        self.rotary = self.model.rotary(torch.tensor([position]))
        for layer in layers:
            x = self.model.layer(layer, x, self)
        return int(self.model.head(x).argmax())


@torch.inference_mode()
def shallow(prompt: list[int], n: int, layers: Sequence[int], decoder: Model | None = None) -> list[int]:
    """A model of the kept layers alone (of `decoder`, if that is another), over the full model's KV of the prompt."""
    context = ByHand(model())
    token = [context.run(t, i, range(LAYERS)) for i, t in enumerate(prompt)][-1]
    context.model = decoder or context.model
    out = [token]
    while len(out) < n:
        token = context.run(token, len(prompt) + len(out) - 1, layers)
        out.append(token)
    return out


@pytest.mark.parametrize("speedup", [1.5, 2, 4, 100])
def test_equals_a_model_of_the_kept_layers_over_the_prompts_kv(speedup: float) -> None:
    prompts = tiny.prompts(33, 7)
    got = tiny.outs(tiny.run(engine(speedup), prompts, tiny.greedy(N)))
    assert got == [shallow(prompt, N, kept(LAYERS, speedup)) for prompt in prompts]
    assert got != [oracle.greedy(tiny.checkpoint(layers=LAYERS), prompt, N)[0] for prompt in prompts]


@pytest.mark.parametrize("speedup", [1.5, 2, 100])
def test_tuned_rows_equal_a_model_with_the_low_rank_weights_merged_in(speedup: float, tmp_path: Path) -> None:
    """Prompts by the base model, tokens by another one: the delta is for decoded rows only, and for all of them."""
    wanted = Unified(speedup).artefact(model().config)
    decoder = merged(tiny.checkpoint(layers=LAYERS), tmp_path / "merged", wanted, 4)
    prompts = tiny.prompts(33, 7)
    placed = tiny.engine({"skip": f"unified:speedup={speedup},weights=random:4"}, of=model())
    got = tiny.outs(tiny.run(placed, prompts, tiny.greedy(N)))
    assert got == [shallow(prompt, N, kept(LAYERS, speedup), decoder) for prompt in prompts]
    assert got != [shallow(prompt, N, kept(LAYERS, speedup)) for prompt in prompts]


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("draft", [{}, {"draft": "prompt_lookup:k=4,min_match=1"}], ids=["plain", "drafts"])
def test_tuned_rows_do_not_depend_on_batch_mates_in_bfloat16(draft: dict[str, str]) -> None:
    """All on the open path: the native step, which prompts take when they are alone, rounds differently."""
    deep = Model.load(tiny.checkpoint(hidden=64, layers=LAYERS), dtype=torch.bfloat16)
    deep.stack = None
    given = {"skip": "unified:weights=random:0", "schedule": "sarathi:budget=16"} | draft
    prompts = tiny.prompts(33, 5, 64, 17)
    alone = [tiny.outs(tiny.run(tiny.engine(given, of=deep), [p], tiny.greedy(24)))[0] for p in prompts]
    assert tiny.outs(tiny.run(tiny.engine(given, of=deep), prompts, tiny.greedy(24))) == alone


def test_everything_kept_is_the_model_itself() -> None:
    prompts = tiny.prompts(33, 7)
    got = tiny.outs(tiny.run(engine(1), prompts, tiny.greedy(N)))
    assert got == [oracle.greedy(tiny.checkpoint(layers=LAYERS), prompt, N)[0] for prompt in prompts]


@pytest.mark.parametrize(("speedup", "runs"), [(1, 8), (2, 4), (3, 2), (8, 2)])
def test_counted_layers_are_the_closed_form(speedup: float, runs: int) -> None:
    """N layers per prompt row, R per decoded row: m * R + prompt * N."""
    lengths = (33, 7, 50)
    placed = engine(speedup, schedule="sarathi:budget=16")
    tiny.run(placed, tiny.prompts(*lengths), tiny.greedy(N))
    assert placed.counters.row_layers == sum(lengths) * LAYERS + len(lengths) * (N - 1) * runs


def test_kv_of_skipped_layers_is_freed() -> None:
    placed = engine(2)
    prompt = tiny.prompts(100)[0]
    request = Request(prompt, tiny.greedy(N))
    placed.add(request)
    placed.step()
    assert request.kv is not None and not request.prefilling
    chosen = kept(LAYERS, 2)
    full = 100 * placed.store.row_bytes
    assert request.kv.live_bytes * LAYERS == full * len(chosen), "R / N of the prompt's bytes"
    assert [i for i, layer in enumerate(request.kv.layers) if layer.bytes] == chosen
    assert placed.kv_bytes == placed.prefix_bytes + request.kv.bytes
    assert request.kv.bytes * LAYERS == placed.store.cost(101) * len(chosen), "what is allocated falls as well"
    placed.step()
    assert request.kv.live_bytes * LAYERS == 101 * placed.store.row_bytes * len(chosen)
    tiny.finish(placed, [request])


def test_freeing_changes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny.prompts(33, 70)
    want = tiny.outs(tiny.run(engine(2), prompts, tiny.greedy(N)))
    monkeypatch.setattr("phasewise.methods.skip.unified._Unified.unused", lambda self, layers: ())
    assert tiny.outs(tiny.run(engine(2), prompts, tiny.greedy(N))) == want


def test_long_replays_do_not_bring_freed_layers_back() -> None:
    """After a preemption the emitted tokens come back as one long span; the freed layers stay empty all the same."""
    placed = engine(2)
    request = Request(tiny.prompts(40)[0], tiny.greedy(80))
    placed.add(request)
    while request.n_out < 70:
        placed.step()
    placed.room.preempt(request)
    bytes_ = []
    while request.left is None:
        placed.step()
        if request.kv is not None and not request.prefilling:
            bytes_.append([layer.bytes for i, layer in enumerate(request.kv.layers) if i not in kept(LAYERS, 2)])
    assert placed.counters.preemptions == 1 and bytes_ and not any(map(sum, bytes_))
    assert request.out == shallow(request.prompt, 80, kept(LAYERS, 2))


def test_bad_knobs_are_named() -> None:
    with pytest.raises(UserError, match=r"speedup=0\.5"):
        Unified(speedup=0.5)
    with pytest.raises(UserError, match="speedup"):
        catalog.build("skip", "unified:speedup=fast")


def test_drafts_run_the_kept_layers_only() -> None:
    prompts = tiny.prompts(33, 7)
    verbs = {"skip": "unified:speedup=2,weights=none"}
    want = tiny.plain(prompts, tiny.greedy(N), verbs)
    script = {tuple(prompt): out for prompt, out in zip(prompts, want)}
    placed = drafting(verbs, script)
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(N))) == want
    assert placed.counters.row_layers == 40 * 4 + (placed.counters.rows - 40) * 2


def test_the_shipped_weights_do_better_than_none() -> None:
    """Loss on held-out library source, nats per token, of the pocket model at half its layers."""

    def loss(weights: str) -> float:
        judge = judge_of(EngineOptions(skip=f"unified:weights={weights}"))
        return judge.measure("code", 1, 0, lambda done: None)[0].value  # one window of 512 tokens

    assert loss("auto") < loss("none") - 1.0
