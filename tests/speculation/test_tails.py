"""The model's own KV lent to a drafter: afterwards all is as before, whatever acts on the KV and whoever raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.model.model import Model
from phasewise.model.thinned import Route, Thinned
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.tails import Tails
from phasewise.step import reference
from phasewise.step.plan import AttentionPlan
from phasewise.step.reference import attend
from phasewise.verbs.draft import Draft
from tests import oracle, tiny
from tests.engine.engines import Boom, step_all
from tests.laws.settings import options, tight

PROMPTS = tiny.prompts(30, 7, 55)
SWIFT = "swift:steps=4,confidence=0,branches=2,window=6,bayes=3,enough=1"
SHAPED = [("store", "int8"), ("attend", "quest"), ("attend", "hydragen"), ("evict", "snapkv"), ("evict", "streaming")]


def engine(verbs: dict[str, str] | None = None, draft: str = SWIFT, **more: Any) -> Engine:
    placed = tiny.engine({"draft": draft, **(verbs or {})}, **more)
    assert isinstance(placed, Engine)
    return placed


def drafter(placed: Engine) -> Any:
    return placed.parts.phases[-1].decode.drafter


def state(request: Request) -> list[Any]:
    """All that a request's KV says of itself, its committed bytes included."""
    kv = request.kv
    assert kv is not None
    found: list[Any] = [kv.spare, request.computed, request.tokens[:]]
    for layer in kv.layers:
        found += [layer.n, layer.fresh, layer.version, layer.bytes, id(layer.beside), layer.beside.booked]
        found += [layer.ledger.used, sorted(map(repr, layer.derived)), [id(each) for each in layer.derived.values()]]
        for slab in layer.slabs:
            found += [id(slab.buffer), slab.n, *(plane[:, : slab.n].clone() for plane in slab.buffer.planes)]
            found.append(layer.positions(slab).clone())
    return found


def same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(before, after)
    )


def watched(placed: Engine) -> list[bool]:
    """Grows with every time its drafter is asked: whether the KV of all requests was as before."""
    seen: list[bool] = []
    its = drafter(placed)
    propose = its.draft

    def draft(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        before = [state(request) for request in requests]
        try:
            return propose(requests, budgets)
        finally:
            seen.append(all(same(one, state(request)) for one, request in zip(before, requests)))

    its.draft = draft
    return seen


@pytest.mark.parametrize("shaped", [None, *SHAPED], ids=lambda each: "plain" if each is None else "-".join(each))
def test_afterwards_the_kv_is_as_before(shaped: tuple[str, str] | None) -> None:
    """And the tokens are those of the same methods without a drafter."""
    verbs = {} if shaped is None else options(*shaped, tight(*shaped))
    want = tiny.plain(PROMPTS, tiny.greedy(18), verbs)
    placed = engine(verbs)
    seen = watched(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(18))) == want
    assert len(seen) > 5 and all(seen) and placed.counters.drafted > 0


def test_rows_that_stay_behind_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the tail not dropped, the law would say so."""

    @contextmanager
    def kept(self: Tails, requests: Sequence[Request]) -> Iterator[None]:
        yield
        self._rows.clear()

    monkeypatch.setattr(Tails, "lent", kept)
    placed = engine()
    seen = watched(placed)
    request = Request(PROMPTS[0], tiny.greedy(30))
    placed.add(request)
    placed.step()
    placed.step()
    assert seen == [False]


# ---- whoever raises
def break_after(monkeypatch: pytest.MonkeyPatch, calls: int, layer: int = 2) -> None:
    """Rows of tails raise for the request "bad" in this layer, from some pass on."""
    left = [calls]

    def broken(plan: AttentionPlan, reads: list[Any]) -> Any:
        tail = any(read.span.request.id == "bad" and read.span.phase.decode is None for read in reads)
        if reads[0].layer == layer and tail:
            left[0] -= 1
            if left[0] < 0:
                raise Boom("in a tail")
        return attend(plan, reads)

    monkeypatch.setattr(reference, "attend", broken)


@pytest.mark.parametrize("calls", [0, 1, 3, 8])
def test_a_pass_that_raises_leaves_the_kv_as_it_was(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Only the culprit fails, and the others have the tokens they have alone. The layers before have written rows."""
    want = tiny.plain(PROMPTS, tiny.greedy(20))
    break_after(monkeypatch, calls)
    placed = engine()
    seen = watched(placed)
    requests = [Request(p, tiny.greedy(20), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    assert all(seen) and len(seen) > 3
    bad = requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: in a tail")
    assert [request.out for request in requests] == [want[0], want[2]]


def test_a_replay_that_raises_leaves_the_kv_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = engine(draft="swift:window=6,proposals=0")
    request = Request(PROMPTS[0], tiny.greedy(40), id="bad")
    placed.add(request)
    while request.n_out < 12:
        placed.step()
    break_after(monkeypatch, 0)
    its, before = drafter(placed), state(request)
    with torch.inference_mode(), pytest.raises(Boom):
        its.score(request, its.search.best)
    assert same(before, state(request))


def test_forks_do_not_see_each_others_tails() -> None:
    """Buffers that forks share are not written: whoever drafts first makes a copy, as for any row."""
    want = tiny.plain(PROMPTS[:1], tiny.greedy(30))
    placed = engine()
    request = Request(PROMPTS[0], tiny.greedy(30))
    placed.add(request)
    while request.n_out < 10:
        placed.step()
    twin = Request(request.prompt, request.params)
    twin.adopt(request)
    assert Tails.room(twin) == Tails.room(request) == 0
    placed.resume(twin)
    step_all(placed, [request, twin])
    assert [request.out, twin.out] == [want[0]] * 2


def test_nothing_is_guessed_where_layers_have_lost_their_kv() -> None:
    verbs = {"skip": "unified:speedup=2,weights=none"}
    want = tiny.plain(PROMPTS, tiny.greedy(12), verbs)
    placed = engine(verbs)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(12))) == want
    assert placed.counters.drafted == placed.counters.draft_forwards == 0


