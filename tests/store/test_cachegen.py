"""store.cachegen: rounded once, when the prompt is complete, wherever that is; nothing silent, nothing sent twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.binding import label
from phasewise.engine.engine import Engine
from phasewise.engine.invariants import check
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.handoff import Header, Misfit, layout, pack, unpack
from phasewise.methods.store._cachegen.chunked import Chunked
from phasewise.methods.store.cachegen import CacheGen
from phasewise.methods.store.zipcache import SUMS
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.header import request_of
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)

PROMPTS = tiny.prompts(40, 90, 5, 64, 33)
N = 16
SAMPLED = Params(max_tokens=N, ignore_eos=True, temperature=0.8, top_p=0.95, seed=11)
Message = tuple[Header, list[torch.Tensor]]


def run(verbs: Mapping[str, str], params: Params | None = None, **limits: Any) -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(dict(verbs), **limits), PROMPTS, params or tiny.greedy(N)))


def apart(verbs: Mapping[str, str]) -> dict[str, str]:
    return {**verbs, "place": "disaggregated"}


def engine(store: str, *phases: str, **verbs: str) -> Engine:
    methods = parse({"store": store, **verbs})
    return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).engine(phases, 1.0)


@torch.inference_mode()
def computed(store: str, prompt: list[int], **verbs: str) -> tuple[Engine, Request]:
    """A prompt done, in an engine that only does that."""
    one, request = engine(store, "prefill", **verbs), Request(prompt, tiny.greedy(N))
    one.add(request)
    while request not in one.departed:
        one.step()
    return one, request


def sent(one: Engine, request: Request) -> Message:
    header, tensors = pack(request, layout(one.model.config, one.store), ticket=1)
    return json.loads(json.dumps(header)), tensors


@torch.inference_mode()
def taken(other: Engine, message: Message) -> Request:
    twin = request_of(message[0]["request"])
    twin.kv, twin.state = unpack(*message, other.store, layout(other.model.config, other.store))
    other.resume(twin)
    return twin


def finished(other: Engine, request: Request) -> list[int]:
    while request.left is None:
        other.step()
        check(other)
    other.forget_prefixes()
    assert other.kv_bytes == 0
    return tiny.outs([request])[0]


# ---- the same tokens wherever a request runs
@pytest.mark.parametrize(
    ("knobs", "params"),
    [("level=1", tiny.greedy(N)), ("level=4,chunk=16", SAMPLED), ("level=3,group=10,chunk=25", SAMPLED)], ids=str,
)  # fmt: skip
def test_apart_as_in_one_place(knobs: str, params: Params) -> None:
    verbs = {"store": f"cachegen:{knobs}"}
    placed = tiny.engine(apart(verbs))
    requests = tiny.run(placed, PROMPTS, params)
    assert tiny.outs(requests) == run(verbs, params) != run({}, params)
    assert placed.counters.handoffs == len(PROMPTS) and placed.counters.recomputed == 0


def test_level_0_is_dense() -> None:
    for verbs in ({"store": "cachegen:level=0"}, apart({"store": "cachegen:level=0"})):
        assert run(verbs) == run({}) == [oracle.greedy(tiny.checkpoint(), prompt, N)[0] for prompt in PROMPTS]
    assert engine("cachegen:level=0", "prefill").store.wire is None


@pytest.mark.parametrize(
    "verbs",
    [
        {"attend": "quest:page=4,budget=16,dense_layers=1", "draft": "prompt_lookup", "verify": "match"},
        {"decode": "block_diffusion:block=4"},
        {"evict": "snapkv:keep=0.3,window=6", "skip": "unified:speedup=2,weights=none", "schedule": "sarathi:budget=7"},
    ],
    ids=str,
)
def test_over_other_methods(verbs: dict[str, str]) -> None:
    """Rows given up, layers freed, pages chosen, blocks and drafts: all go on where they were."""
    verbs = {"store": "cachegen:level=3,chunk=16", **verbs}
    assert run(apart(verbs)) == run(verbs)


RESTS = {
    "int8": "int8",
    "kivi": "(kivi:bits=2,group=4,residual=8)",
    "gear": "(gear:bits=2,group=4,block=8)",
    "zipcache": "(zipcache:gap=8,important=0.5)",
}


@pytest.mark.parametrize(("rest", "level"), zip(RESTS, [2, 4, 4, 2]))
def test_over_rows_in_another_form(rest: str, level: int) -> None:
    """Rounded by the wire once, then kept in that form: here or there, which is neither of the two alone."""
    store = f"cachegen:level={level},chunk=16,rest={RESTS[rest]}"
    placed = tiny.engine(apart({"store": store}))
    requests = tiny.run(placed, PROMPTS, tiny.greedy(N))
    alone = [run({"store": one}) for one in (f"cachegen:level={level},chunk=16", RESTS[rest].strip("()"))]
    assert tiny.outs(requests) == run({"store": store}) and tiny.outs(requests) not in alone
    assert placed.counters.handoffs == len(PROMPTS) and placed.counters.recomputed == 0
    assert run({"store": f"cachegen:level=0,rest={RESTS[rest]}"}) == alone[1]


@pytest.mark.parametrize("rest", RESTS)
def test_lost_preempted_and_tight_over_another_form(rest: str) -> None:
    store = f"cachegen:level=4,chunk=16,rest={RESTS[rest]}"
    want, (one, request) = run({"store": store})[1], computed(store, PROMPTS[1])
    message = sent(one, request)
    other = engine(store, "prefill", "decode")
    with pytest.raises(Misfit):
        taken(other, (message[0], [*message[1][:-1], message[1][-1][:-1]]))
    twin = taken(other, message)
    for _ in range(5):
        other.step()
    other.room.preempt(twin)
    assert finished(other, twin) == want and other.counters.preemptions == 1
    with pytest.raises(Misfit, match="layout"):
        taken(engine("cachegen:level=4,chunk=16", "prefill", "decode"), message)


@pytest.mark.parametrize("rest", ["slab", *RESTS])
def test_what_travels_is_what_cachegen_sends(rest: str) -> None:
    """As many bytes, whatever form rows are kept in; and a sum of each row and layer, where they tell classes apart."""
    sizes, sums = [], 4 * 400 * len(tiny.model().config.attention) if rest == "zipcache" else 0
    for store in ("cachegen:level=2", f"cachegen:level=2,rest={RESTS.get(rest, rest)}"):
        one, request = computed(store, tiny.prompts(400)[0])
        sizes.append(sum(tensor.nbytes for tensor in sent(one, request)[1]))
    assert sizes[1] - sums == pytest.approx(sizes[0], rel=0.02)


def test_a_form_that_does_not_go_below_is_named() -> None:
    with pytest.raises(UserError, match="choose slab, int8, kivi, gear or zipcache"):
        run({"store": "cachegen:rest=cachegen"})


def test_what_the_form_at_rest_does_not_go_with_is_blamed_on_it() -> None:
    with pytest.raises(UserError, match="store cachegen:rest=kivi packs finished rows .*Leave out --evict, or choose"):
        run({"store": f"cachegen:rest={RESTS['kivi']}", "evict": "snapkv"})
    assert label("store", CacheGen()) == "store cachegen"


def test_what_matters_travels_with_the_rows() -> None:
    """Rows are put in classes by sums of the prompt's attention, which is not computed where they arrive: without them
    no row could be packed. Another method that gives rows up has no place beside them, and no prefix is shared."""
    store = f"cachegen:level=2,chunk=16,rest={RESTS['zipcache']}"
    one, request = computed(store, PROMPTS[1])
    assert one.store.tree is None and computed("cachegen:level=2", PROMPTS[1])[0].store.tree is not None
    header, tensors = sent(one, request)
    assert SUMS in header["state"]
    other = engine(store, "prefill", "decode")
    twin = taken(other, (header, tensors))
    while twin.n_out < 4:
        other.step()
    assert twin.kv is not None and all(layer.blocks is not None and layer.blocks.active for layer in twin.kv.layers)
    with pytest.raises(UserError, match="store cachegen:rest=zipcache also fills evict: leave out --evict snapkv"):
        run({"store": store, "evict": "snapkv:keep=0.5"})


def test_bfloat16() -> None:
    model, verbs = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), {"store": "cachegen:level=2,chunk=16"}
    tokens = [tiny.outs(tiny.run(tiny.engine(v, of=model), PROMPTS, tiny.greedy(N))) for v in (verbs, apart(verbs), {})]
    assert tokens[0] == tokens[1] != tokens[2]


def test_lost_and_damaged_moves_change_no_token() -> None:
    """What does not arrive is computed again from tokens, and rounded like what did."""
    store, prompt = "cachegen:level=4,chunk=16", PROMPTS[1]
    want = run({"store": store})[1]
    one, request = computed(store, prompt)
    header, tensors = sent(one, request)
    other = engine(store, "prefill", "decode")
    for damaged in (
        [*tensors[:-1], tensors[-1][:-1]],
        tensors[:-1],
        [tensors[0] ^ 1, *tensors[1:]],
        [t.to(torch.float32) for t in tensors],
    ):
        with pytest.raises(Misfit):
            taken(other, (header, damaged))
        assert other.kv_bytes == 0
    again = request_of(header["request"])
    again.computed = 0
    other.add(again)
    assert finished(other, again) == want
    assert finished(other, taken(other, (header, tensors))) == want


def test_preempted_after_a_move() -> None:
    store = "cachegen:level=4,chunk=16"
    one, request = computed(store, PROMPTS[1])
    other = engine(store, "prefill", "decode")
    twin = taken(other, sent(one, request))
    for _ in range(5):
        other.step()
    other.room.preempt(twin)
    assert finished(other, twin) == run({"store": store})[1]
    assert other.counters.preemptions == 1


# ---- what the rows are
def test_rows_are_rounded_once_and_say_so() -> None:
    """A second move carries them bit for bit, whatever was decoded in between."""
    store = "cachegen:level=4,chunk=16"
    one, request = computed(store, PROMPTS[1])
    first = sent(one, request)
    assert first[0]["exactness"] == "quantised" and first[0]["rounded"] and first[0]["wire"]
    other = engine(store, "prefill", "decode")
    twin = taken(other, first)
    for _ in range(4):
        other.step()
    second = sent(other, twin)
    assert second[0]["exactness"] == "quantised" and second[0]["rounded"] and not second[0]["wire"]
    assert twin.kv is not None
    for mine, piece in zip(second[1][::2], twin.kv.dump()):
        assert torch.equal(mine, piece["planes"][0])
    third = engine(store, "prefill", "decode")
    moved = taken(third, second)
    assert moved.kv is not None and moved.kv.rounded
    assert finished(third, moved) == run({"store": store})[1]


def test_prompts_enter_the_prefix_cache_as_computed() -> None:
    """Law 10: what was rounded never does; what is found there is rounded anew, to the same."""
    store, prompt = "cachegen:level=4,chunk=16", PROMPTS[1]
    trees = []
    for name in (store, "slab"):
        here = engine(name, "prefill", "decode")
        request = Request(prompt, tiny.greedy(4))
        here.add(request)
        while request.left is None:
            here.step()
        assert here.store.tree is not None
        trees.append([plane for node in here.store.tree.nodes() for layer in node.planes for plane in layer])
        again = Request(prompt, tiny.greedy(4))
        here.add(again)
        while again.left is None:
            here.step()
        assert here.counters.prefix_hits == 64 and again.out == request.out
    assert len(trees[0]) == len(trees[1]) > 0 and all(torch.equal(a, b) for a, b in zip(*trees))
    one, request = computed(store, prompt)
    other = engine(store, "prefill", "decode")
    finished_tokens = finished(other, taken(other, sent(one, request)))
    assert len(finished_tokens) == N and other.store.tree is not None and not other.store.tree.nodes()


def test_fewer_bytes_on_the_way() -> None:
    sizes = {}
    for store in ("slab", "int8", *(f"cachegen:level={level}" for level in range(5))):
        one, request = computed(store, tiny.prompts(400)[0])
        sizes[store] = sum(tensor.nbytes for tensor in sent(one, request)[1])
    order = list(sizes.values())
    assert sizes["slab"] == sizes["cachegen:level=0"] > sizes["int8"] > sizes["cachegen:level=1"]
    assert order[3:] == sorted(order[3:], reverse=True)
    assert sizes["slab"] / sizes["cachegen:level=2"] > 5, "of float32, for 24 numbers a row and their scale"


def test_other_knobs_do_not_fit() -> None:
    one, request = computed("cachegen:level=2", PROMPTS[0])
    for store in ("cachegen:level=3", "cachegen:level=2,chunk=16", "cachegen:level=2,group=10", "slab"):
        with pytest.raises(Misfit, match="layout"):
            taken(engine(store, "prefill", "decode"), sent(one, request))


# ---- the level is chosen
AUTO = "cachegen:level=auto,chunk=16"


def test_a_prompt_kept_at_home_is_not_touched() -> None:
    assert run({"store": AUTO}) == run({})


def test_a_fast_link_carries_rows_as_they_are() -> None:
    placed = tiny.engine(apart({"store": AUTO + ",bandwidth=1e12"}))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == run({})
    assert placed.counters.recomputed == 0 and placed.counters.handoffs == len(PROMPTS)


def test_over_a_hopeless_link_prompts_are_computed_again() -> None:
    """Which is exact, and counted."""
    placed = tiny.engine(apart({"store": AUTO + ",bandwidth=1,deadline=0.001"}))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == run({})
    assert placed.counters.recomputed == sum(map(len, PROMPTS)) and placed.counters.handoffs == len(PROMPTS)


def planned(plan: list[int | None], prompt: list[int] = PROMPTS[1], **verbs: str) -> tuple[Engine, Request]:
    one, request = computed(AUTO, prompt, **verbs)
    wire = one.store.wire
    assert isinstance(wire, Chunked)
    wire.pace.plan = lambda rows, numbers, seconds, may_stop: plan if may_stop else [4] * len(rows)  # type: ignore
    return one, request


@pytest.mark.parametrize("cut", [0, 3, 6])
def test_a_suffix_is_computed_again(cut: int) -> None:
    """Exact rows first: then what follows is computed just as it would have been, and may be remembered."""
    message = sent(*planned([0] * cut + [None] * (6 - cut)))
    rows = min(16 * cut, 90)
    assert message[0]["request"]["computed"] == rows and message[0]["exactness"] == "true"
    other = engine(AUTO, "prefill", "decode")
    twin = taken(other, message)
    assert twin.computed == rows and twin.prefilling == (cut < 6)
    while twin.prefilling:
        other.step()
        check(other)
    assert other.store.tree is not None and len(other.store.tree.nodes()) == (2 if cut < 6 else 0)
    assert finished(other, twin) == run({})[1]
    assert other.counters.recomputed == 90 - rows


def test_a_suffix_computed_from_rounded_rows_is_private() -> None:
    message = sent(*planned([4, 4, None, None, None, None]))
    other = engine(AUTO, "prefill", "decode")
    twin = taken(other, message)
    while twin.prefilling:
        other.step()
    assert twin.kv is not None and twin.kv.rounded
    assert other.store.tree is not None and not other.store.tree.nodes()
    assert len(finished(other, twin)) == N


def test_rows_with_anything_beside_them_are_always_sent() -> None:
    one, request = planned([None] * 6)
    request.state["other"] = {"plain": 1}
    assert sent(one, request)[0]["kv"] and "computed" in sent(one, request)[0]["request"]
    assert sent(one, request)[0]["request"]["computed"] == 90
    one, request = planned([None] * 6)
    assert request.kv is not None
    request.kv.keep(0, torch.arange(0, 90, 2))
    header, _ = sent(one, request)
    assert header["request"]["computed"] == 90 and header["exactness"] == "sparse" and header["rounded"]


# ---- knobs
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"group": 0}, "group=0 must be at least 1"),
        ({"deadline": 0.0}, "deadline=0.0 must be positive"),
        ({"bandwidth": -1.0}, "bandwidth=-1.0 must be positive"),
        ({"bandwidth": float("inf")}, "bandwidth=inf must be positive"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        CacheGen(**knobs)


def test_a_cut_must_not_split_a_block() -> None:
    verbs = {"decode": "block_diffusion:block=4"}
    with pytest.raises(UserError, match="chunk=10 must be a multiple of the decode method's block of 4"):
        tiny.engine({"store": "cachegen:level=auto,chunk=10", **verbs})
    tiny.engine({"store": "cachegen:level=2,chunk=10", **verbs})
    message = sent(*planned([0, 0, None, None], PROMPTS[3], **verbs))
    other = engine(AUTO, "prefill", "decode", **verbs)
    assert message[0]["request"]["computed"] == 32
    assert finished(other, taken(other, message)) == run(verbs)[3]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:  # noqa: F811
    """Said before anything is loaded; level 0 and everything else need it not."""
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(UserError, match=r"pip install 'phasewise\[cachegen\]'"):
        CacheGen()
    assert CacheGen(level=0).level == 0
    said = cli("run", "x", "--store", "cachegen:level=2")
    assert said.code == 2 and "constriction" in said.err and said.err.startswith("error: ")
    assert cli("methods", "store").code == 0
