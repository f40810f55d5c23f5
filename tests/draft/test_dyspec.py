"""Trees that grow where guesses are worth most: against brute force, and their worth against what is accepted."""

from __future__ import annotations

import itertools

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft.dyspec import DySpec, _Worth
from phasewise.speculation.branching import branch
from tests import tiny
from tests.draft.shapes import grown, worth
from tests.speculation.markov import table

V = 6
Q = table(V, seed=3)


@pytest.mark.parametrize(("nodes", "levels"), [(1, 3), (7, 3), (24, 4), (40, 3)])
def test_greedy_trees_are_the_likeliest_beginnings(nodes: int, levels: int) -> None:
    """Of all paths worth theta at least, the best."""
    theta = 1 / nodes
    every = [path for n in range(1, levels + 1) for path in itertools.product(range(V), repeat=n)]
    wanted = sorted((path for path in every if worth(Q, path) >= theta), key=lambda path: -worth(Q, path))[:nodes]
    shape = _Worth(nodes, levels, theta)
    draft = shape.finish(grown(shape, Q, greedy=True))
    assert {draft.path(node) for node in range(len(draft.tokens))} == set(wanted) and draft.q is None
    assert all(parent < node for node, parent in enumerate(draft.parents))


def test_worth_is_what_is_accepted_when_the_draft_is_the_target() -> None:
    """Of a chosen tree, by the target's own chances: accepted guesses a pass, on average, are the sum of all worths."""
    shape = _Worth(12, 4, 1 / 12)
    draft = shape.finish(tree := grown(shape, Q, greedy=True))
    total = sum(worth(Q, draft.path(node)) for node in range(len(draft.tokens)))
    made, accepted, runs = torch.Generator().manual_seed(0), 0, 20_000
    follow = {(draft.path(parent), draft.tokens[node]): node for node, parent in enumerate(draft.parents)}
    draws = [torch.multinomial(row, runs * 2, replacement=True, generator=made).tolist() for row in Q]
    for _ in range(runs):
        last, path = 0, ()
        while (path, token := draws[last].pop()) in follow:
            last, path, accepted = token, (*path, token), accepted + 1
    assert abs(accepted / runs - total) < 0.03 * total
    assert total == pytest.approx(sum(tree.notes[node] for node in shape._best(tree)))


def test_a_child_is_drawn_while_what_is_left_is_worth_it() -> None:
    """By the worths alone: all decisions to draw were known before the draw."""
    for seed in range(200):
        shape = _Worth(20, 4, 0.06)
        tree = grown(shape, Q, seed=seed)
        draft = shape.finish(tree)
        full = len(draft.tokens) == 20
        for node in range(-1, len(draft.tokens)):
            left = 1.0 if node < 0 else tree.notes[node]
            depth = len(draft.path(node))
            for child in draft.children(node):
                assert left >= 0.06
                share = float(draft.q[child, draft.tokens[child]])
                assert tree.notes[child] == pytest.approx(left * share)
                left *= 1 - share
            assert full or depth == 4 or left < 0.06 or len(draft.children(node)) == V


def test_better_than_a_chain_and_a_bush_of_as_many_nodes() -> None:
    """Worth of greedy trees, on average over many tables."""
    sums = {"dyspec": 0.0, "chain": 0.0, "bush": 0.0}
    for seed in range(30):
        q = table(V, seed=seed)
        shape = _Worth(6, 6, 1e-9)
        draft = shape.finish(grown(shape, q, greedy=True))
        sums["dyspec"] += sum(worth(q, draft.path(node)) for node in range(len(draft.tokens)))
        chain: tuple[int, ...] = ()
        for _ in range(6):
            (token,), _ = branch(q[chain[-1] if chain else 0], 1, "point", lambda i: 0.0)
            chain = (*chain, token)
            sums["chain"] += worth(q, chain)
        tops, _ = branch(q[0], 2, "point", lambda i: 0.0)
        bush = [(a,) for a in tops] + [(a, b) for a in tops for b in branch(q[a], 2, "point", lambda i: 0.0)[0]]
        sums["bush"] += sum(worth(q, path) for path in bush)
    assert sums["dyspec"] > max(sums["chain"], sums["bush"])


def test_through_an_engine() -> None:
    placed = tiny.engine({"draft": "dyspec:model=tiny,nodes=12,depth=3"})
    requests = tiny.run(placed, tiny.prompts(30, 7), tiny.greedy(20))
    assert tiny.outs(requests) == tiny.plain(tiny.prompts(30, 7), tiny.greedy(20))
    assert placed.counters.accepted > 20
    assert placed.counters.draft_forwards <= 3 * placed.counters.forwards


@pytest.mark.parametrize("knobs", [{"nodes": 0}, {"depth": 0}, {"theta": 1.0}, {"theta": -0.1}, {"chunk": 0}])
def test_knobs_that_make_no_sense(knobs: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"dyspec: {next(iter(knobs))}="):
        DySpec(**knobs)
