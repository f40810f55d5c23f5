"""EAGLE in the engine: its guesses are the plain forward's, whatever happens to a request, and its trees the likeliest.

Heads are fitted to what the tiny model writes (`tests/draft/fitted.py`), so that guesses are often right.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine import attempt
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.draft._likeliest import LikeliestTree
from phasewise.methods.draft.mtp import MTPModule
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.fused import Scratch
from phasewise.step.span import Span
from phasewise.verbs.place import Placed
from tests import tiny, uncached
from tests.draft.fitted import PROMPTS, N
from tests.draft.shapes import grown, worth
from tests.draft.trained import CHAIN, EAGLE, step_by_step
from tests.draft.watch import check_chains, serve, watched
from tests.speculation import eagle_files as files
from tests.speculation.markov import table

V = 6
Q = table(V, seed=3)


# ---- what is guessed
@pytest.mark.parametrize("layout", ["eagle3", "eagle1", "mtp"])
def test_a_chain_is_what_the_plain_forward_says_at_every_pass(layout: str, tmp_path: Path) -> None:
    """Of random heads in each layout of files."""
    made = {"eagle3": files.eagle3, "eagle1": files.eagle1, "mtp": files.mtp}[layout](tmp_path, 48)
    name = "mtp" if layout == "mtp" else "eagle"
    watch = watched({"draft": f"{name}:heads={made},{CHAIN}"}, PROMPTS[2:], 12)
    check_chains(watch, step_by_step(files.Plain)(made))


def test_a_tree_is_likeliest_by_the_plain_forward() -> None:
    """Nodes at one pass, against all paths of two levels."""
    plain = files.Plain(EAGLE.heads(), tiny.checkpoint())
    watch = watched(EAGLE.verbs("depth=2,width=3,nodes=7"), PROMPTS[2:], 6)
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    known, draft = next((known, draft) for (_, known), draft in watch.drafts.items() if len(draft.tokens) == 7)
    first = plain.logits(text[:known], ())[0].softmax(-1).topk(3)
    chances = {(int(token),): float(p) for p, token in zip(*first)}
    for (token,), p in list(chances.items()):
        below = plain.logits(text[:known], (token,))[1].softmax(-1).topk(3)
        chances |= {(token, int(child)): p * float(q) for q, child in zip(*below)}
    best = sorted(chances, key=lambda path: -chances[path])[:7]
    assert {draft.path(node) for node in range(7)} == set(best)


# ---- features are there whatever happens
def test_where_features_were_given_up_the_prompt_is_computed_again() -> None:
    """A hit reaches as far as both kinds of blocks do."""
    placed = tiny.engine(EAGLE.verbs())
    assert isinstance(placed, Engine)
    cold = serve(placed, PROMPTS[1])
    (rows,) = placed.store.beside
    leaf = max(rows.tree.nodes(), key=lambda node: not node.children)
    rows.tree.remove(leaf)
    warm = serve(placed, PROMPTS[1])
    assert (cold.cached, warm.cached) == (0, 32) and cold.out == warm.out
    assert len(rows.tree.nodes()) == 2, "and they are kept again"


def test_a_recipe_without_features_shares_no_less() -> None:
    """The KV's own blocks are the same for both: features lie beside them."""
    placed = mixed({"eagle": EAGLE.verbs()})
    plain = serve(placed, PROMPTS[1])
    for recipe, cached in (("eagle", 0), ("", 64), ("eagle", 64)):
        request = serve(placed, PROMPTS[1], recipe)
        assert request.cached == cached and request.out == plain.out


def mixed(recipes: dict[str, dict[str, str]]) -> Placed:
    """An engine of plain decoding, with these recipes beside it."""
    limits = Limits(kv_bytes=64 << 20)
    return Builder(tiny.model(), parse({}), limits, load=tiny.load, recipes=parse_recipes({}, recipes)).build()


def test_behind_a_gap_the_lane_begins_anew() -> None:
    """Whose features are lost is guessed for again, from there on."""
    placed = tiny.engine(EAGLE.verbs(CHAIN))
    assert isinstance(placed, Engine)
    request = Request(PROMPTS[0], tiny.greedy(N))
    placed.add(request)
    while request.n_out < 4 and request.left is None:
        placed.step()
    request.state.pop("eagle features")
    before = placed.counters.drafted
    placed.step()
    assert placed.counters.drafted == before, "nothing is guessed without a feature"
    tiny.finish(placed, [request])
    assert request.out == tiny.plain(PROMPTS, tiny.greedy(N))[0] and placed.counters.drafted > before


