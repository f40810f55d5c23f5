"""Trees of a second model: what a pass over all the tree would compute, level by level, and no row twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion, NewNodes
from phasewise.speculation.draft_rows import DraftRows
from tests import oracle, tiny, uncached

TREE = [[(5, -1), (6, -1), (5, -1)], [(7, 0), (8, 0), (9, 1)], [(1, 4), (2, 5), (3, 3), (4, 4)]]  # (token, parent)


def companion(dtype: torch.dtype = torch.float32, limit: int = 1 << 30) -> Companion:
    path, counters = tiny.checkpoint(layers=2, seed=1, hidden=64), Counters()
    model = Model.load(path, dtype=dtype)
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(limit), counters=counters)
    return Companion("second", model, store, uncached.PLAIN, counters)


def levels(second: Companion, requests: Sequence[Request], tree: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Grow a tree below all requests, holding every row against a pass over its path alone."""
    nodes = sum(map(len, tree))
    for request in requests:
        assert second.reserve(request, request.known + nodes)
    close(second.model, second.root(requests), [request.tokens for request in requests])
    paths: list[list[int]] = []
    for level in tree:
        tokens, parents = [token for token, _ in level], [parent for _, parent in level]
        x = second.grow([NewNodes(request, tokens, parents) for request in requests])
        paths += [[*(paths[parent] if parent >= 0 else []), token] for token, parent in level]
        close(second.model, x, [[*r.tokens, *path] for r in requests for path in paths[-len(level) :]])


def close(model: Model, x: torch.Tensor, texts: Sequence[Sequence[int]]) -> None:
    wanted = torch.stack([uncached.logits(model, text)[-1] for text in texts])
    slack = 1e-4 if x.dtype == torch.float32 else 0.03  # of a row's length
    error = (model.head(x) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(error.max()) < slack


@pytest.fixture(autouse=True)
def no_autograd():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accepted", [[], [5], [6, 9, 2], [5, 8, 4, 11], [11]], ids=str)
def test_what_the_request_went_on_with_stays(accepted: list[int], dtype: torch.dtype) -> None:
    """A round, then another below what was accepted: rows of the accepted path are not computed again."""
    second, requests = companion(dtype), [Request(prompt) for prompt in tiny.prompts(20, 33)]
    levels(second, requests, TREE)
    assert second.own.rows == 53 + 2 * 10
    kept = DraftRows()
    for level in TREE:
        kept.add([token for token, _ in level], [parent for _, parent in level])
    for request in requests:
        request.tokens += [*accepted, 12]
    rows, right = second.own.rows, len(kept.draft.longest(accepted))
    levels(second, requests, TREE)
    assert second.own.rows - rows == 2 * (len(accepted) + 1 - right) + 2 * 10


def test_chains_are_trees_too() -> None:
    second, request = companion(torch.bfloat16), Request(tiny.prompts(20)[0])
    for _ in range(3):
        levels(second, [request], [[(3, -1)], [(4, 0)], [(5, 1)]])
        request.tokens += [3, 4, 9]
    (slab,) = second._held(request).kv.layers[0].slabs
    assert slab.positions is None and slab.n == 20 + 2 * 3 + 2, "rows that lie like any others"


def test_other_questions_settle_what_was_grown() -> None:
    """Catching up, following and forks between two rounds: nothing of a tree is left over."""
    second, request = companion(), Request(tiny.prompts(20)[0])
    levels(second, [request], TREE)
    request.tokens += [6, 9, 10]
    assert second.lag(request) == 1
    twin = second._held(request).fork()
    assert twin.rows == 22 and not len(twin.uncommitted) and twin.kv.layers[0].n == 22
    close(second.model, second.root([request]), [request.tokens])
    second.grow([NewNodes(request, [1, 2], [-1, -1])])
    wanted = oracle.logits(second.model.files.path, [*request.tokens, 2, 4])[-1]
    torch.testing.assert_close(second.advance([request], [[*request.tokens, 2, 4]])[0], wanted, atol=1e-4, rtol=1e-4)
    second.root([request])
    second.grow([NewNodes(request, [1, 2], [-1, -1])])
    held = second._held(request)
    assert held is not None
    held.fork().close()
    close(second.model, second.root([request]), [request.tokens])


def test_a_pass_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    second, request = companion(), Request(tiny.prompts(20)[0])
    used = second.store.ledger.used
    second.reserve(request, 30)
    second.root([request])

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("phasewise.speculation.companion.forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        second.grow([NewNodes(request, [1, 2], [-1, -1])])
    monkeypatch.undo()
    assert not request.state and second.store.ledger.used == used
    levels(second, [request], TREE)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 20)), min_size=1, max_size=5), max_size=5),
       st.lists(st.integers(0, 3), max_size=6))  # fmt: skip
def test_paths_and_ancestors(levels: list[list[tuple[int, int]]], text: list[int]) -> None:
    """Against the obvious: every node's path written out."""
    rows, paths = DraftRows(), list[tuple[int, ...]]()
    for level in levels:
        first = len(paths)
        parents = [min(parent, first - 1) for _, parent in level]
        sees = rows.add([token for token, _ in level], parents)
        for at, ((token, _), parent) in enumerate(zip(level, parents)):
            above, up = [first + at], parent
            while up >= 0:
                above.append(up)
                up = rows.draft.parents[up]
            seen = list(range(first + len(level))) if sees is None else sees[at].nonzero()[:, 0].tolist()
            assert seen == sorted(above) and rows.depths[first + at] == len(above) - 1
            assert rows.draft.path(first + at) == rows.draft.paths(first + at + 1)[-1]
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
    longest = max((len(path) for path in paths if list(path) == text[: len(path)]), default=0)
    draft = rows.draft
    found = draft.longest(text)
    assert [draft.tokens[node] for node in found] == text[:longest]
    assert all(draft.parents[b] == a for a, b in zip([-1, *found], found))
