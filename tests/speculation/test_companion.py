"""Companions compute what a fresh pass would, and no row twice."""

from __future__ import annotations

import pytest
import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion, NewNodes, common
from tests import oracle, tiny, uncached


def companion(limit: int = 1 << 30) -> Companion:
    model, counters = tiny.model(layers=2, seed=1), Counters()
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(limit), counters=counters)
    return Companion("second", model, store, uncached.PLAIN, counters)


def wanted(tokens: list[int]) -> torch.Tensor:
    return oracle.logits(tiny.checkpoint(layers=2, seed=1), tokens)[-1]


@pytest.fixture(autouse=True)
def no_autograd():
    with torch.inference_mode():
        yield


def rooted(second: Companion, requests: list[Request]) -> torch.Tensor:
    return second.model.head(second.root(requests))


def test_following_requests() -> None:
    """Extend by a few tokens, stand still: always the logits of the whole sequence."""
    second, requests = companion(), [Request(p) for p in tiny.prompts(20, 33)]
    rows = 0
    for committed, new in [([], 20 + 33), ([5, 7, 9], 6), ([9], 2), ([], 2), ([1, 2, 3, 4, 5], 10)]:
        for request in requests:
            request.tokens += committed
        for request, row in zip(requests, rooted(second, requests)):
            torch.testing.assert_close(row, wanted(request.tokens), atol=1e-4, rtol=1e-4)
            assert second.lag(request) == 0
        assert second.own.rows - rows == new, "where nothing is new, the last row once more"
        rows = second.own.rows


def test_sequences_of_all_kinds() -> None:
    """`advance` follows any sequence, also after `root` and back."""
    second, request = companion(), Request(tiny.prompts(20)[0])
    prompt = request.tokens
    second.root([request])
    for tokens in ([*prompt, 1, 5], prompt[:7], [*prompt[:7], 4, 4, 4], prompt, prompt):
        torch.testing.assert_close(second.advance([request], [tokens])[0], wanted(tokens), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rooted(second, [request])[0], wanted(prompt), atol=1e-4, rtol=1e-4)


def test_catching_up_in_pieces() -> None:
    second, request = companion(), Request(tiny.prompts(50)[0])
    assert second.lag(request) == 50
    for lag in (30, 10, 1, 1):
        second.catch_up([request], 20)
        assert second.lag(request) == lag
        if lag == 1:
            break
    second.root([request])
    assert second.own.rows == 50 and second.lag(request) == 0
    request.tokens += [8] * 30
    assert second.lag(request) == 30
    second.catch_up([request], 20)
    torch.testing.assert_close(rooted(second, [request])[0], wanted(request.tokens), atol=1e-4, rtol=1e-4)
    assert second.own.rows == 50 + 30


def test_costs_do_not_grow_with_the_sequence() -> None:
    """No step touches the whole list of tokens."""

    class Watched(list):
        longest = 0

        def __getitem__(self, at):
            got = super().__getitem__(at)
            if isinstance(at, slice):
                Watched.longest = max(Watched.longest, len(got))
            return got

        def __iter__(self):
            Watched.longest = max(Watched.longest, len(self))
            return super().__iter__()

    second, request = companion(), Request(tiny.prompts(300)[0])
    second.root([request])
    request.tokens = Watched(request.tokens)
    for step in range(6):
        second.reserve(request, request.known + 4)
        second.root([request])
        for n in range(3):
            second.grow([NewNodes(request, [3], [n - 1])])
        request.tokens += [3, step]
        assert second.lag(request) <= 2
    assert Watched.longest <= 4


def test_reserve_answers_and_takes() -> None:
    one_row = companion().store.row_bytes
    second, request = companion(limit=100 * one_row), Request(tiny.prompts(20)[0])
    assert not second.reserve(request, 65) and second.store.ledger.used == 0
    assert second.reserve(request, 64) and second.store.ledger.used == 64 * one_row
    assert second.growth(request, 64) == 0 < second.growth(request, 65)
    second.root([request])
    second.grow([NewNodes(request, [1] * 40, [-1] * 40)])
    assert second.store.ledger.used == 64 * one_row, "reserved rows cost nothing more"
    request.release()
    assert second.store.ledger.used == 0


def test_a_fork_shares_until_it_writes() -> None:
    second, request = companion(), Request(tiny.prompts(20)[0])
    second.advance([request], [[*request.tokens, 1, 2]])
    twin = Request(request.tokens)
    twin.state["second"] = request.state["second"].fork()
    assert second.growth(twin, 22) > 0, "its first write makes a copy, however small"
    logits = second.advance([request, twin], [[*request.tokens, 1, 5], [*request.tokens, 9]])
    for row, path in zip(logits, ([1, 5], [9])):
        torch.testing.assert_close(row, wanted([*request.tokens, *path]), atol=1e-4, rtol=1e-4)
    request.release()
    twin.release()
    assert second.store.ledger.used == 0


def test_common() -> None:
    assert [common(a, b) for a, b in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([2], [1]))] == [0, 2, 1, 0]
