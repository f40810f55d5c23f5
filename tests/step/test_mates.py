"""In bfloat16 a row has the same bits whoever is in its step: spans of every kind at once against each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.kv.format import Raw, RowFormat
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.step.forward import forward
from phasewise.verbs.host import Host
from tests import seeds, tiny
from tests.kv.harness import Walk

pytestmark = pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")

KINDS: list[dict[str, str]] = [
    {}, {},  # dense attention, twice
    {"attend": "quest:page=4,budget=20,dense_layers=1"}, {"attend": "quest:page=8,budget=24,dense_layers=0"},
    {"attend": "double_sparsity:channels=5,k=20,dense_layers=1,weights=random:0"},
    {"attend": "token_select:k=12,first=3,local=5"}, {"attend": "token_select:k=12,first=3,local=5,theta=0.1"},
    {"attend": "infllm:block=8,init=1,window=8,topk=2,dense_len=30"}, {"attend": "instinfer:r=4,k=16,group=4"},
    {"attend": "tidal:k=16,dense=1,second=3,every=0"},
    {"attend": "loopserve:alpha=1.0,budget=12,every=6,voters=6"},
    {"attend": "power:block=3,window=2,sinks=1,weights=random:0"},
    {"attend": "zero_tuning:gamma=20,weights=none"}, {"attend": "zero_tuning:gamma=0.1,weights=none"},
    {"evict": "streaming:sinks=3,window=25"}, {"evict": "streaming:sinks=0,window=40,positions=text"},
    {"evict": "snapkv:keep=0.5,window=5"}, {"evict": "snapkv:keep=0.5,window=5,heads=ada,layers=pyramid"},
    {"evict": "h2o:heavy=20,recent=10,lot=4"}, {"evict": "h2o:heavy=20,recent=10,lot=4,heads=ada"},
    {"evict": "tova:keep=30,lot=4"}, {"evict": "keyformer:keep=30,lot=4"}, {"evict": "expected_attention:keep=0.5"},
    {"evict": "longgen:sinks=3,window=25,weights=none"},
    {"evict": "longgen:sinks=3,window=25,stride=3,block=16,weights=random:0"},
    {"evict": "rlkv:share=0.6,sinks=3,window=25,weights=random:1"}, {"skip": "unified:speedup=2.0,weights=none"},
    {"attend": "zero_tuning:gamma=20,weights=none", "evict": "h2o:heavy=20,recent=10"},
    {"attend": "quest:page=4,budget=20,dense_layers=1", "evict": "snapkv:keep=0.8,window=5"},
]  # fmt: skip
STEPS = 16
TREE, PATH = [-1, 0, 0, 1, 2], [0, 2, 4]


@dataclass(frozen=True)
class Turn:
    """What one request does in one step."""

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    keep: Sequence[int] = ()


@cache
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def begun(kind: int, format: RowFormat) -> Walk:
    """A request of this kind, whose prompts meet its methods as in an engine."""
    host = Host(model(), None, Counters(), None, None)  # type: ignore[arg-type]
    built = {verb: catalog.build(verb, text) for verb, text in KINDS[kind].items()}
    bound: dict[str, Any] = {verb: each.bind(host) if hasattr(each, "bind") else each for verb, each in built.items()}
    one = Walk(model(), prompt(kind), format=format, **bound)
    if "attend" not in built or built["attend"].traits.acts("prefill"):
        one.plain = one.phase
    return one


def prompt(kind: int) -> list[int]:
    return tiny.prompts(seeds.draw("prompt", kind).randint(40, 150), seed=kind)[0]


def turns(kind: int, steps: int) -> list[Turn | None]:
    """A prompt in one or two slices; then tokens, a few rows at once, trees of which a path stays, and pauses."""
    draw, text = seeds.draw("turns", kind), prompt(kind)
    cut = draw.randint(1, len(text) - 1) if kind % 2 else len(text)
    found: list[Turn | None] = [Turn(text[:cut], keep=range(cut))]
    if cut < len(text):
        found.append(Turn(text[cut:], keep=range(len(text) - cut)))
    path = "attend" not in KINDS[kind] or KINDS[kind]["attend"].partition(":")[0] not in ("loopserve", "tidal")
    while len(found) < steps:
        way = draw.choice(["token"] * 5 + ["pause", "pause"] + ["rows", "tree", "tried"] * path)
        tokens = [draw.randint(3, tiny.VOCAB - 1) for _ in range(5)]
        found.append({
            "token": Turn(tokens[:1], keep=[0]), "pause": None, "rows": Turn(tokens[:3], keep=range(3)),
            "tree": Turn(tokens, TREE, PATH), "tried": Turn(tokens, TREE),
        }[way])  # fmt: skip
    order = [None] * draw.randint(0, 4)
    return [*order, *found][:steps]


@torch.inference_mode()
def run(kinds: Sequence[int], format: RowFormat, steps: int) -> dict[int, list[Tensor]]:
    """The rows that each request gets in its steps, all requests of a step going through one forward."""
    walks = {kind: begun(kind, format) for kind in kinds}
    plans = {kind: turns(kind, steps) for kind in kinds}
    found: dict[int, list[Tensor]] = {kind: [] for kind in kinds}
    for step in range(steps):
        now = {kind: turn for kind in kinds if (turn := plans[kind][step]) is not None}
        spans = {kind: walks[kind].begin(turn.tokens, turn.parents) for kind, turn in now.items()}
        if not spans:
            continue
        x = forward(model(), list(spans.values()), Counters()).x
        for kind, turn in now.items():
            found[kind].append(x[spans[kind].slice].clone())
            walks[kind].commit(turn.tokens, list(turn.keep))
    return found


@pytest.mark.parametrize(("format", "threads"), [(Raw, 3), (lambda: Int8().format(), 1)], ids=["raw", "int8"])
def test_no_row_changes_by_a_bit(format: Callable[[], RowFormat], threads: int) -> None:
    kinds, before = range(len(KINDS)), torch.get_num_threads()
    alone_too = kinds if format is Raw else seeds.some(kinds, 10, "alone over int8")
    try:
        torch.set_num_threads(threads)
        together = run(kinds, format(), steps=STEPS)
    finally:
        torch.set_num_threads(before)
    for kind in alone_too:
        alone = run([kind], format(), steps=STEPS)[kind]
        same = [torch.equal(a, b) for a, b in zip(alone, together[kind], strict=True)]
        assert all(same), f"{KINDS[kind]} in step {same.index(False)} of its own"