# ---- what is computed
def decoding(prompt: Sequence[int], n: int, verbs: dict[str, str] | None = None) -> tuple[Engine, Request]:
    """A request that has come so far by plain decoding."""
    placed = tiny.engine(verbs)
    request = Request(prompt, tiny.greedy(60))
    placed.add(request)
    while request.n_out < n:
        placed.step()
    assert isinstance(placed, Engine) and request.kv is not None
    request.kv.reserve(40)
    return placed, request


def test_with_all_sub_layers_it_is_the_model() -> None:
    """Down a tree, level by level: each node's row is that of the text that leads to it."""
    model = tiny.model()
    _, request = decoding(PROMPTS[0], 9)
    whole = Tails("whole", Thinned(model, Route.without(model.config.layers)), tiny.engine().counters)
    paths = [[5], [9], [5, 7], [9, 4], [5, 8]]
    with torch.inference_mode(), whole.lent([request]):
        rows = [whole.root([request]), whole.grow([NewNodes(request, [5, 9], [-1, -1])])]
        rows.append(whole.grow([NewNodes(request, [7, 4, 8], [0, 1, 0])]))
        found = model.head(torch.cat(rows))
    for row, path in zip(found, [[], *paths]):
        assert torch.allclose(row, oracle.logits(tiny.checkpoint(), request.tokens + path)[-1], atol=1e-4)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("left_out", [((), ()), ((1,), (2,)), ((1, 2), (1, 2)), ((), (1,)), ((2,), ())])
def test_native_passes_are_the_open_ones(left_out: tuple[tuple[int, ...], tuple[int, ...]], experts: int) -> None:
    """In 16 bits, down a tree: rows as near as rounding lets them be, the same counters, and the KV as before."""
    model = Model.load(tiny.checkpoint(hidden=64, experts=experts), dtype=torch.bfloat16)
    placed = tiny.engine(of=model)
    request = Request(PROMPTS[0], tiny.greedy(60))
    placed.add(request)
    while request.n_out < 9:
        placed.step()
    assert request.kv is not None
    request.kv.reserve(40)
    before, found = state(request), []
    for thin in (Thinned(model, Route.without(4, *left_out)), Thinned(model, Route.without(4, *left_out)).packed()):
        own = Tails("own", thin, Counters())
        with torch.inference_mode(), own.lent([request]):
            rows = [own.root([request]).clone(), own.grow([NewNodes(request, [5, 9], [-1, -1])]).clone()]
            rows.append(own.grow([NewNodes(request, [7, 4, 8], [0, 1, 0])]).clone())
        assert same(before, state(request))
        found.append((torch.cat(rows).float(), own.counters))
    (opened, counted), (whole, also) = found
    near = torch.nn.functional.cosine_similarity(opened, whole)
    astray = int((near <= 0.999).sum())  # a row between two experts may be given the other one by a rounding
    assert astray <= (1 if experts else 0) and near.min() > 0.98
    if astray:  # then another set of experts is read
        counted, also = (replace(counters, expert_loads=0) for counters in (counted, also))
    assert counted == also


def test_what_is_not_on_the_route_does_nothing() -> None:
    """A layer without both halves, and one half alone, against the layers by hand; skipped attentions write nothing."""
    model = tiny.model()
    _, request = decoding(PROMPTS[1], 3)
    counters = tiny.engine().counters
    thin = Tails("thin", Thinned(model, Route.without(4, attention=[1, 2], mlp=[2, 3])), counters)
    assert request.kv is not None
    with torch.inference_mode(), thin.lent([request]):
        thin.root([request])
        assert [layer.fresh for layer in request.kv.layers] == [1, 0, 0, 1]
        thin.grow([NewNodes(request, [5, 9], [-1, -1])])
        assert [layer.fresh for layer in request.kv.layers] == [3, 0, 0, 3]
    assert (counters.draft_forwards, counters.draft_depth, counters.rows) == (2, 4, 3)
    assert counters.row_layers == 3 * 4 // 2 and counters.head_rows == 3
    assert counters.kv_bytes_written * model.config.layers == 2 * 3 * request.kv.live_bytes // request.kv.layers[0].n
