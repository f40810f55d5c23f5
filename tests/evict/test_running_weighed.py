"""Evictors with running scores whose token was a native step: what they make of its weights, by hand."""

from __future__ import annotations

import copy
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.kv.drawers import Room
from phasewise.methods.evict._piece import ScorePiece
from phasewise.methods.evict.h2o import H2O
from phasewise.methods.evict.keyformer import Keyformer, Tempered
from phasewise.methods.evict.tova import Tova
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.span import Span
from tests import seeds, tiny
from tests.engine.engines import step_all
from tests.evict.running import bound
from tests.kv.harness import Walk
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GONE = float("-inf")
PROMPT, ROWS, RECENT = 20, 7, 2


def by_hand(scores: list[float], recent: int, ages: list[int]) -> list[float]:
    """The lowest of the older ones, over their ages, leave until ROWS are left; of equal ones the later."""
    scores = list(scores)
    while sum(score > GONE for score in scores) > ROWS:
        older = [at for at in range(len(scores) - recent) if scores[at] > GONE]
        if not older:
            break
        scores[min(older, key=lambda at: (scores[at] / ages[at], -at))] = GONE
    return scores


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("method", "recent"), [
    (H2O(heavy=ROWS - RECENT, recent=RECENT), RECENT), (H2O(heavy=ROWS - RECENT, recent=RECENT, mean=True), RECENT),
    (Tova(ROWS), 0),
])  # fmt: skip
def test_scores_after_a_token_are_those_by_hand(method: Any, recent: int, seed: int) -> None:
    """Few, enough and too many rows are left, with scores that are often equal."""
    torch.manual_seed(seed)
    model, runtime = tiny.model(), bound(method)
    config, n, together = model.config, PROMPT - 4, isinstance(method, Tova)
    request = Request(list(range(3, 3 + PROMPT)), Params(max_tokens=30))
    request.computed = PROMPT
    heads = 1 if together else config.kv_heads
    state = torch.randint(0, 4, (config.layers, heads, n)) / 4
    for own in state.view(-1, n):
        own[torch.randperm(n)[: int(torch.randint(n - ROWS - 2, n - ROWS + 2, ()))]] = GONE
    request.state[runtime.trail.name] = dict(enumerate(state.clone()))
    request.kv = cast(Any, SimpleNamespace(layers=[SimpleNamespace(slabs=[])]))
    at = torch.rand(config.layers, heads, PROMPT).topk(n).indices.sort(-1).values  # where slots are
    at = torch.cat((at, torch.full_like(at[:, :, :1], PROMPT)), -1)
    places = array("q", [word for own in at.view(-1, n + 1) for word in (own.data_ptr(), 0)])
    flat = SimpleNamespace(places=places.buffer_info()[0])
    span = cast(Span, SimpleNamespace(request=request, trail=None, positions=range(PROMPT, PROMPT + 1), walk=None,
                                      kv=SimpleNamespace(flat=lambda walk: flat)))  # fmt: skip
    told = runtime.weigh(span)
    assert torch.equal(told.room.gone[:, :, :n].bool(), state == GONE) and told.n == n
    weights = torch.randint(0, 4, (config.layers, config.kv_heads, n + 1)) / 4
    told.room.weights[:, :, : n + 1] = weights
    told.told()
    runtime.stayed(span, 1)
    counts = set()
    for layer in range(config.layers):
        after = request.state[runtime.trail.name][layer].tolist()
        for head in range(heads):
            got = weights[layer].sum(0) / config.heads if together else weights[layer, head]
            before = [*state[layer, head].tolist(), 0.0]
            scores = [w if together else s + w for s, w in zip(before, got.tolist(), strict=True)]
            scores = [GONE if s == GONE else w for s, w in zip(before, scores, strict=True)]
            ages = (PROMPT + 1 - at[layer, head]).tolist() if getattr(method, "mean", False) else [1] * (n + 1)
            assert after[head] == by_hand(scores, recent, ages)
            counts.add(sum(score > GONE for score in before) - ROWS)
    assert max(counts) > 0, "a row has to leave"


