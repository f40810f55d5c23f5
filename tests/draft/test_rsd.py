"""Trees drawn without replacement: their law by enumeration, their sizes, and knobs that make no sense."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft.rsd import RSD, _Beam, _Widths, conditioned
from tests import tiny
from tests.draft.shapes import grown, worth
from tests.lazy import lazy
from tests.speculation.markov import table

stats: Any = lazy("scipy.stats")

V = 4
Q = table(V, seed=5)
RUNS = 4000


def test_a_stochastic_beam_draws_sequences_without_replacement() -> None:
    """Two sequences of two tokens: the chance of each ordered pair is p(a) p(b) / (1 - p(a))."""
    found = Counter()
    for seed in range(RUNS):
        tree = grown(_Beam(2, 2), Q, seed=seed)
        paths = tree.draft.paths(len(tree.draft.tokens))
        ends = [path for path in paths if len(path) == 2]
        found[tuple(ends)] += 1
    chances = {path: worth(Q, path) for path in itertools.product(range(V), repeat=2)}
    pairs = list(itertools.permutations(chances, 2))
    wanted = [chances[a] * chances[b] / (1 - chances[a]) for a, b in pairs]
    assert math.isclose(sum(wanted), 1, rel_tol=1e-5) and set(found) <= set(pairs)  # Q is float32
    wanted = [chance / sum(wanted) for chance in wanted]
    counts = [found[pair] for pair in pairs]
    often = [i for i, chance in enumerate(wanted) if chance * RUNS >= 5]
    rest = (RUNS - sum(counts[i] for i in often), RUNS * (1 - sum(wanted[i] for i in often)))
    result = stats.chisquare([*(counts[i] for i in often), rest[0]], [*(wanted[i] * RUNS for i in often), rest[1]])
    assert result.pvalue > 1e-4


def test_scores_given_their_largest() -> None:
    """In float64: the largest becomes what it is said to be, the others keep their order, and none is larger."""
    made = torch.Generator().manual_seed(0)
    for _ in range(50):
        scores = torch.randn(20, generator=made, dtype=torch.float64) * 8
        scores[3] = -math.inf
        found = conditioned(scores, -2.5)
        assert float(found.max()) == -2.5 and float(found[3]) == -math.inf
        plain = -torch.log(math.exp(2.5) - torch.exp(-scores.max()) + torch.exp(-scores))
        torch.testing.assert_close(found, plain)
        assert found.argsort().tolist() == scores.argsort().tolist()


@pytest.mark.parametrize("greedy", [False, True])
def test_siblings_are_distinct_and_stand_in_the_order_of_their_draw(greedy: bool) -> None:
    for shape, nodes in ((_Beam(3, 3), 9), (_Widths((3, 2, 1)), 3 + 6 + 6)):
        tree = grown(shape, Q, greedy=greedy)
        draft = shape.finish(tree)
        assert len(draft.tokens) == nodes == shape.nodes(3) and len(set(draft.paths(nodes))) == nodes
        assert (draft.q is None) is greedy
        for node in range(-1, nodes):
            q = Q[draft.tokens[node] if node >= 0 else 0].clone()
            for child in draft.children(node):
                if greedy:
                    continue
                torch.testing.assert_close(draft.q[child], q / q.sum())
                q[draft.tokens[child]] = 0


def test_greedy_beams_are_the_best_of_each_level() -> None:
    draft = grown(_Beam(3, 3), Q, greedy=True).draft
    paths = draft.paths(len(draft.tokens))
    beam: list[tuple[int, ...]] = [()]
    for level in range(1, 4):
        every = [(*path, token) for path in beam for token in range(V)]
        beam = sorted(every, key=lambda path: -worth(Q, path))[:3]
        assert {path for path in paths if len(path) == level} == set(beam)


def test_less_room_is_less_tree() -> None:
    for shape in (_Beam(3, 3), _Widths((3, 2, 1))):
        for room in range(1, 9):
            assert len(grown(shape, Q, room=room).draft.tokens) == room


def test_one_pass_per_level_however_many_requests() -> None:
    for knobs in ("beam=3,depth=3", "beam=0,widths=2x2x1"):
        placed = tiny.engine({"draft": f"rsd:model=tiny,{knobs}"})
        tiny.run(placed, tiny.prompts(30, 7, 55), tiny.greedy(1 + 4 * 4))
        assert (placed.counters.draft_forwards, placed.counters.forwards) == (3 * 4, 1 + 4)


@pytest.mark.parametrize("knobs", [{"beam": -1}, {"depth": 0}, {"widths": "4x0"}, {"widths": "4,2"}, {"chunk": 0}])
def test_knobs_that_make_no_sense(knobs: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"rsd: {next(iter(knobs))}="):
        RSD(**knobs)
