"""attend.zero_tuning: the closed form against an explicit softmax, however a row arrives; nobody else is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.options import parse
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.inside import Inside
from phasewise.step.phase import Phase
from phasewise.step.plan import AttentionPlan
from phasewise.step.read import Read
from phasewise.step.reference import attend
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from tests import double, seeds, tiny
from tests.asking import Asking
from tests.kv.harness import Uneven, Walk, cuts, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PROMPT, TOKENS = 70, tiny.prompts(100)[0]
OTHER = tiny.prompts(40, seed=9)[0]
LIFT = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 0.0, -2.0]])


class Explicit(Asking):
    """ln gamma added to the logit of position 0, before a softmax over what is visible."""

    def __init__(self, lift: Tensor) -> None:
        self.lift = lift

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        logits, heads = read.scores(), read.part.size[0]
        lift = self.lift[read.layer].to(logits.dtype).view(2, -1)
        lift = lift if read.part.heads is None else lift[read.part.heads]
        first = (read.part.positions == 0).expand(heads, -1)
        logits = logits + lift[:, :, None, None] * first[:, None, None]
        return ops.weigh(logits, read.part.v, read.mask())[0]


def bound(method: Any, model: Model | None = None) -> Any:
    return method.bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "streaming, text": lambda: {"evict": bound(Streaming(sinks=6, window=43, positions="text"))},
    "no sinks": lambda: {"evict": bound(Streaming(sinks=0, window=43))},
    "snapkv": lambda: {"evict": bound(SnapKV(keep=0.5, window=5))},
    "a head without the first row": lambda: {"evict": Uneven([[range(0, 70, 2), range(35, 70)]] * 4)},
    "heads that keep more rows": lambda: {"evict": Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)},
    "int8": lambda: {"format": Int8().format()},
}


def started(attend: Any, case: str = "plain", model: Model | None = None) -> Walk:
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], attend=attend, **CASES[case]())
    one.plain = one.phase  # prompts too
    return one


# ---- the closed form
def read_of(n: int, rows: int, seed: int = 0) -> Read:
    """Random queries and keys over values that are the identity, so that what comes out are the weights."""
    gen, dim = torch.Generator().manual_seed(seed), 12
    assert n + rows <= dim
    layer = LayerKV(KVShape(2, dim, torch.float32), Raw(), Ledger(1 << 30), 64)
    k = torch.randn(2, n + rows, dim, generator=gen) * 2
    v = torch.eye(dim)[: n + rows].expand(2, -1, -1)
    layer.append(k[:, :n], v[:, :n], range(n))
    layer.commit(n)
    layer.append(k[:, n:], v[:, n:], range(n, n + rows))
    store = Store(kv_shapes(tiny.model()), Raw(), ledger=Ledger(1 << 30), counters=Counters())
    request = Request(list(range(3, 3 + n + rows)))
    kv = store.open(request, n + rows)
    kv.layers[0] = layer
    phase = Phase("test", decode=None, attend=Dense())  # type: ignore[arg-type]
    span = Span(request, kv, phase, [3] * rows, range(n, n + rows))
    (part,) = layer.read()
    q = torch.randn(rows, 4, dim, generator=gen) * 2
    return Read(Inside(tiny.model(), Counters()), 0, span, q, part)


@pytest.mark.parametrize(("n", "rows"), [(9, 1), (8, 4), (0, 12), (1, 1)])
def test_weights_are_the_closed_form(n: int, rows: int) -> None:
    for seed in range(5):
        read = read_of(n, rows, seed)
        lift = torch.tensor([[math.log(3.0), math.log(0.2), 0.0, math.log(50.0)]])
        (got,) = attend(AttentionPlan(bias=lift), [read])
        assert got is not None
        a = read.attend()  # [R, Hq, D], whose numbers are weights
        first = a[..., :1]
        gamma = lift.exp()[0][None, :, None]
        norm = 1 + (gamma - 1) * first
        want = torch.cat((gamma * first, a[..., 1:]), -1) / norm
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(got.sum(-1), torch.ones(rows, 4), atol=1e-6, rtol=0)
        torch.testing.assert_close(got[:, 2], a[:, 2], atol=1e-6, rtol=0)  # gamma 1
        if n + rows > 2:  # ratios of the others stay
            late = torch.tensor([r for r in range(rows) if n + r >= 2])
            torch.testing.assert_close(got[late, :, 1] * a[late, :, 2], got[late, :, 2] * a[late, :, 1],
                                       atol=1e-6, rtol=0)  # fmt: skip


def tuned(read: Read, gamma: float) -> Tensor | None:
    (out,) = attend(AttentionPlan(bias=torch.full((1, 4), math.log(gamma))), [read])
    return out


def test_entropy_moves_to_the_side_that_theory_says() -> None:
    """It falls as gamma grows exactly where the first weight is above 1 / (1 + e^H), H being that of the rest."""
    fell = rose = 0
    for seed in range(40):
        read = read_of(11, 1, seed)
        for gamma in (0.05, 0.3, 1.0, 3.0, 40.0):
            (low,), (high,) = (
                attend(AttentionPlan(bias=torch.full((1, 4), math.log(g))), [read])
                for g in (gamma * 0.98, gamma * 1.02)
            )
            (here,) = (
                attend(AttentionPlan(bias=torch.full((1, 4), math.log(gamma))), [read])
                if gamma != 1
                else [read.attend()]
            )
            assert low is not None and high is not None and here is not None
            for head in range(4):
                weights = here[0, head].double()
                rest = weights[1:] / weights[1:].sum()
                border = 1 / (1 + torch.special.entr(rest).sum().exp())
                if abs(float(weights[0] - border)) < 0.05 * float(border):
                    continue  # too near to tell
                change = (
                    torch.special.entr(high[0, head].double()).sum() - torch.special.entr(low[0, head].double()).sum()
                )
                if float(weights[0]) > 0.999 or abs(float(change)) < 1e-5:
                    continue
                assert (float(change) < 0) == bool(weights[0] > border)
                fell, rose = fell + (float(change) < 0), rose + (float(change) > 0)
    assert fell > 50 and rose > 50


@pytest.mark.parametrize("case", seeds.params(CASES, 1, "zero tuning", always=["plain"]))
def test_equals_a_softmax_with_a_bias(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts and tokens, in one piece or many; where the first row was given up, nothing is scaled. In double
    precision over int8, where the last bit of a float now and then moves a number to the next level."""
    if case == "int8":
        double.everything(monkeypatch)
    truth = started(Explicit(LIFT), case)
    want = torch.cat([truth.feed(TOKENS[:PROMPT]), *(truth.feed([token]) for token in TOKENS[PROMPT:])])
    for sizes in ([1], [2, 7, 1], [30]):
        one = started(Tuned(LIFT), case)
        got = torch.cat([one.feed(TOKENS[:PROMPT]), *(one.feed(p) for p in cuts(TOKENS[PROMPT:], sizes))])
        torch.testing.assert_close(got, want, **CLOSE)
    dense = started(None, case)
    plain = torch.cat([dense.feed(TOKENS[:PROMPT]), *(dense.feed([token]) for token in TOKENS[PROMPT:])])
    assert (plain - want).abs().max() > 1e-2, "the lift matters, or the test tests little"


