"""Selectors of rows and blocks choose what they choose by the book, however a row arrives; what they keep is booked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from phasewise.kv.format import KVShape
from phasewise.methods.attend.double_sparsity import DoubleSparsity
from phasewise.methods.attend.infllm import InfLLM
from phasewise.methods.attend.instinfer import InstInfer
from phasewise.methods.attend.moba import MoBA
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.verbs.host import Host
from tests import double, seeds, tiny, uncached
from tests.attend.slow_select import Slow, SlowAgain, SlowBlocks, SlowMeans, SlowSparF, SlowSparsity, SlowTokens
from tests.kv.harness import Uneven, Walk, cuts, sliding

CLOSE = {"atol": 1e-8, "rtol": 1e-8}
PROMPT, TOKENS = 70, tiny.prompts(100)[0]
OTHER = tiny.prompts(40, seed=9)[0]


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are chosen is a step function of scores, so their last bits must not matter."""
    double.everything(monkeypatch)


def bound(method: Any, model: Model | None = None) -> Any:
    host = Host(model or tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    return method.bind(host) if hasattr(method, "bind") else method


SPARSITY = DoubleSparsity(channels=4.0, k=20, dense_layers=1, weights="random:0")
METHODS: dict[str, tuple[Any, Callable[[], Slow]]] = {
    "double_sparsity": (
        SPARSITY,
        lambda: SlowSparsity([each.tolist() for each in bound(SPARSITY).channels], 20, 1),
    ),
    "token_select": (TokenSelect(k=12, first=3, local=5), lambda: SlowTokens(12, 3, 5, 1)),
    "token_select, again": (
        TokenSelect(k=12, first=3, local=5, theta=0.1),
        lambda: SlowAgain(12, 3, 5, 1, 0.1),
    ),
    "instinfer": (InstInfer(r=4.0, k=20.0), lambda: SlowSparF(4, 20)),
    "moba": (MoBA(block=4, blocks=4), lambda: SlowMeans(4, 4)),
    "infllm": (InfLLM(block=4, init=1, window=4, topk=3, dense_len=80), lambda: SlowBlocks(4, 1, 4, 3, 80)),
}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "streaming, text": lambda: {"evict": bound(Streaming(sinks=6, window=43, positions="text"))},
    "snapkv": lambda: {"evict": bound(SnapKV(keep=0.5, window=5))},
    "heads that keep other rows": lambda: {"evict": Uneven([[range(0, 70, 2), [*range(34), 69]]] * 4)},
    "heads that keep more rows": lambda: {"evict": Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)},
    "int8": lambda: {"format": Int8().format()},
}
EACH = pytest.mark.parametrize("name", METHODS)


def started(attend: Any, case: str = "plain", model: Model | None = None) -> Walk:
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], attend=attend, **CASES[case]())
    one.feed(TOKENS[:PROMPT])
    return one


def fast(name: str, model: Model | None = None) -> Any:
    return bound(METHODS[name][0], model)


@pytest.mark.parametrize(
    ("name", "case"),
    seeds.params([(name, case) for name in METHODS for case in CASES], 2, "selectors",
                 always=[(name, "plain") for name in METHODS]),
)  # fmt: skip
def test_equals_the_method_by_the_book(name: str, case: str) -> None:
    """Single rows, slices, and a whole replay, against rows chosen one by one from scratch."""
    slow = METHODS[name][1]()
    truth = started(slow, case)
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([1], [2, 7, 1], [30]):
        one = started(fast(name), case)
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)
    dense = started(None, case)
    assert (dense.feed(TOKENS[PROMPT:]) - want).abs().max() > 1e-2, "the choice matters, or the test tests little"


