"""Law 4 on the fast path: in bfloat16, where a step is one native call, batch mates change not one bit of a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.load import load_model
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step import fused
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from tests import seeds, tiny
from tests.laws import axes
from tests.ops.targets import OWN, alike
from tests.watched import passes

LENGTHS = (33, 5, 64, 17, 50)
GREEDY = tiny.greedy(32)
SAMPLED = Params(max_tokens=32, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)
PARAMS = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]  # of each prompt: they are each other's mates


@cache
def model(experts: int) -> Model:
    return Model.load(tiny.checkpoint(hidden=64, experts=experts), dtype=torch.bfloat16)


METHODS: list[dict[str, str]] = [
    {},
    {"evict": "snapkv:keep=8,window=4"},
    {"evict": "snapkv:keep=8,window=4,heads=ada,layers=pyramid"},
    {"evict": "h2o:heavy=8,recent=4,lot=4"},
    {"evict": "snapkv:keep=12,window=4,heads=ada"},
    {"evict": "h2o:heavy=8,recent=4,lot=4,heads=ada"},
    {"evict": "tova:keep=12,lot=4"},
    {"evict": "keyformer:keep=12,lot=4"},
    {"evict": "streaming:sinks=3,window=20"},
    {"evict": "longgen:sinks=3,window=20,weights=random:0"},
    {"evict": "longgen:sinks=3,window=20,weights=none"},
    {"attend": "quest:page=4,budget=12,dense_layers=1"},
    {"attend": "double_sparsity:channels=4,k=12,dense_layers=1,weights=random:0"},
    {"attend": "double_sparsity:channels=4,k=12,dense_layers=1,offload=true,weights=random:0"},
    {"attend": "token_select:k=6,first=2,local=4"},
    {"attend": "token_select:k=6,first=2,local=4,theta=0.1"},
    {"attend": "token_select:k=6,first=2,local=4,chunk=8"},
    {"attend": "token_select:k=6,first=2,local=4,chunk=8,positions=list"},
    {"attend": "instinfer:r=3,k=12"},
    {"attend": "infllm:block=4,init=1,window=4,topk=1,dense_len=0"},
    {"attend": "infllm:block=4,init=1,window=4,topk=1,dense_len=0,weights=random:0"},
    {"attend": "tidal:k=8,dense=0,second=2,every=5"},
    {"attend": "power:block=3,window=2,sinks=1,weights=random:0"},
    {"attend": "power:block=3,window=2,sinks=1,weights=none"},
    {"attend": "zero_tuning:gamma=20,weights=none"},
    {"attend": "loopserve:alpha=0.6,budget=8,every=5,block=4,sample=16,voters=6"},
    {"evict": "rlkv:share=0.6,sinks=2,window=8,weights=random:1"},
    {"skip": "lazyllm:keep=0.3"},
    {"store": "kivi:group=4,residual=8"},
    {"store": "gear:group=4,block=8,rank=1,sparse=0.1"},
    {"store": "zipcache:gap=8,important=0.5"},
    {"store": "zipvl:tau=0.5,window=4,probes=4,gap=16,high=8"},
    {"decode": "block_diffusion:block=8"},
    {"decode": "block_diffusion:block=128,steps=4,selector=static"},
]


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@axes.over(lambda full: [(verbs, experts) for verbs in METHODS for experts in (0, 4)], str, most=24)
def test_independent_of_batch_mates_in_bfloat16(case: tuple[dict[str, str], int]) -> None:
    verbs, experts = case
    of, given, prompts = model(experts), {"schedule": "prefill_first"} | verbs, tiny.prompts(*LENGTHS)
    alone = [tiny.outs(tiny.run(tiny.engine(given, of=of), [p], its))[0] for p, its in zip(prompts, PARAMS)]
    assert tiny.outs(tiny.run(tiny.engine(given, of=of), prompts, PARAMS)) == alone
    late = tiny.engine(given, of=of)  # joining one by one while others decode
    requests = [Request(p, its) for p, its in zip(prompts, PARAMS)]
    for request in requests:
        late.add(request)
        late.step()
        late.step()
    tiny.finish(late, requests)
    assert tiny.outs(requests) == alone


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("most", [65, 100, 150])
def test_steps_of_many_rows_are_cut_and_no_row_changes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of more rows than one native call takes is several, wherever prompts and trees are cut by that."""
    of = model(0)
    assert of.stack is not None
    given, prompts = {"schedule": "prefill_first", "draft": "prompt_lookup:k=3"}, tiny.prompts(33, 5, 64, 200, 90)
    want = [tiny.outs(tiny.run(tiny.engine(given, of=of), [p], GREEDY))[0] for p in prompts]
    monkeypatch.setattr(fused, "MOST", most)
    made = passes(monkeypatch)
    engine = tiny.engine(given, of=of, prefix_cache=False)
    assert tiny.outs(tiny.run(engine, prompts, GREEDY)) == want
    rows = [each.rows for each in made]
    assert max(rows) <= most + fused.SLICE and len(rows) > engine.counters.forwards, "nothing was cut"
    assert sum(rows) == engine.counters.rows


