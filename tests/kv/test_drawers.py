"""What methods keep of a request from step to step is in the KV budget: no tensor lies anywhere that is not booked,
what is booked goes as rows go, and nothing is booked for those who keep nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from phasewise import catalog
from phasewise.bench.drive import HeldKV, note
from phasewise.bench.held import lying
from phasewise.engine.engine import Engine
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.kv.handoff import landing, layout, pack, unpack
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.step.trail import Trail
from tests import seeds, tiny
from tests.engine.engines import step_all
from tests.laws import settings as laws

VERBS = ("attend", "evict", "store", "skip", "decode")
METHODS = [(verb, name) for verb, name, _ in catalog.every() if verb in VERBS]
RUNNING = ("h2o", "keyformer", "tova")
SLICES, DEPTHS = {"schedule": "sarathi:budget=7"}, {"schedule": "layered:rows_per_group=8"}
MORE = {
    "token_select": {"theta": 0.1},
    "snapkv": {"heads": "ada", "window": 16, "keep": 20},
    "h2o": {"heads": "ada", "layers": "pyramid"},
}


@cache
def model(dtype: torch.dtype) -> Model:
    """In 16 bits its steps are native ones, where there are kernels."""
    return Model.load(tiny.checkpoint(hidden=64), dtype=dtype)


def engine(verbs: dict[str, str], dtype: torch.dtype = torch.float32) -> Engine:
    made = tiny.engine(verbs, of=model(dtype), prefix_cache=False)
    assert isinstance(made, Engine)
    return made


def held(request: Request) -> int:
    """Bytes of all tensors that methods keep for a request, those of forks for each of them."""
    return 0 if request.kv is None else lying(request.state, [layer.derived for layer in request.kv.layers])


def within(requests: Sequence[Request], seen: list[int]) -> None:
    for request in requests:
        booked = 0 if request.kv is None else request.kv.beside
        assert held(request) <= booked, f"{request}: {held(request)} bytes lie there, {booked} are booked"
        seen.append(held(request))


@pytest.mark.parametrize(
    ("verb", "name", "dtype"),
    seeds.params([(*each, (torch.float32, torch.bfloat16)[i % 2]) for i, each in enumerate(METHODS)], 3, "drawers"),
    ids=str,
)
def test_no_tensor_of_a_method_lies_outside_the_ledger(verb: str, name: str, dtype: torch.dtype) -> None:
    """After every step: in the midst of prompts that come in slices, after them, long after, and at the end."""
    seen: list[int] = []
    for knobs in ({}, MORE[name]) if name in MORE else ({},):
        verbs = laws.options(verb, name, {**laws.tight(verb, name), **knobs})
        for schedule in (SLICES, DEPTHS) if name in ("zipvl", "snapkv") else (SLICES,):
            made = engine({**verbs, **schedule}, dtype)
            requests = [Request(p, tiny.greedy(n)) for p, n in zip(tiny.prompts(100, 37), (25, 40))]
            for request in requests:
                made.add(request)
            step_all(made, requests, lambda requests=requests: within(requests, seen))
            assert all(request.left.how == "finished" for request in requests)
    if name in (*RUNNING, "snapkv", "zipcache", "loopserve", "lazyllm", "quest"):
        assert max(seen) > 0, "this test does not see what it is for"


@pytest.mark.parametrize(("name", "dtype"), [("h2o", torch.bfloat16), ("tova", torch.float32)], ids=str)
def test_who_gives_rows_up_gives_their_bytes_back(name: str, dtype: torch.dtype) -> None:
    """What is booked after many tokens is what was after few, and what a prompt of as many rows takes."""
    made = engine(laws.options("evict", name), dtype)
    request = Request(tiny.prompts(100)[0], tiny.greedy(120))
    made.add(request)
    booked: dict[int, int] = {}
    step_all(made, [request], lambda: booked.update({request.n_out: request.kv.beside} if request.kv else {}))
    assert booked[20] == booked[70] == booked[110] > 0
    rows = 128  # room for the few that are left, and the next
    runtime = made.recipes[""].phases[0].evict
    shape = KVShape(2, model(dtype).config.head_dim, dtype)
    assert booked[110] == sum(runtime.drawer(layer, shape, Room(rows, rows, False)) for layer in range(4))


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_forks_and_preempted_requests_book_for_themselves(name: str) -> None:
    knobs = {**laws.tight("evict", name), **(MORE["snapkv"] if name == "snapkv" else {})}
    made, seen = engine({**laws.options("evict", name, knobs), **SLICES}), list[int]()
    first = Request(tiny.prompts(60)[0], tiny.greedy(40))
    requests = [first, *(first.sibling(i) for i in (1, 2)), Request(tiny.prompts(80, seed=2)[0], tiny.greedy(30))]
    for request in requests:
        made.add(request)
    turns = [0]

    def each() -> None:
        within(requests, seen)
        turns[0] += 1
        if turns[0] in (14, 30, 45):
            made.room.preempt(made.running[-1])

    step_all(made, requests, each)
    assert made.counters.preemptions >= 3 and max(seen) > 0


@pytest.mark.parametrize(("verb", "name"), [("evict", "h2o"), ("skip", "lazyllm"), ("store", "zipcache")])
def test_drawers_that_are_handed_on_are_booked_where_they_land(verb: str, name: str) -> None:
    verbs = laws.options(verb, name)
    here, there = engine(verbs), engine(verbs)
    request = Request(tiny.prompts(70)[0], tiny.greedy(40))
    here.add(request)
    while request.n_out < 5:
        here.step()
    assert request.kv is not None and (lie := held(request)) > 0
    means = layout(here.model.config, here.store)
    room, (header, tensors) = landing(request.kv), pack(request, means, 1)
    twin = Request(request.prompt, request.params, id="twin")
    twin.tokens, twin.computed = list(request.tokens), request.computed
    twin.kv, twin.state = unpack(header, [each.clone() for each in tensors], there.store, means)
    there.resume(twin)
    assert twin.kv.drawn >= held(twin) >= lie and there.kv_bytes <= max(room, twin.kv.bytes + twin.kv.drawn)
    step_all(there, [twin], lambda: within([twin], []))
    here.cancel(request)
    assert here.kv_bytes == 0


def test_who_keeps_nothing_pays_nothing() -> None:
    for verbs in ({}, {"store": "int8"}, {"attend": "quest:page=4,budget=12"}, {"evict": "streaming"}):
        made = engine(verbs)
        assert not made.store.draws
        request = Request(tiny.prompts(20)[0], tiny.greedy(4))
        made.add(request)
        made.step()
        assert request.kv is not None and request.kv.drawers is None


def test_live_bytes_include_what_lies_in_drawers() -> None:
    """As `bench kv` counts them: rows, and a score for every slot."""
    made, found = engine({"evict": "h2o:heavy=5,recent=4,lot=4"}), list[HeldKV]()
    request = Request(tiny.prompts(60)[0], tiny.greedy(20))
    request.watch = lambda token: note(request, found, token)
    made.add(request)
    live: list[tuple[int, int]] = []
    step_all(made, [request], lambda: live.append((request.kv.live_bytes, held(request))) if request.kv else None)
    assert len(found) == 1 and live[-1][1] > 0
    rows = found[0].live // (made.store.row_bytes + 2 * 4 * 4)  # of two heads in four layers
    assert found[0].live == rows * (made.store.row_bytes + 2 * 4 * 4) and 9 <= rows < 13
    assert found[0].booked > found[0].live


def test_a_state_is_no_view_of_what_a_whole_step_has_left() -> None:
    """A preempted request runs many tokens in one step: the scores after each of them are not kept for the last."""
    made = engine({"evict": "h2o:heavy=200,recent=4,lot=100"})
    request = Request(tiny.prompts(220)[0], tiny.greedy(60))
    made.add(request)
    while request.n_out < 40:
        made.step()
    made.room.preempt(request)
    while request.computed < 250:
        made.step()
    states = [state for state in Trail("h2o").layers(request).values() if isinstance(state, torch.Tensor)]
    assert len(states) == 4 and all(state.untyped_storage().nbytes() == state.nbytes for state in states)
    step_all(made, [request], lambda: within([request], []))
