"""attend.hydragen: dense attention's results from fewer rows, whoever shares what with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.batch import Span, ancestors
from phasewise.errors import UserError
from phasewise.forward import Step
from phasewise.kv.buffer import Codec, KVShape, Ledger, Raw
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.prefix import Node
from phasewise.kv.store import KV, Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.hydragen import Hydragen
from phasewise.methods.store.int8 import Int8
from phasewise.model.config import AttentionSpec
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.spans import Common, reaches
from phasewise.phase import Phase
from phasewise.place import Placed
from phasewise.read import Read, attend_all
from phasewise.recipe import kv_shapes
from phasewise.request import Params, Request
from phasewise.trace import Counters
from phasewise.whole import _commons
from tests import oracle, tiny
from tests.methods_kv.harness import drafting, mixed, sliding

ON = {"attend": "hydragen"}
SHARED, OTHER = tiny.prompts(200, 150, seed=3)
EARLY = {"attend": "hydragen:rows=32"}


def ends(*lengths: int, seed: int = 5) -> list[list[int]]:
    return tiny.prompts(*lengths, seed=seed)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.ops.native.spans.library", lambda: None)


# ---- one layer: equal to a softmax over everything, in float64
LEVELS = {
    "one": [Common((0, 1, 2, 3), 0, 96, 0)],
    "two": [Common((0, 1, 2, 3), 0, 64, 0), Common((0, 2), 64, 192, 1), Common((1, 3), 64, 128, 1)],
    "three": [Common((0, 1, 2, 3), 0, 64, 0), Common((1, 2, 3), 64, 192, 1), Common((2, 3), 192, 1152, 2)],
    "some": [Common((3, 1), 0, 128, 0)],
}
OWN = (0, 5, 130, 1)  # rows behind what is shared, before the fresh ones
FRESH = (1, 4, 1, 6)


def reads_of(commons: Sequence[Common], softcap: float | None, codec: Codec | None = None) -> list[Read]:
    """Reads of four spans, the last one a tree, at a layer of 6 query heads and 2 KV heads."""
    gen = torch.Generator().manual_seed(1)
    shape, codec, counters = KVShape(2, 16, torch.float32), codec or Raw(), Counters()
    config = SimpleNamespace(attention=[AttentionSpec(window=None, scale=0.25, softcap=softcap)])
    step: Any = SimpleNamespace(model=SimpleNamespace(config=config), counters=counters, masks={}, notes={})
    long = max(reaches(commons, 4)) + max(OWN)
    rows = [torch.randn(2, 2, long, 16, generator=gen) for _ in range(4)]  # k and v
    for common in commons:
        for m in common.members:
            rows[m][:, :, common.start : common.stop] = rows[common.members[0]][:, :, common.start : common.stop]
    reads = []
    for reach, own, fresh, (k, v) in zip(reaches(commons, 4), OWN, FRESH, rows):
        n, layer = reach + own, LayerKV(shape, codec, Ledger(1 << 40), long + 8)
        if n:
            layer.append(k[:, :n], v[:, :n], range(n))
            layer.commit(n)
        sees = ancestors([-1, 0, 0, 1, 1, 2]) if fresh == 6 else None
        positions = [n, n + 1, n + 1, n + 2, n + 2, n + 2] if fresh == 6 else range(n, n + fresh)
        layer.append(*torch.randn(2, 2, fresh, 16, generator=gen), positions)
        kv: Any = SimpleNamespace(layers=[layer])
        span = Span(Request([3]), kv, None, [3] * fresh, positions, sees)  # type: ignore[arg-type]
        reads.append(Read(step, 0, span, torch.randn(fresh, 6, 16, generator=gen), layer.read()[0]))
    return reads


def exact(read: Read) -> Tensor:
    """Softmax over all visible rows at once, in float64."""
    rows, n = read.q.shape[0], read.part.n
    own = torch.ones(rows, rows).tril().bool() if read.span.sees is None else read.span.sees
    seen = torch.cat((torch.ones(rows, n).bool(), own), 1)
    q = read.q.double().view(rows, 2, 3, 16)
    logits = torch.einsum("rhgd,hnd->hgrn", q, read.part.k.double()) * 0.25
    softcap = read.step.model.config.attention[0].softcap
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hgrn,hnd->rhgd", weights, read.part.v.double()).reshape(rows, 6, 16)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("levels", LEVELS)
def test_equals_attention_over_everything(
    levels: str, path: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        without_library(monkeypatch)
    elif native.library() is None:
        pytest.skip("no native kernels here")
    reads = reads_of(LEVELS[levels], softcap)
    for got, read in zip(attend_all(reads, LEVELS[levels]), reads):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact(read), atol=2e-6, rtol=1e-5)
    rows = sum(read.part.size[1] for read in reads) - sum(common.saved for common in LEVELS[levels])
    assert reads[0].step.counters.kv_bytes_read == rows * 2 * (16 + 16) * 4  # 2 heads, keys and values, float32


class Counting:
    """int8 rows, and how many of them were decoded."""

    def __init__(self) -> None:
        self.codec, self.rows = Int8().codec(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.rows += planes[0].shape[1]
        return self.codec.decode(planes, dtype)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("levels", LEVELS)
def test_common_rows_are_decoded_once(levels: str) -> None:
    codec: Any = Counting()
    reads = reads_of(LEVELS[levels], None, codec)
    codec.rows = 0
    results = attend_all(reads, LEVELS[levels])
    assert codec.rows == sum(read.part.size[1] for read in reads) - sum(c.saved for c in LEVELS[levels])
    for got, read in zip(results, reads):
        torch.testing.assert_close(got.double(), exact(read), atol=2e-6, rtol=1e-5)


# ---- who shares what
def branch(at: Node | None, names: str) -> list[Node]:
    """Nodes of 32 rows below `at`, one for each letter; the same letters give the same nodes."""
    path = []
    node = at or ROOT
    for name in names:
        key = name.encode()
        node = node.children.setdefault(key, Node(key, node, [], 32))
        path.append(node)
    return path


ROOT = Node(b"", None, [], 0)


def found(method: Hydragen, *paths: str) -> list[Common]:
    spans: list[Any] = [SimpleNamespace(kv=SimpleNamespace(nodes=branch(None, path))) for path in paths]
    return sorted(method.commons(spans))


def test_levels_follow_the_tree() -> None:
    method = Hydragen(rows=32)
    assert found(method, "abcd", "abcd", "abxy", "", "q") == [
        Common((0, 1), 64, 128, 1),
        Common((0, 1, 2), 0, 64, 0),
    ]
    assert found(method, "abcd", "abce", "xbcd", "xbcd") == [Common((0, 1), 0, 96, 0), Common((2, 3), 0, 128, 0)]
    assert found(method, "abc", "abcdef", "abcdef", "abcdeg") == [
        Common((0, 1, 2, 3), 0, 96, 0),
        Common((1, 2), 160, 192, 2),
        Common((1, 2, 3), 96, 160, 1),
    ]
    assert found(method) == [] and found(method, "abc") == [] and found(method, "abc", "", "xyz") == []


def test_levels_that_do_not_pay_are_left_to_those_above() -> None:
    assert found(Hydragen(), "abcde", "abcde") == [Common((0, 1), 0, 128, 0)]  # whole blocks of 64
    assert found(Hydragen(), "abcde", "abcde", "axxx") == [Common((0, 1), 0, 128, 0)]
    assert found(Hydragen(), "abcde", "abcde", "abxx") == [Common((0, 1), 64, 128, 1), Common((0, 1, 2), 0, 64, 0)]
    assert found(Hydragen(rows=128), "abcde", "abcde", "abxx") == [Common((0, 1), 0, 128, 0)]
    assert found(Hydragen(rows=129), "abcde", "abcde") == []
    assert found(Hydragen(rows=20), "abc", "abcd") == [Common((0, 1), 0, 80, 0)]
    assert found(Hydragen(sharers=3, rows=32), "abcd", "abcd", "abce") == [Common((0, 1, 2), 0, 96, 0)]
    assert found(Hydragen(sharers=4), "abcd", "abcd", "abce") == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=7), max_size=9), st.integers(2, 4), st.sampled_from([32, 64, 96]))
def test_whatever_the_tree(paths: list[str], sharers: int, rows: int) -> None:
    """Only alike rows are shared; a span's levels join without gaps; with the finest knobs every node is read once."""
    commons = found(Hydragen(sharers, rows), *paths)
    for common in commons:
        assert len(common.members) >= sharers and common.stop - common.start >= rows
        ways = {paths[m][: -(-common.stop // 32)] for m in common.members}
        assert len(ways) == 1 and common.stop <= 32 * len(ways.pop())
    for m in range(len(paths)):
        mine = sorted((c.level, c.start, c.stop) for c in commons if m in c.members)
        assert [level for level, _, _ in mine] == list(range(len(mine)))
        assert [start for _, start, _ in mine] == [0, *(stop for _, _, stop in mine)][: len(mine)]
    if (sharers, rows) == (2, 32):
        alone = 32 * sum(len(path) for path in paths)
        once = 32 * len({path[: i + 1] for path in paths for i in range(len(path))})
        assert alone - sum(common.saved for common in commons) == once


@pytest.mark.parametrize("knobs", [{"sharers": 1}, {"rows": 0}], ids=str)
def test_knobs_that_make_no_sense(knobs: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"hydragen: {next(iter(knobs))}="):
        Hydragen(**knobs)


# ---- steps of a model
class Party:
    """Requests with one store, stepped together by hand; a prompt is remembered when it is complete."""

    def __init__(self, model: Model, attend: Any, codec: Codec | None = None) -> None:
        self.model, self.counters = model, Counters()
        self.phase = Phase("decode", None, attend)  # type: ignore[arg-type]
        self.store = Store(
            kv_shapes(model), codec or Raw(), ledger=Ledger(1 << 40), counters=self.counters, prefix_key="one"
        )
        self.requests: list[Request] = []

    def join(self, prompt: Sequence[int]) -> None:
        """A request whose prompt is computed alone, as far as it was not before."""
        request = Request(prompt, Params(max_tokens=1 << 20))
        request.kv = self.store.open(request, len(prompt) + 200)
        self.requests.append(request)
        at = len(self.requests) - 1
        self.step({at: list(prompt[request.computed :])})
        self.store.remember(request)

    @torch.inference_mode()
    def step(self, rows: dict[int, list[int]]) -> Tensor:
        """{request: tokens} -> logits [T, V], all of them committed."""
        spans = []
        for r, tokens in rows.items():
            request, kv = self.requests[r], self.kv(r)
            kv.reserve(len(tokens))
            spans.append(Span(request, kv, self.phase, tokens, range(request.computed, request.computed + len(tokens))))
        x = Step(self.model, spans, self.counters).run().x
        for span in spans:
            span.kv.commit(span.rows)
            span.request.computed += span.rows
        return self.model.head(x)

    def kv(self, r: int) -> KV:
        kv = self.requests[r].kv
        assert kv is not None
        return kv

    def read(self, rows: dict[int, list[int]]) -> int:
        """(row, layer) pairs of KV that a step reads."""
        before = self.counters.kv_bytes_read
        self.step(rows)
        return (self.counters.kv_bytes_read - before) // (self.store.row_bytes // len(self.store.shapes))


def half(**options: Any) -> Model:
    return Model.load(tiny.checkpoint(**options), dtype=torch.bfloat16)


MODELS: dict[str, Callable[[], Model]] = {"float32": tiny.model, "bfloat16": half}
PROMPTS = [SHARED + ends(n)[0] for n in (9, 30, 1)] + [SHARED[:130] + OTHER[:50], OTHER, [*OTHER, 7]]
ONE = {i: [5 + i] for i in range(6)}
FEW = {0: [4, 5, 6], 1: [7], 2: [8] * 12, 3: [9, 3], 4: [11], 5: [12] * 16}


def party(model: str, attend: Any) -> Party:
    made = Party(MODELS[model](), attend)
    for prompt in PROMPTS:
        made.join(prompt)
    return made


@pytest.mark.parametrize("model", MODELS)
def test_rows_read_are_the_traffic_model(model: str) -> None:
    """P + sum S instead of B P + sum S, level by level: 128 rows of four requests, 64 more of three, 128 of two."""
    layers = tiny.model().config.layers
    for rows in (ONE, FEW):
        dense, shared = party(model, Dense()), party(model, Hydragen())
        whole = sum(len(prompt) + len(rows[i]) for i, prompt in enumerate(PROMPTS))
        assert dense.read(rows) == whole * layers
        assert shared.read(rows) == (whole - 3 * 128 - 2 * 64 - 1 * 128) * layers
        assert shared.read({0: [5]}) == (len(PROMPTS[0]) + len(rows[0]) + 1) * layers  # nobody to share with
        assert shared.read({1: [5], 4: [6]}) == dense.read({1: [5], 4: [6]})  # nothing to share


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round otherwise")
@pytest.mark.parametrize("model", MODELS)
def test_natively_not_a_bit_differs_from_dense(model: str) -> None:
    dense, shared = party(model, Dense()), party(model, Hydragen())
    for rows in (ONE, FEW, ONE, {5: [3], 0: [4], 4: [9], 2: [8]}):
        assert torch.equal(shared.step(rows), dense.step(rows))


@pytest.mark.parametrize("model", MODELS)
def test_without_native_kernels_only_roundings_differ(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch)
    dense, shared = party(model, Dense()), party(model, Hydragen())
    dense.model.stack = shared.model.stack = None
    for rows in (ONE, FEW):
        got, want = shared.step(rows), dense.step(rows)
        assert float((got - want).norm() / want.norm()) < (1e-5 if model == "float32" else 0.03)


def test_who_computed_a_prompt_shares_it_too_and_whole_blocks_only() -> None:
    made = Party(tiny.model(), Hydragen())
    made.join(SHARED)
    made.join(SHARED[:127] + OTHER[:60])  # 96 rows of whole nodes, of which 64 are whole blocks of the kernel
    assert [len(request.kv.nodes) for request in made.requests] == [6, 5]  # type: ignore[union-attr]
    assert made.counters.prefix_hits == 96
    layers = tiny.model().config.layers
    assert made.read({0: [5], 1: [6]}) == (201 + 188 - 64) * layers
    finer = Party(tiny.model(), Hydragen(rows=32))
    finer.join(SHARED)
    finer.join(SHARED[:127] + OTHER[:60])
    assert finer.read({0: [5], 1: [6]}) == (201 + 188 - 96) * layers


def test_long_slices_read_alone() -> None:
    made = party("float32", Hydragen())
    layers = tiny.model().config.layers
    rows = {0: [5] * 40, 1: [6], 2: [7]}
    whole = sum(len(PROMPTS[i]) + len(tokens) for i, tokens in rows.items())
    assert made.read(rows) == (whole - 192) * layers  # the other two share


@pytest.mark.parametrize("name", ["sliding", "mixed", "softcap"])
def test_layers_of_other_kinds(name: str) -> None:
    """Where a window has begun to move nothing is shared; scores may be capped."""
    if name == "sliding":
        model, sharing = sliding(150, 4), 0
    elif name == "mixed":
        model, sharing = mixed(150), 2
    else:
        model, sharing = Model.load(tiny.checkpoint()), 4
        model.config = replace(model.config, attention=[replace(s, softcap=5.0) for s in model.config.attention])
    logits, read = [], []
    for attend in (Dense(), Hydragen()):
        made = Party(model, attend)
        for prompt in PROMPTS[:3]:
            made.join(prompt)
        before = made.counters.kv_bytes_read
        logits.append(torch.cat([made.step({0: [4], 1: [5, 6, 7], 2: [8]}), made.step({2: [3], 0: [9]})]))
        read.append(made.counters.kv_bytes_read - before)
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
    of_row = 2 * 2 * tiny.model().config.head_dim * 4
    assert read[0] - read[1] == sharing * (2 * 192 + 192) * of_row


def test_whole_steps_share_by_method_and_not_under_a_window() -> None:
    """Spans are numbered as in the step; a method shares among its own."""
    paths: list[Any] = [SimpleNamespace(nodes=branch(None, path)) for path in ("abcd", "abcd", "abcd", "abcd", "ab")]
    one, other = Hydragen(), Hydragen(rows=128)
    spans: list[Any] = [
        SimpleNamespace(kv=kv, phase=SimpleNamespace(attend=attend))
        for kv, attend in zip(paths, (one, other, Dense(), other, one))
    ]
    assert sorted(_commons(spans, 200, [None, 200])) == [Common((0, 4), 0, 64, 0), Common((1, 3), 0, 128, 0)]
    assert _commons(spans, 200, [None, 199]) == []


# ---- engines
FAMILY = [SHARED + end for end in ends(3, 20, 41, 8)] + [SHARED[:100] + end for end in ends(30, 5, seed=6)]
FAMILY += ends(60, 33)


def outs(verbs: dict[str, str], prompts: list[list[int]] = FAMILY, of: Model | None = None) -> list[list[int]]:
    placed = tiny.engine(verbs, of=of)
    tiny.outs([primed(placed)])
    return tiny.outs(tiny.run(placed, prompts, tiny.greedy(20)))


def primed(placed: Placed) -> Request:
    """The shared beginning, asked for and answered before."""
    request = Request(SHARED, tiny.greedy(1))
    placed.add(request)
    while request.left is None:
        placed.step()
    return request


@pytest.mark.parametrize("verbs", [
    {}, {"schedule": "sarathi:budget=24"}, {"schedule": "layered"}, {"schedule": "prefill_first"}, {"store": "int8"},
    {"evict": "snapkv:keep=40,window=4"}, {"evict": "streaming:sinks=2,window=210"}, {"skip": "unified:speedup=1.3"},
    {"decode": "contrastive:amateur=tiny-draft"}, {"place": "disaggregated"},
], ids=str)  # fmt: skip
def test_tokens_are_those_without_it(verbs: dict[str, str]) -> None:
    assert outs(verbs | EARLY) == outs(verbs)


def test_tokens_are_greedys() -> None:
    for prompt, got in zip(FAMILY, outs(ON)):
        assert got == oracle.greedy(tiny.model(), prompt, 20)[0]


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_too() -> None:
    model = half(hidden=64)
    want = outs({}, of=model)
    assert outs(ON, of=model) == want
    assert [outs(ON, [prompt], of=model)[0] for prompt in FAMILY] == want


@pytest.mark.parametrize("budget", [16, 512])
def test_drafts_share_as_well(budget: int) -> None:
    script = {tuple(prompt): want for prompt, want in zip(FAMILY, outs({}))}
    for verbs in ({}, ON, EARLY):
        placed = drafting({"schedule": f"sarathi:budget={budget}"} | verbs, script)
        tiny.outs([primed_by(placed, script)])
        assert tiny.outs(tiny.run(placed, FAMILY, tiny.greedy(20))) == list(script.values())


def primed_by(placed: Placed, script: dict[tuple[int, ...], list[int]]) -> Request:
    script[tuple(SHARED)] = oracle.greedy(tiny.model(), SHARED, 1)[0]
    request = primed(placed)
    del script[tuple(SHARED)]
    return request


def test_requests_come_and_go() -> None:
    want = dict(zip(map(tuple, FAMILY), outs({})))
    for seed in range(3):
        placed, gen = tiny.engine(EARLY), torch.Generator().manual_seed(seed)
        primed(placed)
        waiting = [Request(prompt, tiny.greedy(20)) for prompt in FAMILY + FAMILY[:4]]
        there: list[Request] = []
        while waiting or not placed.idle:
            luck = float(torch.rand((), generator=gen))
            if waiting and luck < 0.5:
                there.append(waiting.pop(0))
                placed.add(there[-1])
            elif luck > 0.95 and there:
                placed.cancel(there[int(len(there) * luck)])
            elif luck > 0.9 and placed.running:  # type: ignore[attr-defined]
                placed.room.preempt(placed.running[-1])  # type: ignore[attr-defined]
            placed.step()
        assert sum(r.left is not None and r.left.how == "finished" for r in there) > 6
        for request in there:
            assert request.left is not None and request.left.how in ("finished", "cancelled")
            assert request.out == want[tuple(request.prompt)][: len(request.out)]
        placed.forget_prefixes()
        assert placed.kv_bytes == 0


def test_forks_share_their_prompt() -> None:
    params = Params(max_tokens=12, ignore_eos=True, temperature=0.9, seed=4)
    read, drawn = [], []
    for verbs in ({}, ON):
        placed = tiny.engine(verbs)
        first = Request(SHARED, params)
        family = [first, *(first.sibling(i) for i in (1, 2, 3))]
        for request in family:
            placed.add(request)
        tiny.finish(placed, family)
        drawn.append(tiny.outs(family))
        read.append(placed.counters.kv_bytes_read)
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0]))) > 1
    model = tiny.model().config
    assert read[0] - read[1] == 3 * 192 * 11 * model.layers * 2 * model.head_dim * 4 * model.kv_heads


def test_neutral_reads_what_dense_reads() -> None:
    read = {}
    for attend in ("dense", "hydragen:sharers=1000", "hydragen"):
        placed = tiny.engine({"attend": attend})
        tiny.run(placed, FAMILY, tiny.greedy(8))
        read[attend] = placed.counters.kv_bytes_read
    assert read["dense"] == read["hydragen:sharers=1000"] > 1.5 * read["hydragen"]
