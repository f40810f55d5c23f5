"""Clover in the engine: its guesses are the plain forward's, its trees are the best of what is kept, and its answers
are plain decoding's.

Heads have learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft._pruned import PrunedTree
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.shapes import grown, worth
from tests.draft.trained import CLOVER
from tests.draft.watch import Watch, watched
from tests.speculation.clover_files import PlainClover
from tests.speculation.markov import table


# ---- what is guessed
def test_a_tree_is_pruned_by_the_plain_forwards_probabilities() -> None:
    """Level by level, written a second time: what is kept of each row, then the likeliest paths of the level."""
    plain, watch = PlainClover(CLOVER.heads(), tiny.checkpoint()), watched(CLOVER.verbs(), PROMPTS[2:], N - 6)
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    for (_, known), draft in watch.drafts.items():
        level, every = {(): 1.0}, list[tuple[int, ...]]()
        for _ in range(3):
            offered = dict[tuple[int, ...], float]()
            for path, chance in level.items():
                row, total = plain.logits(text[:known], path)[-1].softmax(-1), 0.0
                for p, token in zip(*(each.tolist() for each in row.sort(descending=True))):
                    if total >= 0.9 or p < 0.1 * float(row.max()):
                        break
                    offered[*path, token], total = chance * p, total + p
            best = sorted(offered, key=lambda path: -offered[path])[: 4 - len(every)]
            level = {path: offered[path] for path in best}
            every += best
        assert [draft.path(node) for node in range(len(draft.tokens))] == every
    assert len({tuple(draft.parents) for draft in watch.drafts.values()}) > 2, "trees follow what is likely"


# ---- what it takes
def test_a_guess_takes_no_memory_of_the_block() -> None:
    """Keys and values are those of known tokens, one row each, and features of all but the last."""
    placed = tiny.engine(CLOVER.verbs(), prefix_cache=False)
    request = Request(PROMPTS[1], tiny.greedy(N))
    placed.add(request)
    while request.n_out < 10:
        placed.step()
    follower, features = request.state["clover"], request.state["clover features"]
    assert follower.rows <= request.known and len(follower.uncommitted) == 0
    assert features["first"] == 0 and features["count"] == request.known - 1
    tiny.finish(placed, [request])


# ---- trees, without a model
@pytest.mark.parametrize(("top_p", "floor", "most"), [(0.5, 0.25, 4), (0.9, 0.0, 9), (1.0, 0.5, 6), (0.0, 0.0, 3)])
def test_a_level_takes_what_the_levels_before_have_left(top_p: float, floor: float, most: int) -> None:
    q = table(6, seed=3)
    shape = PrunedTree(3, most, most, top_p=top_p, floor=floor)
    draft = shape.finish(grown(shape, q, greedy=True))
    level, every = list[tuple[int, ...]]([()]), list[tuple[int, ...]]()
    for _ in range(3):
        offered = list[tuple[int, ...]]()
        for path in level:
            row, total = q[path[-1] if path else 0], 0.0
            for p, token in zip(*(each.tolist() for each in row.sort(descending=True))):
                if p >= floor * float(row.max()) and (total < top_p or total == 0):
                    offered.append((*path, token))
                    total += p
        level = sorted(offered, key=lambda path: -worth(q, path))[: most - len(every)]
        every += level
    assert [draft.path(node) for node in range(len(draft.tokens))] == every
    assert all(parent < node for node, parent in enumerate(draft.parents)) and len(every) <= most


def test_sure_guesses_make_a_chain_and_unsure_ones_a_fan() -> None:
    shape = PrunedTree(3, 4, 4, top_p=0.5, floor=0.25)
    sure, unsure = torch.eye(6).roll(1, 1), torch.full((6, 6), 1 / 6)
    assert shape.finish(grown(shape, sure, greedy=True)).parents == [-1, 0, 1]
    assert shape.finish(grown(shape, unsure, greedy=True)).parents == [-1, -1, -1, 0]


# ---- what is refused
def test_more_guesses_in_a_row_than_there_are_heads() -> None:
    with pytest.raises(UserError, match="clover: depth=4 is too much: these heads guess up to 3 tokens in a row"):
        tiny.engine(CLOVER.verbs("depth=4"))


def test_rules_that_forbid_nothing_change_no_guess() -> None:
    """Requests without a rule are guessed for all at once, others as those of any second model: to the same trees."""
    plain, ruled = Params(N, ignore_eos=True), Params(N, ignore_eos=True, logit_bias={5: 0.0})
    assert plain.plain and not ruled.plain
    drafts = []
    for params in (plain, ruled):
        placed = tiny.engine(CLOVER.verbs())
        watch = Watch(placed)
        assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, tiny.greedy(N))
        drafts.append({key: (draft.tokens, draft.parents) for key, draft in watch.drafts.items()})
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10