def test_windows_of_the_model() -> None:
    model = sliding(17, 4)
    truth, one = started(Explicit(LIFT), model=model), started(Tuned(LIFT), model=model)
    for piece in (TOKENS[:PROMPT], *cuts(TOKENS[PROMPT:], [1, 5])):
        torch.testing.assert_close(one.feed(piece), truth.feed(piece), **CLOSE)


@pytest.mark.parametrize("case", ["plain", "streaming"])
def test_draft_trees(case: str) -> None:
    tree, parents = [TOKENS[PROMPT], 5, 6, 7, 8, 9], [-1, 0, 0, 1, 2, 3]
    one, truth = started(Tuned(LIFT), case), started(Explicit(LIFT), case)
    for walk in (one, truth):
        walk.feed(TOKENS[:PROMPT])
    torch.testing.assert_close(one.try_(tree, parents), truth.try_(tree, parents), **CLOSE)


def test_a_tree_over_nothing() -> None:
    """Rows that do not see position 0 because it is no ancestor of theirs cannot be: the root is everybody's."""
    one, truth = started(Tuned(LIFT)), started(Explicit(LIFT))
    tree, parents = [5, 6, 7, 8], [-1, 0, 0, 1]
    torch.testing.assert_close(one.try_(tree, parents), truth.try_(tree, parents), **CLOSE)