# ---- tokens as whole steps
PROMPTED = tiny.prompts(150)[0]
TOKENS = tiny.prompts(40, seed=3)[0]
METHODS: dict[str, Any] = {
    "h2o": H2O(heavy=30, recent=10, lot=7),
    "tova": Tova(keep=40, lot=7),
    "keyformer": Keyformer(keep=40, recent=0.25, tau_step=0.05, lot=7),
    "keyformer longer than the prompt": Keyformer(keep=170, tau_step=0.05, lot=3),
    "h2o mean ada in a pyramid": H2O(heavy=30, recent=10, mean=True, heads="ada", layers="pyramid", lot=7),
    "h2o steep pyramid": H2O(heavy=90, recent=10, layers="pyramid", lot=7),  # the first layer keeps the prompt
    "h2o ada": H2O(heavy=30, recent=10, heads="ada", lot=7),
    "h2o ada without recent rows": H2O(heavy=20, recent=0, heads="ada", least=0, lot=1),
    "tova pyramid": Tova(keep=40, layers="pyramid", beta=3, lot=7),
    "keyformer ada": Keyformer(keep=40, recent=0.25, tau_step=0.05, heads="ada", lot=7),
}


def walked(name: str) -> tuple[Walk, Any]:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    runtime = bound(METHODS[name], model)
    one = Walk(model, PROMPTED, evict=runtime)
    one.feed(PROMPTED)
    return one, runtime


