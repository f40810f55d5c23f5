"""What a hand-off carries: rows as they are, progress, plain drawers; and how it refuses what does not fit."""

from __future__ import annotations

import json

import pytest
import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.handoff import Misfit, State, advance, exactness, landing, layout, pack, unpack
from phasewise.kv.store import Store
from phasewise.request.counters import Counters
from phasewise.request.header import request_of
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request
from tests import tiny
from tests.laws import settings as laws


def running(**verbs: str) -> tuple[tiny.Placed, Request]:
    """A request of 90 rows and some tokens, in the middle of its generation."""
    engine = tiny.engine(verbs, prefix_cache=False)
    request = Request(tiny.prompts(90)[0], tiny.greedy(20))
    engine.add(request)
    for _ in range(4):
        engine.step()
    return engine, request


def sent(request: Request, name: str) -> tuple[dict, list[torch.Tensor]]:
    header, tensors = pack(request, name, ticket=7)
    return json.loads(json.dumps(header)), tensors


def another_store(engine: tiny.Placed) -> Store:
    store = Store(kv_shapes(engine.model), engine.store.format, ledger=Ledger(1 << 30), counters=Counters())
    store.wide = engine.store.wide
    return store


FORMS = [laws.options(verb, name) for verb, name in laws.discovered() if verb in ("store", "evict", "skip")]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_rows_arrive_as_they_left(options: dict[str, str]) -> None:
    engine, request = running(**options)
    header, tensors = sent(request, "here")
    store = another_store(engine)
    expected = landing(request.kv)
    kv, _ = unpack(header, tensors, store, "here")
    assert store.ledger.used == kv.bytes == expected - request.kv.drawn  # drawers: as it is resumed
    live = kv.live_bytes
    assert live == request.kv.live_bytes
    if kv.has_blocks:  # rows that keys or values alone need as they were made are there for both, and travel with both
        assert live <= store.counters.kv_bytes_moved <= live + 8 * store.row_bytes
    else:
        assert store.counters.kv_bytes_moved == live
    for ours, theirs in zip(request.kv.layers, kv.layers):
        assert len(ours.slabs) == len(theirs.slabs)
        for a, b in zip(ours.slabs, theirs.slabs):
            assert a.n == b.n and (a.positions is None) == (b.positions is None)
            assert a.positions is None or torch.equal(a.positions[:, : a.n], b.positions[:, : b.n])
            assert all(torch.equal(p[:, : a.n], q[:, : b.n]) for p, q in zip(a.buffer.planes, b.buffer.planes))
    kv.close()
    assert store.ledger.used == 0


def test_the_header_is_plain_and_complete() -> None:
    params = Params(
        max_tokens=9, temperature=0.7, seed=2**62, logit_bias={5: -1.5, 40: 2.0}, stop_tokens=(3, 9), top_k=12
    )
    request = Request([4, 5, 6], params, id="me", slo=SLO(0.5, 0.01))
    request.trace.arrived = 12.25
    request.tokens.append(11)
    request.computed = request.high_water = 3
    request.trace.emitted(12.75, 1)
    twin = request_of(json.loads(json.dumps(request.header())))
    for name in ("id", "tokens", "prompt_len", "computed", "high_water", "params", "slo", "known", "limit"):
        assert getattr(twin, name) == getattr(request, name), name
    assert twin.trace.arrived == 12.25 and twin.out == [11]
    assert twin.first_token == twin.last_token == 12.75 and twin.trace.counts == [1]


def test_plain_drawers_travel_and_others_stay_behind() -> None:
    engine, request = running()
    tensor = torch.arange(6.0).view(2, 3)
    plain = {"a": [1, 2.5, None, True, "x"], 3: (tensor, [tensor[0]]), "empty": {}}
    request.state = {"plain": plain, "number": 4, "mixed": {"t": tensor, "o": object()}, "object": object()}
    header, tensors = sent(request, "here")
    _, state = unpack(header, tensors, another_store(engine), "here")
    assert list(state) == ["plain", "number"] and state["number"] == 4
    assert state["plain"]["a"] == plain["a"] and state["plain"]["empty"] == {}
    assert isinstance(state["plain"][3], tuple) and torch.equal(state["plain"][3][0], tensor)
    assert state["plain"][3][0].data_ptr() != tensor.data_ptr(), "the memory that brought it could not be freed"
    assert len(tensors) == sum(len(piece["planes"]) for piece in request.kv.dump()) + 2


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind() -> None:
    engine, request = running()
    store = another_store(engine)
    header, tensors = sent(request, "here")

    def refuses(words: str, header: dict, tensors: list[torch.Tensor]) -> None:
        with pytest.raises(Misfit, match=words):
            unpack(header, tensors, store, "here")
        assert store.ledger.used == 0

    refuses("layout", header | {"layout": "there"}, tensors)
    refuses("the rows are predicted, but here they are true", header | {"exactness": "predicted"}, tensors)
    refuses("cannot be loaded", header, tensors[:-1])
    refuses("cannot be loaded", header, [t[..., :5] for t in tensors])
    refuses("cannot be loaded", header | {"kv": {"list": header["kv"]["list"][:-1]}}, tensors)


def test_a_layout_names_model_shapes_and_form() -> None:
    def of(verbs: dict[str, str] | None = None, **options: object) -> str:
        engine = tiny.engine(verbs, of=tiny.model(**options))
        return layout(engine.model.config, engine.store)

    assert of() == of(seed=1)  # weights are not looked at
    others = [of(layers=5), of(kv_heads=4), of({"store": "int8"})]
    assert len({of(), *others}) == 4


def test_exactness_of_what_is_sent() -> None:
    assert exactness(running()[1].kv) == "true"
    assert exactness(running(store="int8")[1].kv) == "quantised"
    assert exactness(running(evict="streaming:sinks=2,window=20")[1].kv) == "sparse"


def test_a_move_goes_forward_only() -> None:
    order = [State.RESERVED, State.SENDING, State.DELIVERED, State.OWNED, State.RELEASED]
    jumps = {(State.SENDING, State.OWNED)}  # the word that it was delivered may come too late
    for i, start in enumerate(order):
        for j, end in enumerate(order):
            if j == i + 1 or (end is State.RELEASED and i < 4) or (start, end) in jumps:
                assert advance(start, end) is end
            else:
                with pytest.raises(AssertionError, match=f"from {start.name} to {end.name}"):
                    advance(start, end)
