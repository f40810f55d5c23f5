"""Clover in the engine: its guesses are the plain forward's, its trees are the best of what is kept, and its answers
are plain decoding's.

Heads have learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft._pruned import PrunedTree
from phasewise.methods.draft.clover import Clover
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.shapes import grown, worth
from tests.draft.test_eagle import Watch, serve, watched
from tests.laws.scenario import preempt
from tests.speculation.clover_files import PlainClover
from tests.speculation.markov import table

CHAIN, TREE = "nodes=3,top_p=0.0", "nodes=4,top_p=0.9,floor=0.1"


@cache
def heads() -> Path:
    """Heads for `tiny.model()` that know what it writes after `PROMPTS`."""
    out, kind = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), KINDS["clover"]
    target = FrozenTarget(str(tiny.checkpoint()))
    answers = tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = kind.build(target, 3)
    adam = torch.optim.AdamW(module.parameters(), lr=5e-3)
    for _ in range(150):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), kind.tensors(module))
    return out


def clover(knobs: str = TREE, **verbs: str) -> dict[str, str]:
    return {"draft": f"clover:heads={heads()},{knobs}", **verbs}


# ---- what is guessed
def test_a_chain_is_what_the_plain_forward_says_at_every_pass() -> None:
    plain, watch = PlainClover(heads(), tiny.checkpoint()), watched(clover(CHAIN), PROMPTS[2:], 12)
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        guesses = list[int]()
        for _ in draft.tokens:
            guesses.append(int(plain.logits(text[:known], guesses)[-1].argmax()))
        assert draft.tokens == guesses and draft.parents == list(range(-1, len(guesses) - 1))


def test_a_tree_is_pruned_by_the_plain_forwards_probabilities() -> None:
    """Level by level, written a second time: what is kept of each row, then the likeliest paths of the level."""
    plain, watch = PlainClover(heads(), tiny.checkpoint()), watched(clover(), PROMPTS[2:], N - 6)
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


@pytest.mark.parametrize("knobs", [CHAIN, TREE], ids=["chain", "tree"])
def test_answers_are_the_models_own_in_fewer_passes(knobs: str) -> None:
    placed = tiny.engine(clover(knobs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.accepted > N and placed.counters.forwards < N
    assert placed.counters.draft_forwards <= placed.counters.forwards


def test_sampled_requests_are_plain_decodings_too() -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(clover(verify="match"))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


def test_random_heads_accept_nothing_and_change_nothing() -> None:
    placed = tiny.engine({"draft": "clover:heads=random:0,top_p=0.9"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > N and placed.counters.accepted < placed.counters.drafted / 8


# ---- whatever happens to a request
@pytest.mark.parametrize("event", ["preemption", "slices", "hand-off", "fork", "mates", "prefix hit"])
def test_nothing_that_happens_changes_what_is_accepted(event: str) -> None:
    """Pass by pass as many guesses are right as when requests are alone, in one piece and undisturbed."""
    alone = watched(clover()).accepted
    verbs = clover() | ({"schedule": "sarathi:budget=40"} if event in ("slices", "fork") else {})
    placed = tiny.engine(verbs | ({"place": "disaggregated:local=1"} if event == "hand-off" else {}))
    if event == "prefix hit":
        assert [serve(placed, prompt).cached for prompt in PROMPTS] == [0, 0, 0]
    watch, requests = Watch(placed), [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    requests += [request.sibling(1) for request in requests] if event == "fork" else []
    for request in requests if event != "preemption" else requests[:1]:
        placed.add(request)
    if event == "preemption":
        for step in range(6):
            placed.step()
            if step in (2, 4):
                assert preempt(placed, lambda i, request: True)
        for request in requests[1:]:
            placed.add(request)
    tiny.finish(placed, requests)
    assert tiny.outs(requests)[:3] == tiny.plain(PROMPTS, tiny.greedy(N))
    shared = watch.accepted.keys() & alone.keys()
    assert {key: watch.accepted[key] for key in shared} == {key: alone[key] for key in shared}
    assert len(shared) > len(alone) * (0.6 if event == "preemption" else 0.8)
    assert event != "prefix hit" or [request.cached for request in requests] == [32, 64, 0]


def test_a_guess_takes_no_memory_of_the_block() -> None:
    """Keys and values are those of known tokens, one row each, and features of all but the last."""
    placed = tiny.engine(clover(), prefix_cache=False)
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
@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"depth": 64}, "depth=64 must be from 0 to 63"),
        ({"nodes": 64}, "nodes=64 must be from 1 to 63"),
        ({"top_p": 1.5}, "top_p=1.5 must be from 0 to 1"),
        ({"floor": -0.1}, "floor=-0.1 must be from 0 to 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ],
)
def test_knobs_that_make_no_sense(knobs: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=f"clover: {said}"):
        Clover(**knobs)  # type: ignore[arg-type]


def test_more_guesses_in_a_row_than_there_are_heads() -> None:
    with pytest.raises(UserError, match="clover: depth=4 is too much: these heads guess up to 3 tokens in a row"):
        tiny.engine(clover("depth=4"))


def test_rules_that_forbid_nothing_change_no_guess() -> None:
    """Requests without a rule are guessed for all at once, others as those of any second model: to the same trees."""
    plain, ruled = Params(N, ignore_eos=True), Params(N, ignore_eos=True, logit_bias={5: 0.0})
    assert plain.plain and not ruled.plain
    drafts = []
    for params in (plain, ruled):
        placed = tiny.engine(clover())
        watch = Watch(placed)
        assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, tiny.greedy(N))
        drafts.append({key: (draft.tokens, draft.parents) for key, draft in watch.drafts.items()})
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10
