"""Falcon in the engine: its guesses are the plain forward's, and its answers plain decoding's.

Heads have learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.methods.draft._fixed_ranks import FixedRanks
from phasewise.methods.draft.falcon import Falcon
from phasewise.speculation.heads import folder
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.shapes import grown
from tests.draft.trained import FALCON_2, FALCON_3, falcon_heads
from tests.draft.watch import Watch, serve, watched
from tests.speculation.markov import table


@pytest.mark.parametrize(("depth", "k"), [(1, 2), (2, 2), (5, 2), (5, 3), (3, 3), (4, 1)])
def test_a_round_takes_a_pass_of_the_heads_for_each_k_levels(depth: int, k: int) -> None:
    """Rounded up: of chains, which are as long as the answer's end allows."""
    placed = tiny.engine({"draft": f"falcon:heads={falcon_heads(k)},depth={depth},width=1"})
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, [PROMPTS[2]], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[2:]
    lengths = [len(draft.tokens) for draft in watch.drafts.values() if draft.tokens]
    assert max(lengths) == depth and placed.counters.draft_forwards == sum(-(-length // k) for length in lengths)


def test_short_texts_are_not_guessed_for_until_there_is_a_group() -> None:
    placed = tiny.engine(FALCON_3.verbs("depth=3,width=1"))
    watch = Watch(placed)
    tiny.finish(placed, [serve(placed, [5])])
    assert next(known for (_, known), draft in watch.drafts.items() if draft.tokens) == 4


# ---- the tree of ranks
def test_a_fixed_tree_has_the_same_ranks_in_every_step() -> None:
    said, paths = table(6, seed=3), ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0))
    shape = FixedRanks(paths)
    draft = shape.finish(grown(shape, said, greedy=True))
    wanted = set()
    for path in paths:
        last, tokens = 0, list[int]()
        for rank in path:
            last = int(said[last].topk(rank + 1).indices[rank])
            tokens.append(last)
        wanted.add(tuple(tokens))
    assert {draft.path(node) for node in range(len(draft.tokens))} == wanted
    assert (shape.levels, shape.nodes(1), shape.nodes(2), shape.runs(1), shape.runs(2)) == (3, 2, 5, 2, 3)


def measured(out: Path, rows: int) -> str:
    """The same heads, with how often each rank was right at so many depths."""
    config, stored = folder.read_config(FALCON_2.heads()), folder.read(FALCON_2.heads())
    table = [[0.5, 0.2, 0.1]] * rows
    folder.write(out, {**config, folder.OWN: {**config.get(folder.OWN, {}), "accuracy": table}}, stored.tensors)
    return str(out)


def test_the_fixed_tree_is_that_of_the_ranks_that_were_right(tmp_path: Path) -> None:
    watch = watched({"draft": f"falcon:heads={measured(tmp_path, 4)},depth=2,nodes=4,tree=ranks"}, PROMPTS[2:], 8)
    drafts = [draft for draft in watch.drafts.values() if len(draft.tokens) == 4]
    assert drafts and all(draft.parents == [-1, 0, -1, -1] or draft.parents == [-1, -1, -1, 0] or
                          sorted(draft.parents) == [-1, -1, 0, 0] for draft in drafts)  # fmt: skip


def test_more_levels_than_were_measured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"falcon: depth=5,tree=ranks: .* were measured for 4 guesses in a row"):
        tiny.engine({"draft": f"falcon:heads={measured(tmp_path, 4)},depth=5,tree=ranks"})


def test_a_tree_of_no_known_kind() -> None:
    with pytest.raises(UserError, match="falcon: tree='fixed': choose one of likeliest, ranks"):
        Falcon(tree="fixed")  # type: ignore[arg-type]
