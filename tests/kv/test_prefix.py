"""The prefix tree under random requests: what it finds is exact, what is held stays, and the budget is never passed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phasewise.kv import layer_kv
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.prefix import BLOCK, PrefixCache, PrefixTree, chain
from phasewise.kv.store import Sharing, Store
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.serve.route.index import PrefixIndex

HEADS, DIM, LAYERS = 2, 4, 2
ROW = HEADS * DIM * 2 * 4 * LAYERS  # bytes of one token


def truth(tokens: list[int], layer: int) -> torch.Tensor:
    """What a causal model would store: each row depends on all tokens up to it. [H, R, DIM]."""
    sums = torch.tensor(tokens, dtype=torch.float64).mul(torch.arange(1, len(tokens) + 1)).cumsum(0) % 1009
    return (sums.float()[None, :, None] + layer).expand(HEADS, -1, DIM)


def compute(store: Store, request: Request) -> None:
    """Stand in for prefill: fill the rows that the prefix cache did not bring."""
    assert request.kv is not None
    rest = request.prompt_len - request.computed
    request.kv.reserve(rest)
    for i, layer in enumerate(request.kv.layers):
        rows = truth(request.tokens, i)[:, request.computed :]
        layer.append(rows, -rows, range(request.computed, request.prompt_len))
    request.kv.commit(rest)
    request.computed = request.prompt_len
    store.remember(request)


class Requests(RuleBasedStateMachine):
    """Prompts over a two-letter alphabet of blocks, so that prefixes are often shared, under a small budget."""

    @initialize(blocks=st.integers(12, 60), unit=st.sampled_from([1, 1, 64]))
    def start(self, blocks: int, unit: int) -> None:
        self.ledger, self.counters = Ledger(blocks * BLOCK * ROW), Counters()
        shape = KVShape(HEADS, DIM, torch.float32)
        self.store = Store(
            [shape] * LAYERS, Raw(), ledger=self.ledger, counters=self.counters, sharing=Sharing("test", unit=unit)
        )
        assert self.store.tree is not None
        self.tree: PrefixTree = self.store.tree
        self.told = PrefixIndex()
        self.tree.events.subscribe(self.told.apply)
        self.live: list[Request] = []

    @rule(letters=st.lists(st.integers(0, 1), min_size=1, max_size=4), tail=st.sampled_from([0, 0, 1, 7, BLOCK, 40]))
    def arrive(self, letters: list[int], tail: int) -> None:
        prompt = [t for letter in letters for t in range(letter * 7, letter * 7 + BLOCK)] + [3] * tail
        request = Request(prompt)
        if not self.store.room(self.store.cost(request.known + 1)):
            return
        hits = self.counters.prefix_hits
        request.kv = self.store.open(request, request.known + 1)
        assert request.computed == self.counters.prefix_hits - hits == sum(node.rows for node in request.kv.nodes)
        assert request.computed <= request.prompt_len - 1, "the last row is always computed"
        assert request.computed % self.store.sharing.unit == 0
        compute(self.store, request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        request.release()

    @rule(n=st.integers(0, 30))
    def shrink(self, n: int) -> None:
        used, idle = self.tree.bytes, self.idle_bytes()
        freed = self.store.prefixes.shrink(n * BLOCK * ROW)
        assert freed == used - self.tree.bytes
        assert freed >= min(n * BLOCK * ROW, idle), "every block nobody holds can be had"

    def idle_bytes(self) -> int:
        return sum(node.bytes for node in self.tree.nodes() if not node.refs)

    @invariant()
    def rows_are_exact(self) -> None:
        for request in getattr(self, "live", ()):
            for i, layer in enumerate(request.kv.layers):
                part = layer.read()[0]
                assert part.plain and part.n == request.prompt_len
                assert torch.equal(part.k, truth(request.tokens, i)) and torch.equal(part.v, -part.k)

    @invariant()
    def bytes_and_holders_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        nodes = self.tree.nodes()
        assert self.tree.bytes == sum(node.bytes for node in nodes)
        assert self.ledger.used == self.tree.bytes + sum(r.kv.bytes for r in self.live if r.kv)
        assert self.ledger.used <= self.ledger.limit
        for node in nodes:
            holders = sum(node in request.kv.nodes for request in self.live if request.kv)
            assert node.refs == holders
            assert node.parent is self.tree.root or (node.parent and node.parent.refs >= node.refs), (
                "held with its parents"
            )

    @invariant()
    def events_tell_all(self) -> None:
        """Whoever has heard them knows what is cached."""
        if not hasattr(self, "told"):
            return
        for request in self.live:
            nodes = self.tree.match(request.prompt)
            assert self.told.cached(request.prompt) == sum(node.rows for node in nodes)
            for node in nodes:
                node.release()
        assert self.told.blocks == len(self.tree.nodes())

    def teardown(self) -> None:
        for request in getattr(self, "live", ()):
            request.release()
        if hasattr(self, "store"):
            self.store.prefixes.clear()
            assert self.ledger.used == self.tree.bytes == 0 and not self.tree.nodes() and not self.told.blocks


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def open_store(blocks: int = 100) -> Store:
    shape = KVShape(HEADS, DIM, torch.float32)
    ledger, counters = Ledger(blocks * BLOCK * ROW), Counters()
    return Store([shape] * LAYERS, Raw(), ledger=ledger, counters=counters, sharing=Sharing("k"))


def served(store: Store, prompt: list[int]) -> int:
    """Run a prompt through the store and let it go. -> rows it found there."""
    request = Request(prompt)
    assert store.room(store.cost(request.known + 1))
    request.kv = store.open(request, request.known + 1)
    found = request.computed
    compute(store, request)
    request.release()
    return found


def test_least_recently_used_leaves_go_first() -> None:
    store = open_store()
    assert store.tree is not None
    a, b = [1] * (2 * BLOCK + 1), [2] * (2 * BLOCK + 1)
    served(store, a)
    served(store, b)
    assert served(store, a) == 2 * BLOCK, "touched last"
    store.prefixes.shrink(1)
    assert served(store, a) == 2 * BLOCK and served(store, b) == BLOCK, "b lost its leaf, not its root"


def test_rewritten_rows_are_never_shared() -> None:
    """Law 10: once an evictor has been at work, the rows are private, whichever layer it was."""
    for layer in range(LAYERS):
        store = open_store()
        assert store.tree is not None
        request = Request([5] * (3 * BLOCK))
        request.kv = store.open(request, request.known + 1)
        kept = torch.arange(3 * BLOCK)
        request.kv.reserve(3 * BLOCK)
        for i, one in enumerate(request.kv.layers):
            one.append(truth(request.tokens, i), truth(request.tokens, i), range(3 * BLOCK))
        request.kv.commit(3 * BLOCK)
        request.computed = request.prompt_len
        request.kv.keep(layer, kept)  # even all of them
        store.remember(request)
        assert not store.tree.nodes()
        request.release()
        assert store.ledger.used == 0


def test_a_full_budget_stops_caching_not_serving() -> None:
    store = open_store(blocks=5)
    assert served(store, list(range(4 * BLOCK - 1))) == 0  # its own rows take four of the five blocks
    assert store.tree is not None and store.tree.bytes == BLOCK * ROW
    assert store.ledger.used == store.tree.bytes


def test_keys_depend_on_all_that_came_before() -> None:
    root = chain(b"model and methods", [])
    assert chain(root, [1, 2]) == chain(root, [1, 2])
    assert len({chain(root, [1, 2]), chain(root, [2, 1]), chain(chain(root, [1]), [2]), chain(b"other", [1, 2])}) == 4


def test_an_allocation_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], layer_kv.Buffer

    def second_fails(*args: object) -> object:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no more")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_kv, "Buffer", second_fails)
    store = open_store()
    with pytest.raises(MemoryError):
        store.open(Request([1, 2, 3]), 4)
    assert store.ledger.used == 0


def test_trees_under_one_ledger_make_way_in_the_order_of_use() -> None:
    shape, ledger = KVShape(HEADS, DIM, torch.float32), Ledger(100 * BLOCK * ROW)
    cache = PrefixCache(ledger)

    def store(key: str) -> Store:
        return Store([shape] * LAYERS, Raw(), ledger=ledger, counters=Counters(), sharing=Sharing(key, prefixes=cache))

    one, two, twin = store("one"), store("two"), store("one")
    assert one.tree is twin.tree is not two.tree
    prompt = [1] * (BLOCK + 1)
    served(one, prompt)
    served(two, prompt)
    assert served(twin, prompt) == BLOCK, "the same key, the same tree; touched last"
    assert cache.bytes == ledger.used == 2 * BLOCK * ROW
    two.prefixes.shrink(1)
    assert one.tree is not None and two.tree is not None
    assert (one.tree.bytes, two.tree.bytes) == (BLOCK * ROW, 0)
    assert two.room(100 * BLOCK * ROW) and cache.bytes == ledger.used == 0, "another store's prefixes make way"
