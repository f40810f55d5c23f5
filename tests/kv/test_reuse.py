"""Memory as the engine uses it: exact reuse of prefixes, copy-on-write forks, and a budget that is never passed."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.engine.engine import Engine
from phasewise.kv.cache import KV
from phasewise.kv.prefix import BLOCK, Node, PrefixTree
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, seeds, tiny

N = 12


def placed(verbs: dict[str, str] | None = None, **limits: Any) -> Engine:
    engine = tiny.engine(verbs, **limits)
    assert isinstance(engine, Engine)
    return engine


def serve(engine: Engine, prompt: list[int], params: Params | None = None) -> Request:
    """Run one request to its end, the prefix cache staying as it is."""
    request = Request(prompt, params or tiny.greedy(N))
    engine.add(request)
    while request.left is None:
        engine.step()
        assert engine.kv_bytes <= engine.store.ledger.limit
    return request


def test_a_prompt_met_before_costs_less_and_says_the_same() -> None:
    engine = placed()
    prompt = tiny.prompts(3 * BLOCK + 5)[0]
    first, rows = serve(engine, prompt), engine.counters.rows
    assert rows == len(prompt) + N - 1
    again = serve(engine, prompt)
    assert again.out == first.out == oracle.greedy(tiny.checkpoint(), prompt, N)[0]
    assert engine.counters.prefix_hits == 3 * BLOCK
    assert engine.counters.rows - rows == rows - 3 * BLOCK


def test_a_whole_hit_still_computes_its_last_row() -> None:
    engine = placed()
    prompt = tiny.prompts(2 * BLOCK)[0]
    first = serve(engine, prompt)
    assert serve(engine, prompt).out == first.out
    assert engine.counters.prefix_hits == BLOCK, "the block with the last row is computed again"


def test_a_longer_prompt_builds_on_a_shorter_one() -> None:
    engine = placed()
    long = tiny.prompts(5 * BLOCK + 3)[0]
    serve(engine, long[: 2 * BLOCK + 9])
    assert serve(engine, long).out == oracle.greedy(tiny.checkpoint(), long, N)[0]
    assert engine.counters.prefix_hits == 2 * BLOCK
    other = [*long[:BLOCK], *(t ^ 1 for t in long[BLOCK:])]
    assert serve(engine, other).out == oracle.greedy(tiny.checkpoint(), other, N)[0]
    assert engine.counters.prefix_hits == 3 * BLOCK


@pytest.mark.parametrize("evict", ["snapkv:keep=0.5,window=8", "streaming:sinks=2,window=20"])
def test_rewritten_rows_never_enter_the_tree(evict: str) -> None:
    """Law 10. What is cached was there before eviction, and the last rows an evictor looks at are always computed."""
    engine = placed({"evict": evict})
    prompt = tiny.prompts(4 * BLOCK)[0]
    want = serve(placed({"evict": evict}, prefix_cache=False), prompt).out
    for _ in range(3):
        assert serve(engine, prompt).out == want
    assert engine.store.tree is not None
    plain = placed()
    serve(plain, prompt)
    assert plain.store.tree is not None
    mine, exact = chain(engine.store.tree), chain(plain.store.tree)
    assert not {node.key for node in mine} & {node.key for node in exact}, "keys name the method"
    if evict.startswith("snapkv"):  # prompts are dense until the very end, so their rows are the model's own
        assert len(mine) == len(exact) == 4
        for a, b in zip(mine, exact):
            for x, y in zip(a.planes, b.planes):
                assert all((p - q).abs().max() < 1e-5 for p, q in zip(x, y))
    engine.forget_prefixes()
    assert engine.kv_bytes == 0


SETTINGS = ({}, {"evict": "snapkv:keep=0.5,window=8"}, {"store": "int8"}, {"skip": "unified:speedup=2,weights=none"},
            {"schedule": "sarathi:budget=9"})  # fmt: skip


@pytest.mark.parametrize("verbs", [SETTINGS[0], *seeds.some(SETTINGS[1:], 1, "budgets")], ids=str)
def test_the_budget_holds_after_every_step(verbs: dict[str, str]) -> None:
    """Scarce memory means preemption, never a byte too many; nobody's tokens change."""
    prompts = tiny.prompts(70, 33, 90, 40, 64)
    want = tiny.plain(prompts, tiny.greedy(60), verbs)
    row = placed(verbs).store.row_bytes
    engine = placed(verbs, kv_bytes=row * 64 * 6)
    requests = [Request(prompt, tiny.greedy(60)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while any(request.left is None for request in requests):
        engine.step()
        assert engine.kv_bytes <= engine.store.ledger.limit
        tree = engine.store.tree
        assert tree is not None and engine.kv_bytes == tree.bytes + sum(kv_bytes(engine))
    assert engine.counters.preemptions > 0, "the test does not test it"
    assert tiny.outs(requests) == want
    engine.forget_prefixes()
    assert engine.kv_bytes == 0


def chain(tree: PrefixTree) -> list[Node]:
    """The blocks of a tree that knows one prompt, first block first."""
    nodes, at = [], tree.root
    while at.children:
        (at,) = at.children.values()
        nodes.append(at)
    return nodes


def kv_bytes(engine: Engine) -> list[int]:
    return [request.kv.bytes for request in (*engine.running, *engine.waiting) if request.kv is not None]


def test_siblings_share_until_they_write() -> None:
    """n = 3 costs one prompt: a fork takes memory only when its first own row is written."""
    engine = placed(prefix_cache=False)
    prompt = tiny.prompts(100)[0]
    parent = Request(prompt, Params(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5))
    family = [parent, parent.sibling(1), parent.sibling(2)]
    for request in family:
        engine.add(request)
    while parent.prefilling:
        engine.step()
    kvs: list[KV] = [request.kv for request in family if request.kv is not None]
    assert len(kvs) == 3 and engine.kv_bytes == kvs[0].bytes, "three requests, one buffer"
    buffers = {id(slab.buffer) for kv in kvs for layer in kv.layers for slab in layer.slabs}
    assert len(buffers) == len(kvs[0].layers)
    engine.step()
    assert engine.kv_bytes == 3 * kvs[0].bytes, "each has written a row of its own"
    assert engine.counters.rows == 100 + 3
    tiny.finish(engine, family)
    alone = tiny.plain([prompt] * 3, [request.params for request in family])
    assert [request.out for request in family] == alone
