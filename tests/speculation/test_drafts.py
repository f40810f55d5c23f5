"""Drafts as trees, and several guesses for one token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise.speculation.branching import branch
from phasewise.verbs.draft import Draft

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6)


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    return {draft.path(node) for node in range(len(draft.tokens))}


@given(PATHS)
def test_a_trie_holds_every_beginning_of_its_paths_once(paths: list[list[int]]) -> None:
    draft = Draft.trie(paths)
    beginnings = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert paths_of(draft) == beginnings
    assert len(draft.tokens) == len(beginnings)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert [draft.tokens[i] for i in range(len(paths[0]))] == paths[0], "the first path comes first"


@given(PATHS, st.integers(1, 12))
def test_a_cut_tree_is_a_tree(paths: list[list[int]], nodes: int) -> None:
    draft = Draft.trie(paths)
    draft.q = torch.rand(len(draft.tokens), 4)
    cut = draft.cut(nodes)
    assert len(cut.tokens) == len(cut.parents) == min(nodes, len(draft.tokens))
    assert paths_of(cut) <= paths_of(draft)
    assert cut.q is not None and torch.equal(cut.q, draft.q[: len(cut.tokens)])


@given(PATHS, st.integers(0, 12))
def test_paths_go_from_the_first_node_down(paths: list[list[int]], nodes: int) -> None:
    draft, want = Draft.trie(paths), list[tuple[int, ...]]()
    for node in range(min(nodes, len(draft.tokens))):
        up = [node]
        while draft.parents[up[-1]] >= 0:
            up.append(draft.parents[up[-1]])
        want.append(tuple(draft.tokens[at] for at in reversed(up)))
    assert draft.paths(nodes) == want and draft.path(-1) == ()
    assert [draft.path(node) for node in range(len(want))] == want


@given(PATHS, st.integers(0, 6))
def test_a_pruned_tree_has_the_same_paths_up_to_a_depth(paths: list[list[int]], levels: int) -> None:
    draft = Draft.trie(paths)
    draft.q = torch.nn.functional.one_hot(torch.tensor(draft.tokens), 4).float()
    pruned = draft.prune(levels)
    assert paths_of(pruned) == {path for path in paths_of(draft) if len(path) <= levels}
    assert pruned.q is not None and pruned.q.argmax(-1).tolist() == pruned.tokens
    assert all(parent < node for node, parent in enumerate(pruned.parents))


def test_children_keep_their_order() -> None:
    draft = Draft([7, 3, 7, 9, 1], [-1, -1, 0, 0, 1])
    assert (draft.children(-1), draft.children(0), draft.children(4)) == ([0, 1], [2, 3], [])
    assert Draft.chain([5, 6]).parents == [-1, 0]


Q = torch.tensor([0.1, 0.0, 0.5, 0.4, 0.0])


def test_branches_of_every_kind() -> None:
    us = [0.95, 0.05, 0.5].__getitem__
    assert branch(Q, 2, "point", us) == ([2, 3], None)
    tokens, rows = branch(Q, 3, "iid", us)
    assert tokens == [3, 0, 2] and torch.equal(rows, Q.expand(3, -1))
    tokens, rows = branch(Q, 3, "without_replacement", us)
    assert tokens == [3, 0, 2]
    torch.testing.assert_close(rows, torch.tensor([[0.1, 0, 0.5, 0.4, 0], [1 / 6, 0, 5 / 6, 0, 0], [0, 0, 1, 0, 0]]))
    tokens, rows = branch(Q, 2, "top_plus_one", us)
    assert tokens == [2, 3]
    torch.testing.assert_close(rows, torch.tensor([[0.0] * 5, [0.2, 0, 0, 0.8, 0]]))


@pytest.mark.parametrize("drawn", ["point", "without_replacement", "top_plus_one"])
def test_no_more_branches_than_the_distribution_has(drawn: str) -> None:
    tokens, rows = branch(Q, 5, drawn, lambda i: 0.3)
    assert sorted(tokens) == [0, 2, 3]
    assert rows is None or len(rows) == 3


def test_drawn_tokens_have_weight_and_chosen_ones_have_zero_rows() -> None:
    """How a verifier tells them apart."""
    for seed in range(50):
        q = (torch.randn(9, generator=torch.Generator().manual_seed(seed)) * 2).softmax(-1)
        for drawn, chosen in (("iid", 0), ("without_replacement", 0), ("top_plus_one", 2)):
            tokens, rows = branch(q, 3, drawn, lambda i, seed=seed: (0.37 * (i + seed)) % 1)
            weights = [float(row[token]) for row, token in zip(rows, tokens)]
            assert [w > 0 for w in weights] == [False] * chosen + [True] * (3 - chosen)
            assert all(abs(float(row.sum()) - (w > 0)) < 1e-5 for row, w in zip(rows, weights))