# ---- nobody else


def test_recipes_share_steps_and_keep_their_tokens() -> None:
    methods = parse({})
    tuned = {**methods, "attend": ZeroTuning(gamma=20.0, weights="none")}
    prompts, params = tiny.prompts(41, 60), tiny.greedy(20)
    engine = Builder(tiny.model(), methods, Limits(64 << 20), load=tiny.load, recipes={"tuned": tuned}).build()
    requests = [Request(prompt, params, recipe=name) for prompt in prompts for name in ("", "tuned")]
    for request in requests:
        engine.add(request)
    tiny.finish(engine, requests)
    got = tiny.outs(requests)
    assert got[::2] == tiny.plain(prompts, params)
    assert got[1::2] == tiny.plain(prompts, params, {"attend": "zero_tuning:gamma=20,weights=none"}) != got[::2]


def test_gamma_one_asks_nobody() -> None:
    assert isinstance(bound(ZeroTuning(gamma=1.0, weights="random:0")), Dense)
    assert isinstance(bound(ZeroTuning(gamma=1.0, weights="none")), Dense)


def test_bytes_read_are_all_rows_and_the_first_once_more() -> None:
    lift = LIFT.clone()
    one = started(Tuned(lift))
    one.feed(TOKENS[:PROMPT])
    row = 2 * 12 * 4 * 2  # heads, dim, bytes, keys and values
    for token in TOKENS[PROMPT:90]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        one.feed([token])
        assert one.counters.kv_bytes_read - before == (4 * n + 3) * row  # of four layers, one is left as it is


# ---- knobs and weights
@pytest.mark.parametrize(
    ("knobs", "says"),
    [({"gamma": -1.0}, "gamma=-1.0 must lie between 1e-06"), ({"gamma": 1e308}, "gamma=1e.308"),
     ({"gamma": math.inf}, "gamma=inf"), ({"gamma": math.nan}, "gamma=nan"),
     ({"weights": "none"}, "weights=none knows no factor: say gamma=2")],
)  # fmt: skip
def test_bad_knobs(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ZeroTuning(**knobs)


def test_a_file_is_bound_to_its_model(tmp_path: Path) -> None:
    model, other = Model.load(tiny.checkpoint()), Model.load(tiny.checkpoint(seed=3))
    made, path = ZeroTuning().artefact(model.config), tmp_path / "lift.safetensors"
    artefacts.save(path, made, {"lift": LIFT}, artefacts.fingerprint(model), "by hand")
    runtime = bound(ZeroTuning(weights=str(path)), model)
    assert torch.equal(runtime.lift, LIFT)
    scaled = bound(ZeroTuning(gamma=4.0, weights=str(path)), model).lift
    assert torch.equal(scaled != 0, LIFT != 0)
    assert scaled[scaled != 0].tolist() == pytest.approx([math.log(4.0)] * int((LIFT != 0).sum()))
    with pytest.raises(UserError, match="trained for another base model.*phasewise train artefact attend.zero_tuning"):
        bound(ZeroTuning(weights=str(path)), other)
    with pytest.raises(UserError, match="phasewise train artefact attend.zero_tuning.*weights=none,gamma=2"):
        bound(ZeroTuning(), other)