def states(one: Walk, runtime: Any) -> list[torch.Tensor]:
    """Layer by layer and head by head."""
    found = runtime.trail.layers(one.request)
    assert sorted(found) == list(range(runtime.layers))
    return [own.clone() for layer in range(runtime.layers) for own in found[layer]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def scratch(own: ScorePiece) -> int:
    """Bytes in which the kernel keeps the scores of a layer: those of its widest, for every query head."""
    heads, heads_q = own.heads
    kept = heads // own.room.share
    widest = max(sum(own.room.rooms[row : row + kept]) for row in range(0, len(own.room.rooms), kept))
    return 4 * widest * own.room.share * (heads_q // heads)


@pytest.mark.parametrize("name", seeds.params(METHODS, 0, "weighed", always=["h2o", "keyformer"]))
def test_whole_steps_leave_what_the_open_path_leaves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, and how many are gone, token after token, with several rows at once in between."""
    (one, runtime), (other, plain), made = walked(name), walked(name), passes(monkeypatch)
    plain.weighable = False
    pieces = [TOKENS[at : at + 1] for at in range(20)] + [TOKENS[20:23]] + [TOKENS[at : at + 1] for at in range(23, 40)]
    for step, piece in enumerate(pieces):
        made.clear()
        one.feed(piece)
        assert len(piece) > 1 or [each.whole for each in made] == [True]
        other.feed(piece)
        for mine, theirs in zip(states(one, runtime), states(other, plain), strict=True):
            assert mine.shape == theirs.shape
            assert int((mine > GONE).sum()) == int((theirs > GONE).sum())
        if step < 3:  # later ones may have given other rows up, where two were nearly equal
            for mine, theirs in zip(states(one, runtime)[:2], states(other, plain)[:2], strict=True):
                both = (mine > GONE) & (theirs > GONE)
                assert int(both.sum()) >= int((mine > GONE).sum()) - 1
                assert (mine - theirs)[both].norm() <= 0.03 * theirs[both].norm()
        assert one.positions(1)[-len(piece) :] == other.positions(1)[-len(piece) :]


@pytest.mark.parametrize("name", ["h2o", "tova pyramid", "keyformer ada"])
def test_a_token_that_failed_leaves_no_trace(name: str) -> None:
    (one, runtime), (other, plain) = walked(name), walked(name)
    for at, token in enumerate(TOKENS):
        for some in ([TOKENS[0]], TOKENS[:4], [token]):
            one.try_(some)
            with torch.inference_mode():
                one.kv.commit(0)
        assert torch.equal(one.feed([token]), other.feed([token]))
        if at % 5 == 0:  # judged, and nothing of it stays
            one.try_([token])
            one.commit([token], 0)
        assert same(states(one, runtime), states(other, plain))


@pytest.mark.parametrize("name", ["h2o ada", "tova", "keyformer"])
def test_forks_share_no_scores(name: str) -> None:
    (one, runtime), (other, plain) = walked(name), walked(name)
    for token in TOKENS[:9]:
        one.feed([token])
        other.feed([token])
    twin = one.fork()
    before = states(one, runtime)
    assert same(before, states(twin, runtime))
    for token in TOKENS[9:20]:
        twin.feed([token])
    assert same(before, states(one, runtime)), "nothing of the twin's"
    for token in reversed(TOKENS):
        assert torch.equal(one.feed([token]), other.feed([token]))
    assert same(states(one, runtime), states(other, plain))


@pytest.mark.parametrize("name", ["keyformer", "h2o mean ada in a pyramid"])
def test_scores_that_travel_go_on_where_they_land(name: str) -> None:
    """Plain tensors do, and their room is made again; it is booked."""
    (one, runtime), (other, plain) = walked(name), walked(name)
    for token in TOKENS[:9]:
        one.feed([token])
        other.feed([token])
    scores = copy.deepcopy(runtime.trail.layers(one.request))
    one.request.state = {runtime.trail.name: scores}
    for token in TOKENS[9:]:
        assert torch.equal(one.feed([token]), other.feed([token]))
    assert same(states(one, runtime), states(other, plain))
    own = one.request.state[runtime.piece]
    taken = own.scores.nbytes + own.room.gone.nbytes + own.room.weights.nbytes + scratch(own)
    rooms = [Room(*layer.room(0), False) for layer in one.kv.layers]
    assert taken <= sum(runtime.drawer(i, one.kv.layers[i].shape, room) for i, room in enumerate(rooms))


@pytest.mark.parametrize("name", ["h2o mean ada in a pyramid", "tova pyramid"])  # fmt: skip
def test_what_scores_lie_in_is_booked(name: str) -> None:
    """Whatever is dropped, forks or is preempted, they are within the bytes booked for drawers."""
    model, method = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), METHODS[name]
    runtime, seen, turns = bound(method, model), [0], [0]
    knobs = ",".join(f"{key}={value}" for key, value in vars(method).items())
    made = tiny.engine({"evict": f"{runtime.way.name}:{knobs}"}, of=model, prefix_cache=False)
    assert isinstance(made, Engine)
    first = Request(PROMPTED[:120], tiny.greedy(70))
    requests = [first, first.sibling(1), Request(PROMPTED[40:], tiny.greedy(60))]
    for request in requests:
        made.add(request)

    def each() -> None:
        turns[0] += 1
        for request in requests:
            own = request.state.get(runtime.piece)
            if request.kv is not None and own is not None:
                seen[0] += 1
                planes = own.scores, own.room.gone, own.room.weights
                assert sum(plane.nbytes for plane in planes) + scratch(own) <= request.kv.drawn
        if turns[0] in (20, 35):
            made.room.preempt(made.running[-1])

    step_all(made, requests, each)
    assert seen[0] > 100 and made.counters.preemptions == 2 and made.ledger.used == 0


def test_temperatures_have_the_bits_of_the_open_path() -> None:
    request = Request(PROMPTED, Params(seed=2**63 - 3))
    for knobs in (Keyformer(), Keyformer(tau=0.3, tau_step=0.07), Keyformer(noise=False, tau=1.7)):
        for row in range(len(PROMPTED), 900):
            part = SimpleNamespace(size=(2, 3), heads=None, positions=torch.zeros(1, 3, dtype=torch.int64))
            span = SimpleNamespace(request=request, positions=range(row, row + 1))
            at = torch.tensor([row])
            read = SimpleNamespace(span=span, part=part, q=torch.zeros(1), q_positions=at, layer=0)
            want, got = Tempered(knobs).shaping(cast(Any, read), [0]), Tempered(knobs).doubt(cast(Any, span))
            assert got.inverse == float(want.inverse[0])
            assert got.seed == (None if want.seeds is None else int(want.seeds[0]))
