"""Falcon in the engine: its guesses are the plain forward's, and its answers plain decoding's.

Heads have learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft._fixed_ranks import FixedRanks
from phasewise.methods.draft.falcon import Falcon
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.falcon_layout import usual_falcon
from phasewise.speculation.heads.layouts import tensors_of
from phasewise.train.heads.falcon import FalconKind, begin
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.shapes import grown
from tests.draft.test_eagle import Watch, serve, watched
from tests.laws.engines import preempt
from tests.speculation.falcon_files import PlainFalcon
from tests.speculation.markov import table

CHAIN, TREE, FIXED = "depth=5,width=1", "depth=4,width=3,nodes=9", "depth=4,nodes=9,tree=ranks"


@cache
def heads(k: int = 2) -> Path:
    """Heads for `tiny.model()` that know what it writes after `PROMPTS`, and guess k tokens a pass."""
    out, kind = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), FalconKind(together=k, glance=0.0)
    target = FrozenTarget(str(tiny.checkpoint()))
    answers = tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = usual_falcon(target.model, guesses=k)
    module.steps = 5
    begin(module, target)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(150):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), tensors_of(module))
    return out


def falcon(knobs: str = TREE, k: int = 2, **verbs: str) -> dict[str, str]:
    return {"draft": f"falcon:heads={heads(k)},{knobs}", **verbs}


@pytest.mark.parametrize("k", [2, 3])
def test_a_chain_is_what_the_plain_forward_says_at_every_pass(k: int) -> None:
    plain, watch = PlainFalcon(heads(k), tiny.checkpoint()), watched(falcon(CHAIN, k), PROMPTS[2:], 12)
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        guesses = list[int]()
        for _ in draft.tokens:
            guesses.append(int(plain.logits(text[:known], guesses)[-1].argmax()))
        assert draft.tokens == guesses


@pytest.mark.parametrize("knobs", [CHAIN, TREE, FIXED], ids=["chain", "tree", "ranks"])
@pytest.mark.parametrize("k", [2, 3])
def test_answers_are_the_models_own_in_fewer_passes(knobs: str, k: int) -> None:
    placed = tiny.engine(falcon(knobs, k))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.accepted > N and placed.counters.forwards < N


@pytest.mark.parametrize(("depth", "k"), [(1, 2), (2, 2), (5, 2), (5, 3), (3, 3), (4, 1)])
def test_a_round_takes_a_pass_of_the_heads_for_each_k_levels(depth: int, k: int) -> None:
    """Rounded up: of chains, which are as long as the answer's end allows."""
    placed = tiny.engine(falcon(f"depth={depth},width=1", k))
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, [PROMPTS[2]], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[2:]
    lengths = [len(draft.tokens) for draft in watch.drafts.values() if draft.tokens]
    assert max(lengths) == depth and placed.counters.draft_forwards == sum(-(-length // k) for length in lengths)


def test_sampled_requests_are_plain_decodings_too() -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(falcon(verify="match"))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize("knobs", ["width=1,depth=4", "depth=4,nodes=9,tree=ranks"])
def test_random_heads_accept_nothing_and_change_nothing(knobs: str) -> None:
    placed = tiny.engine({"draft": f"falcon:heads=random:0,{knobs}"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > N and placed.counters.accepted < placed.counters.drafted / 8


@pytest.mark.parametrize("event", ["preemption", "slices", "hand-off", "fork", "mates", "prefix hits"])
@pytest.mark.parametrize("k", [2, 3])
def test_nothing_that_happens_changes_what_is_accepted(event: str, k: int) -> None:
    """Pass by pass as many guesses are right as when requests are alone, in one piece and undisturbed."""
    alone = watched(falcon(k=k)).accepted
    verbs = falcon(k=k) | ({"schedule": "sarathi:budget=40"} if event in ("slices", "fork") else {})
    verbs |= {"place": "disaggregated:local=1"} if event == "hand-off" else {}
    placed = tiny.engine(verbs)
    if event == "prefix hits":
        for prompt in PROMPTS:
            serve(placed, prompt)
    watch = Watch(placed)
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    if event == "fork":
        requests += [request.sibling(1) for request in requests]
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
    assert len(shared) > len(alone) * 0.7
    if event == "prefix hits":
        assert [request.cached for request in requests] == [32, 64, 0]


def test_its_memory_is_the_requests() -> None:
    """Keys and values of the heads, features and the recurrent state are in the budget."""
    held = {}
    for name, verbs in (("plain", {}), ("falcon", falcon())):
        placed = tiny.engine(verbs, prefix_cache=False)
        request = Request(PROMPTS[1], tiny.greedy(N))
        placed.add(request)
        while request.n_out < 10 and request.left is None:
            placed.step()
        held[name] = placed.kv_bytes
        if name == "falcon":
            features, its = request.state["falcon features"], request.state["falcon"]
            state = sum(each.numel() * each.element_size() for each in its.state)
            assert its.kv.bytes > 0 and state == 2 * 2 * 48 * 4
            assert held["falcon"] - held["plain"] >= its.kv.bytes + features["rows"].nbytes + state
        tiny.finish(placed, [request])


def test_short_texts_are_not_guessed_for_until_there_is_a_group() -> None:
    placed = tiny.engine(falcon("depth=3,width=1", 3))
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
    config, stored = folder.read_config(heads()), folder.read(heads())
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


@pytest.mark.parametrize("knob", ["depth", "width", "nodes", "chunk"])
def test_knobs_that_make_no_sense(knob: str) -> None:
    with pytest.raises(UserError, match=f"falcon: {knob}=0"):
        Falcon(**{knob: 0})


def test_a_tree_of_no_known_kind() -> None:
    with pytest.raises(UserError, match="falcon: tree='fixed': choose one of likeliest, ranks"):
        Falcon(tree="fixed")  # type: ignore[arg-type]
