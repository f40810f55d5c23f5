"""Selectors in bfloat16: a step in which rows choose is one native call, and what it gives is what half steps give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.kv.vectors import Kept
from phasewise.methods.attend.double_sparsity import DoubleSparsity
from phasewise.methods.attend.infllm import InfLLM
from phasewise.methods.attend.instinfer import InstInfer, _Index
from phasewise.methods.attend.loopserve import LoopServe
from phasewise.methods.attend.power import Power
from phasewise.methods.attend.tidal import Tidal
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.step import lower
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
PROMPT, TOKENS = 70, tiny.prompts(100)[0]
OTHER = tiny.prompts(40, seed=9)[0]

METHODS: dict[str, Any] = {
    "double_sparsity": DoubleSparsity(channels=5.0, k=20, dense_layers=1, weights="random:0"),
    "token_select": TokenSelect(k=12, first=3, local=5, dense_layers=1),
    "infllm": InfLLM(block=8, init=1, window=8, topk=2, dense_len=60),
    "instinfer": InstInfer(r=4.0, k=20.0, group=4),
    "instinfer, no mean": InstInfer(r=0.3, k=0.2, mean=False),
    "tidal": Tidal(k=20, dense=1, second=3, every=0),
    "tidal, made good": Tidal(k=20, dense=0, second=2, every=7),
    "power": Power(block=3, window=2, sinks=1, weights="none"),
    "loopserve": LoopServe(alpha=1.0, budget=12, every=6, voters=6),
}
EACH = pytest.mark.parametrize("name", METHODS)
FORMATS: dict[str, Callable[[], dict[str, Any]]] = {"raw": dict, "int8": lambda: {"format": Int8().format()}}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def bound(method: Any, model: Model) -> Any:
    return method.bind(Host(model, None, Counters(), None, None)) if hasattr(method, "bind") else method  # type: ignore[arg-type]


def started(model: Model, name: str, **more: Any) -> Walk:
    one = Walk(model, TOKENS[:PROMPT], attend=bound(METHODS[name], model), **more)
    if "prefill" in METHODS[name].traits.phases:
        one.plain = one.phase
    one.feed(TOKENS[:PROMPT])
    return one


def halved(patch: pytest.MonkeyPatch) -> None:
    """Nobody's choice is made natively."""
    for each in ("_top_k", "_picks", "_by_position", "_given"):
        patch.setattr(lower, each, lambda *_: "a test asks by layer")


def vectors(walk: Walk) -> list[Tensor]:
    """What stands for the keys of every layer that has some."""
    every = [value for layer in walk.kv.layers for value in layer.derived.values()]
    indices = [value for value in every if isinstance(value, _Index)]
    sums = [value.sums for value in indices if value.sums is not None]
    return [value.known for value in every if isinstance(value, Kept)] + [value.known for value in indices] + sums


def asked(name: str, rows: int) -> bool:
    """Whether a single row, after so many of a prompt, has to ask: where LoopServe chooses anew."""
    return name == "loopserve" and rows % METHODS[name].every == 0


@pytest.mark.parametrize(
    ("name", "format"), [(name, "raw") for name in METHODS] + [("infllm", "int8"), ("tidal", "int8")]
)
def test_a_step_is_one_call_and_gives_what_halves_give(
    name: str, format: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with the same vectors beside the rows and the same counters. Vectors that no list needs yet, those
    of the last rows, may be missing in a whole step, and be counted later."""
    made = passes(monkeypatch)
    whole = started(model, name, **FORMATS[format]())
    start = len(made)
    got = [whole.feed([token]) for token in TOKENS[PROMPT:]]
    single = [each.whole for each in made[start:] if each.rows == 1]
    assert single == [not asked(name, i) for i in range(30)]
    with monkeypatch.context() as patch:
        halved(patch)
        halves = started(model, name, **FORMATS[format]())
        start = len(made)
        want = [halves.feed([token]) for token in TOKENS[PROMPT:]]
    assert not any(each.whole for each in made[start:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for mine, others in zip(vectors(whole), vectors(halves), strict=True):
        assert torch.equal(mine, others[:, : mine.shape[1]])
        late = METHODS[name].local if name == "token_select" else 0
        assert mine.shape[1] >= others.shape[1] - late
    if name != "token_select":
        assert whole.counters == halves.counters


@EACH
def test_several_rows_and_single_ones_take_turns(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and replays go in halves over the same vectors and lists; whoever adds some, the other knows them."""
    pieces = [1, 1, 5, 1, 1, 1, 3, 1, 4, 1, 1, 1, 1]

    def fed(walk: Walk) -> list[Tensor]:
        out, at = [], PROMPT
        for size in pieces:
            out.append(walk.feed(TOKENS[at : at + size]))
            at += size
        return out

    got = fed(started(model, name))
    with monkeypatch.context() as patch:
        halved(patch)
        want = fed(started(model, name))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@EACH
def test_forks_and_rollbacks(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins go on by themselves; rows that were tried and dropped leave nothing behind."""

    def grown() -> list[Tensor]:
        one = started(model, name)
        out = [one.feed([token]) for token in TOKENS[PROMPT:90]]
        one.try_([OTHER[0]])
        with torch.inference_mode():
            one.kv.commit(0)
        twin = one.fork()
        for mine, others in zip(TOKENS[90:100], OTHER[:10]):
            out += [one.feed([mine]), twin.feed([others])]
        return out

    got = grown()
    with monkeypatch.context() as patch:
        halved(patch)
        want = grown()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("tidal")])  # which wants no gaps
def test_a_cache_with_gaps_is_asked_for(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    one = started(model, name, evict=SnapKV(keep=0.8, window=5).bind(Host(model, None, Counters(), None, None)))  # type: ignore[arg-type]
    start = len(made)
    for token in TOKENS[PROMPT:90]:
        one.feed([token])
    assert not any(each.whole for each in made[start:])


# ---- in an engine
PROMPTS, N = tiny.prompts(48, 33, 45, 12), 40