# ---- what it costs others
def test_only_steps_with_its_requests_are_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[set[int] | None]()
    real = attempt.forward

    def looked(model: Any, spans: Any, counters: Any, taps: Any = None, room: Any = None) -> Any:
        seen.append(taps)
        return real(model, spans, counters, taps, room)

    monkeypatch.setattr(attempt, "forward", looked)
    for recipes, wanted in (({}, [None]), ({"eagle": EAGLE.verbs()}, [set(), {0, 1}])):
        placed = mixed(recipes)
        for name in ("", *recipes):
            serve(placed, PROMPTS[2], name)
        assert [taps for taps in wanted if taps in seen] == wanted and all(taps in wanted for taps in seen)
        seen.clear()


# ---- trees, without a model
@pytest.mark.parametrize(("levels", "width", "most"), [(1, 3, 2), (3, 2, 5), (3, 6, 24), (4, 6, 9)])
def test_trees_are_the_best_connected_sets_of_what_is_offered(levels: int, width: int, most: int) -> None:
    """Brute force: every level follows up the `width` likeliest nodes; of all offered the `most` likeliest stay."""
    shape = LikeliestTree(levels, width, most)
    draft = shape.finish(grown(shape, Q, greedy=True))
    frontier: list[tuple[int, ...]] = [()]
    offered = list[tuple[int, ...]]()
    for _ in range(levels):
        rows = [(path, Q[path[-1] if path else 0]) for path in frontier]
        below = [(*path, token) for path, row in rows for token in row.topk(width).indices.tolist()]
        offered += below
        frontier = sorted(below, key=lambda path: -worth(Q, path))[:width]
    best = sorted(offered, key=lambda path: -worth(Q, path))[:most]
    assert {draft.path(node) for node in range(len(draft.tokens))} == set(best)
    assert all(parent < node for node, parent in enumerate(draft.parents)) and draft.q is None
    assert len(draft.tokens) <= shape.nodes(levels)


def test_of_equals_the_upper_comes_first() -> None:
    """A certain child is as likely as its parent, and never proposed without it."""
    sure = torch.eye(V).roll(1, 1)
    shape = LikeliestTree(4, 2, 3)
    draft = shape.finish(grown(shape, sure, greedy=True))
    assert draft.tokens == [1, 2, 3] and draft.parents == [-1, 0, 1]


def test_every_level_is_one_pass_of_a_few_nodes() -> None:
    shape = LikeliestTree(5, 3, 8)
    runs = list[int]()
    real = LikeliestTree.grow

    def counted(self: LikeliestTree, tree: Any, asked: Any) -> list[int]:
        following = real(self, tree, asked)
        runs.append(len(following))
        return following

    LikeliestTree.grow = counted  # type: ignore[method-assign]
    try:
        grown(shape, Q, greedy=True)
    finally:
        LikeliestTree.grow = real  # type: ignore[method-assign]
    assert max(runs) <= 3 and list(itertools.accumulate(runs))[-1] <= shape.runs(5)


@pytest.mark.parametrize("knob", ["depth", "width", "nodes", "chunk"])
def test_knobs_of_mtp_that_make_no_sense(knob: str) -> None:
    with pytest.raises(UserError, match=f"mtp: {knob}=0"):
        MTPModule(**{knob: 0})


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_a_tapped_step_has_the_bits_of_another() -> None:
    """Taps are copied out of native steps, of prompts and of single tokens; what the step gives stays the same."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    assert model.stack is not None
    found = [steps(model, taps) for taps in (None, {0, 2})]
    for (plain, _), (tapped, taps) in zip(*found):
        assert torch.equal(plain, tapped) and taps.keys() == {0, 2}
        assert float((taps[2].float() - tapped.float()).norm()) > 0 and taps[0].shape == tapped.shape


@torch.inference_mode()
def steps(model: Model, taps: set[int] | None) -> list[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
    """Rows and taps of a prompt of 70 tokens, and of two tokens after it."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 30), counters=Counters())
    request, found, room = Request(PROMPTS[1]), list[tuple[torch.Tensor, dict[int, torch.Tensor]]](), Scratch()
    kv = store.open(request, 72)
    for tokens, start in ((PROMPTS[1], 0), ([5], 70), ([7], 71)):
        span = Span(request, kv, uncached.PLAIN, tokens, range(start, start + len(tokens)))
        hidden = forward(model, [span], Counters(), taps, room)
        kv.commit(len(tokens))
        found.append((hidden.x.clone(), {tap: rows.clone() for tap, rows in hidden.taps.items()}))
    return found
