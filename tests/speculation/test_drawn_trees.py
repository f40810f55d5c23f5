"""Trees of every shape keep the target's distribution when they are drawn and judged with the engine's own numbers.

`markov.Tree` numbers its draws as it likes. Here guesses come from `DraftBuilder.us` and verdicts from the numbers that
the loop gives a verifier, both of one request's seed and positions. Trees are as large as their budget: a guess may be
left out for want of room, which must not depend on the numbers that judge it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phasewise.methods.draft.dyspec import _Worth
from phasewise.methods.draft.rsd import _Beam, _Widths
from phasewise.methods.draft.spectr import _Chains
from phasewise.methods.verify.k_seq import KSeq
from phasewise.methods.verify.match import Match
from phasewise.methods.verify.rejection import Rejection
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeShape
from phasewise.verbs.draft import Draft
from phasewise.verbs.verify import Verifier
from tests.speculation.markov import Table, fits, generate, relative, sequences, table

TOKENS, SEEDS = 2, 1500
# token 0 only begins; after the other two the target and the drafter differ as much as can be
P = torch.tensor([[0, 0.5, 0.5], [0, 0.5, 0.5], [0, 0.2, 0.8]])
Q = torch.tensor([[0, 0.6, 0.4], [0, 0.2, 0.8], [0, 0.5, 0.5]])

SHAPES: dict[str, tuple[Callable[[], TreeShape], int, Verifier]] = {  # shape, room, verifier
    "dyspec": (lambda: _Worth(4, 2, 0.2), 4, Rejection()),
    "dyspec, all worth it": (lambda: _Worth(5, 3, 1e-9), 5, Rejection()),
    "rsd": (lambda: _Widths((2, 2)), 4, Rejection()),
    "rsd, a beam": (lambda: _Beam(2, 2), 3, Rejection()),
    "spectr": (lambda: _Chains(3, 2), 5, KSeq()),
    "spectr, one by one": (lambda: _Chains(3, 2), 5, Rejection()),
    "matched": (lambda: _Widths((2, 2)), 4, Match()),
}


WIDE: dict[
    str, tuple[TreeShape, Verifier]
] = {  # where more than two tokens can follow, so that siblings differ in more
    "rsd": (_Widths((3,)), Rejection()),
    "spectr": (_Chains(4, 1), KSeq()),
}


def drafts(shape: TreeShape, room: int, q: Table) -> Callable[[int, int, int], Draft]:
    """As `TreeDrafter` grows trees, with a table in place of the second model."""

    def draft(last: int, seed: int, position: int) -> Draft:
        request = Request([0] * position, Params(max_tokens=99, seed=seed, temperature=1.0))
        tree, asked, level = DraftBuilder(request, shape.levels, room, False), [-1], 0
        while asked and level < shape.levels:
            asked = shape.grow(
                tree, [NodeRequest(node, q[tree.draft.tokens[node] if node >= 0 else last]) for node in asked]
            )
            level += 1
        return shape.finish(tree)

    return draft


@pytest.mark.parametrize("name", SHAPES)
def test_the_targets_distribution_is_kept(name: str) -> None:
    shape, room, verify = SHAPES[name]
    drafter = drafts(shape(), room, Q)
    assert any(len(drafter(0, seed, 0).tokens) == room for seed in range(50)), "no tree is full"
    drawn = [tuple(generate(verify, drafter, P, TOKENS, seed)) for seed in range(SEEDS)]
    assert fits(drawn, sequences(P, TOKENS)) > 1e-3


def test_guesses_are_drawn_with_the_targets_own_numbers_first() -> None:
    """So that a drafter which thinks as the target does guesses its very draws (arXiv 2408.07978)."""
    for shape in (_Widths((2, 2)), _Chains(2, 2)):
        drafter = drafts(shape, 6, P)
        for seed in range(40):
            draft = drafter(0, seed, 0)
            path = generate(Match(), drafter, P, 2, seed)
            assert draft.tokens[draft.children(-1)[0]] == path[0]
            assert draft.tokens[draft.children(draft.children(-1)[0])[0]] == path[1]


@pytest.mark.parametrize("name", WIDE)
def test_several_siblings_of_four_tokens(name: str) -> None:
    shape, verify = WIDE[name]
    p = table(4, seed=11, sharp=0.5)
    drafter = drafts(shape, 4, relative(p, seed=12, noise=2.5))
    drawn = [tuple(generate(verify, drafter, p, 1, seed)) for seed in range(3 * SEEDS)]
    assert fits(drawn, sequences(p, 1)) > 1e-3