# ---- however many rows are computed together
TEXT = tiny.prompts(150, vocab=4000)[0]
STORES = {"raw": Raw(), "int8": Int8().format()}


@cache
def pocket() -> Model:
    return load_model("pocket", dtype=torch.bfloat16)


@torch.inference_mode()
def in_chunks(sizes: Sequence[int], format: RowFormat) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of TEXT after all layers [150, d], computed in so large pieces, and all that they left in the KV."""
    of, counters, found, at = pocket(), Counters(), list[torch.Tensor](), 0
    store = Store(kv_shapes(of), format, ledger=Ledger(64 << 20), counters=counters)
    kv = store.open(Request([3], GREEDY), len(TEXT))
    dense = Phase("prefill", None, catalog.build("attend", "dense"), None, None)  # type: ignore[arg-type]
    for size in sizes:
        kv.reserve(size)
        span = Span(Request([3], GREEDY), kv, dense, TEXT[at : at + size], range(at, at + size), None)
        found.append(forward(of, [span], counters).x.clone())
        kv.commit(size)
        at += size
    assert at == len(TEXT)
    return torch.cat(found), [p[:, :at] for layer in kv.layers for slab in layer.slabs for p in slab.buffer.planes]


def pieces(size: int) -> list[int]:
    return [min(size, len(TEXT) - at) for at in range(0, len(TEXT), size)]


@pytest.mark.skipif(not alike(OWN), reason="no kernels here that sum alike whatever the number of rows")
@pytest.mark.parametrize("format", STORES.values(), ids=STORES)
def test_a_row_is_the_same_however_many_are_computed_with_it(format: RowFormat) -> None:
    """Bit for bit: a prompt at once, in chunks, and after a cached beginning of any number of blocks."""
    want, kept = in_chunks([150], format)
    for sizes in [*map(pieces, (7, 33, 64, 65, 100)), *([hit, 150 - hit] for hit in range(16, 150, 16))]:
        got, planes = in_chunks(sizes, format)
        assert torch.equal(got, want), sizes
        assert all(torch.equal(one, other) for one, other in zip(planes, kept, strict=True)), sizes


@pytest.mark.skipif(not alike(OWN), reason="no kernels here that sum alike whatever the number of rows")
@pytest.mark.parametrize("verbs", [{}, {"store": "int8"}, {"draft": "prompt_lookup:k=3"}], ids=str)
def test_a_conversation_goes_on_as_if_nothing_had_been_cached(verbs: dict[str, str]) -> None:
    draw = seeds.draw("turns in bfloat16", str(verbs))
    warm, talk = tiny.engine(verbs, of=pocket()), list[int]()
    for _ in range(5):
        talk += [draw.randrange(3, 4000) for _ in range(draw.randint(3, 90))]
        cold = tiny.outs(tiny.run(tiny.engine(verbs, of=pocket(), prefix_cache=False), [talk], GREEDY))
        request = Request(talk, GREEDY)
        warm.add(request)
        while request.left is None:
            warm.step()
        assert [request.out] == cold
        talk += request.out
    assert warm.counters.prefix_hits > 0
