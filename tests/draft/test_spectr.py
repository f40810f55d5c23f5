"""Chains drawn by themselves: equal ones are one row of the draft model's, and stay apart in the draft."""

from __future__ import annotations

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft.spectr import SpecTr, _Chains
from phasewise.request.params import Params
from tests import tiny
from tests.draft.shapes import grown
from tests.speculation.markov import table

Q = table(3, seed=1)


def test_chains_are_independent_draws() -> None:
    """Every node has its table's row, whatever its siblings are; chains with one beginning occur, and go on apart."""
    alike = 0
    for seed in range(50):
        shape = _Chains(4, 3)
        draft = shape.finish(grown(shape, Q, seed=seed))
        assert draft.drawn == "iid" and len(draft.tokens) == 12
        assert len(draft.children(-1)) == 4 and all(len(draft.children(n)) == (n < 8) for n in range(12))
        for node, parent in enumerate(draft.parents):
            torch.testing.assert_close(draft.q[node], Q[draft.tokens[parent] if parent >= 0 else 0])
        alike += len(set(draft.paths(12))) < 12
    assert alike > 25


def test_equal_beginnings_are_computed_once() -> None:
    """A draft model with three tokens: of sixty guesses in three levels 3 + 9 at most are rows of its own."""
    small = {"vocab": 3, "layers": 1, "hidden": 32}
    draft = f"spectr:model={tiny.checkpoint(**small, seed=1)},chains=20,k=3"
    placed = tiny.engine({"draft": draft, "verify": "k_seq"}, of=tiny.model(**small))
    (companion,) = placed.recipes[""].companions
    params = [Params(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    tiny.run(placed, [[0, 1, 2, 1]] * 3, params)
    assert placed.counters.drafted > 100
    steps = placed.counters.draft_forwards / 3  # passes of the whole batch
    assert companion.own.rows <= 3 * 4 + steps * 3 * (4 + 3 + 9)


@pytest.mark.parametrize("knobs", [{"chains": 0}, {"k": 0}, {"chunk": 0}])
def test_knobs_that_make_no_sense(knobs: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"spectr: {next(iter(knobs))}="):
        SpecTr(**knobs)