@pytest.mark.parametrize("name", seeds.params(METHODS, 2, "selectors under windows"))
def test_windows_of_the_model(name: str) -> None:
    model = sliding(17, 4, torch.float64)
    truth = started(METHODS[name][1](), model=model)
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([1], [6, 1, 13]):
        one = started(fast(name), model=model)
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(
    ("name", "case"),
    seeds.params([(name, case) for name in METHODS for case in ("plain", "streaming")], 2, "selectors' trees"),
)
def test_draft_trees_equal_their_paths(name: str, case: str) -> None:
    """Two branches, nine deep: each node chooses among the rows of its own path; what is rejected leaves nothing."""
    tree, parents = TOKENS[PROMPT : PROMPT + 1], [-1]
    for depth in range(1, 9):
        tree = [*tree, TOKENS[PROMPT + depth], OTHER[depth]]
        parents = [*parents, 0 if depth == 1 else len(parents) - 2, 0 if depth == 1 else len(parents) - 1]
    whole = started(fast(name), case)
    whole.feed(TOKENS[20:35])
    truth = started(METHODS[name][1](), case)
    truth.feed(TOKENS[20:35])
    logits = whole.try_(tree, parents)
    torch.testing.assert_close(logits, truth.try_(tree, parents), **CLOSE)
    for leaf in (len(tree) - 2, len(tree) - 1):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        alone, taken = started(fast(name), case), started(fast(name), case)
        for walk in (alone, taken):
            walk.feed(TOKENS[20:35])
        steps = torch.cat([alone.feed([tree[node]]) for node in path])
        torch.testing.assert_close(logits[path], steps, **CLOSE)
        taken.try_(tree, parents)
        taken.commit(tree, path)
        torch.testing.assert_close(taken.feed(OTHER[:5]), alone.feed(OTHER[:5]), **CLOSE)


@EACH
def test_what_is_kept_follows_forks(name: str) -> None:
    def begun() -> Walk:
        walk = started(METHODS[name][1]())
        walk.feed(TOKENS[PROMPT:90])
        return walk

    one = started(fast(name))
    one.feed(TOKENS[PROMPT:90])
    twin = one.fork()
    assert one.kv.layers[2].derived and twin.kv.layers[2].derived
    for walk, tokens in ((one, OTHER), (twin, TOKENS[90:])):
        truth = begun()
        for piece in cuts(tokens[:10], [1, 1, 3]):
            torch.testing.assert_close(walk.feed(piece), truth.feed(piece), **CLOSE)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.endswith("again")])
def test_what_is_kept_follows_rollbacks_and_evictions(name: str) -> None:
    """Rows that stayed and are given up: of a method that remembers nothing of a request beside its rows."""
    one = started(fast(name))
    for piece in (TOKENS[PROMPT:100], *cuts(OTHER[:20], [1, 1, 3])):
        one.feed(piece)
    with torch.inference_mode():
        one.kv.drop_last(90)
    assert not one.kv.layers[2].derived
    del one.request.tokens[90:]
    one.request.computed = 90
    truth = started(METHODS[name][1]())
    truth.feed(TOKENS[PROMPT:90])
    torch.testing.assert_close(one.feed(OTHER[10:20]), truth.feed(OTHER[10:20]), **CLOSE)
    for walk in (one, truth):
        with torch.inference_mode():
            walk.kv.keep(2, [torch.arange(0, 100, 3), torch.arange(1, 90)])  # ragged, one layer
    for piece in cuts(TOKENS[:12], [1, 4]):
        torch.testing.assert_close(one.feed(piece), truth.feed(piece), **CLOSE)


@EACH
def test_what_is_kept_is_within_what_is_booked(name: str) -> None:
    """Bytes of the real tensors, after any steps, against what the method announces for so many positions."""
    runtime = fast(name)
    one = started(runtime)
    shape = one.kv.layers[0].shape
    for piece in cuts(TOKENS[PROMPT:], [1, 3, 1]):
        one.feed(piece)
        for layer, cache in enumerate(one.kv.layers):
            kept = sum(each.bytes for each in cache.derived.values())
            assert kept <= runtime.beside(layer, shape, cache.slabs[0].buffer.cap)
    assert any(cache.derived for cache in one.kv.layers)
    assert runtime.beside(3, KVShape(2, 12, torch.float32), 8) == 0, "nothing is chosen in so few rows"


PROMPTS, N = tiny.prompts(41, 7, 90, 60), 24


@EACH
def test_room_for_all_is_dense(name: str) -> None:
    method = METHODS[name][0]
    one = started(bound(replace(method, **method.neutral)))
    got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], [1, 3])])
    torch.testing.assert_close(got, uncached.logits(tiny.model(), TOKENS)[PROMPT:], **CLOSE)
    assert not one.kv.layers[2].derived, "nothing is kept where nothing is chosen"
