"""PPD: exact whatever its embeddings are, guesses as its plain forward says, no real row sees a prompt token's, and as
many guesses accepted as its Markov chain says."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.draft.ppd import PPD, PromptDrafter
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import loop
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.last_state import RankPath
from phasewise.speculation.loop import Speculation, draft_span
from phasewise.speculation.prompt_trees import expected_accepted, prompt_trees
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import serve
from tests.draft.test_kangaroo import Watch
from tests.engine.engines import step_all
from tests.laws.scenario import preempt
from tests.speculation.ppd_files import PlainPrompts, tiny_prompts

LAYERS, DEPTH = 4, 3


@cache
def heads() -> Path:
    """Prompt tokens that have learned what the tiny model writes after `PROMPTS`, by the trainer's own loss."""
    out, target = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), FrozenTarget(str(tiny.checkpoint()))
    kind, answers = KINDS["ppd"], tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = kind.build(target, DEPTH)
    kind.begin(module, target, block)
    adam = torch.optim.AdamW(module.parameters(), lr=5e-2)
    for _ in range(60):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), kind.tensors(module))
    return out


def prompting(knobs: str = "rows=23", source: Path | str = "", **verbs: str) -> dict[str, str]:
    return {"draft": f"ppd:heads={source or heads()},{knobs}", **verbs}


def engine(verbs: dict[str, str], **more: Any) -> Engine:
    placed = tiny.engine(verbs, **more)
    assert isinstance(placed, Engine)
    return placed


def drafter_of(placed: Engine) -> PromptDrafter:
    drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, PromptDrafter)
    return drafter


# ---- tokens
@pytest.mark.parametrize("source", ["trained", "random:0"])
@pytest.mark.parametrize("knobs", ["rows=23", "rows=11,depth=2", "rows=2,depth=1", "rows=90"])
def test_greedy_tokens_are_plain_decodings(source: str, knobs: str) -> None:
    placed = engine(prompting(knobs, heads() if source == "trained" else source))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > 0


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_sampled_tokens_are_plain_decodings_too(verify: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = engine(prompting(verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize("source", ["trained", "random"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, tmp_path: Path) -> None:
    """Every guess is the rank of its prompt token that its path in the tree names. The tree is the one for as many
    depths as the last accepted token had prompt tokens."""
    path = heads() if source == "trained" else tiny_prompts(tmp_path)
    plain, placed = PlainPrompts(path, tiny.checkpoint()), engine(prompting("rows=23", path))
    watch, trees = Watch(placed), drafter_of(placed).trees
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text, drawn, states = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]], 0, set[int]()
    before: tuple[int, Draft] | None = None
    for (_, known), draft in watch.drafts.items():
        levels, guesses = len(text) - known - 1, len(draft.tokens) - draft.ask
        state = 0
        if before is not None:
            at, last = before
            state = len(last.asking(next((node for node in range(len(last.tokens) - last.ask)
                                          if last.path(node) == tuple(text[at : known - 1])), -1)))  # fmt: skip
        ranks = plain.logits(text[: known - 1]).topk(10, -1).indices.tolist()
        paths = [path for path in trees[state].paths if len(path) <= levels]
        want = [tuple(ranks[depth][rank] for depth, rank in enumerate(path)) for path in paths]
        assert draft.cut(guesses).paths(guesses) == want
        for node, path in enumerate(((), *paths), -1):
            assert len(draft.asking(node)) == max(0, min(trees[state].prompts[path], levels - len(path) - 1))
        drawn, before = drawn + (guesses > 0), (known, draft)
        states.add(state)
    assert drawn > 3 and len(states) > 1


# ---- real rows beside prompt tokens', to the bit
TREE = Draft([7, 30, 12, 50, 9], [-1, -1, 0, 0, 1])
CHAIN = Draft([7, 30], [-1, 0])
DENSE = Phase("decode", None, catalog.build("attend", "dense"))  # type: ignore[arg-type]
EACH = {"tree": [3, 3, 0, 1, 2, 3], "chain": [3, 2, 3]}  # prompt tokens of the pending token and of each guess


@cache
def half() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


class Begun:
    """A request of the model in bfloat16 whose prompt is computed but for the pending token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.counters = Counters()
        store = Store(kv_shapes(half()), Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.request = Request(prompt, tiny.greedy(40))
        self.kv = self.request.kv = store.open(self.request, len(prompt) + 64)
        self.kv.reserve(len(prompt) + 64)
        n = len(prompt) - 1
        forward(half(), [Span(self.request, self.kv, DENSE, prompt[:n], range(n))], self.counters)
        self.kv.commit(n)
        self.request.computed = n

    def span(self, draft: Draft, each: Sequence[int]) -> Span:
        """The span of a draft with so many prompt tokens behind its rows, as the loop makes it."""
        whole, rows = Draft([*draft.tokens], [*draft.parents]), list[torch.Tensor]()
        generator = torch.Generator().manual_seed(0)
        embeddings = torch.randn(max(each, default=0), 64, generator=generator)
        for node, count in enumerate(each, -1):
            above = node
            for i in range(count):
                above = whole.add(above, 0)
                whole.ask += 1
                rows.append(embeddings[i])
        if rows:
            whole.given = torch.stack(rows)
        host: Any = type("Host", (), {"model": half()})
        made: Any = type("Loop", (), {"host": host})
        span = draft_span(self.request, whole, DENSE)
        return Speculation._entering(made, span, whole)


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("which", ["tree", "chain"])
@pytest.mark.parametrize("mates", [0, 1, 2])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_prompt_tokens(which: str, mates: int) -> None:
    """Rows after the last layer and the KV that stays, in the same batches: with prompt tokens, with others, and with
    none. Where the mask lets real rows see prompt tokens, the same comparison fails. A prompt token stands behind its
    own row, whatever the number of guesses beside it."""
    draft, kept = (TREE, [0, 1, 3]) if which == "tree" else (CHAIN, [0, 1])
    rows, planes = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    real = 1 + len(draft.tokens)
    for way in ("prompts", "none", "open"):
        mine, others = Begun(tiny.prompts(37)[0]), [Begun(prompt) for prompt in tiny.prompts(20, 51)[:mates]]
        each = [0] * real if way == "none" else EACH[which]
        span = mine.span(draft, each)
        if way != "none":
            starts, at = [*span.positions][:real], real
            for start, count in zip(starts, each):
                assert [*span.positions][at : at + count] == [*range(start + 1, start + 1 + count)]
                at += count
        if way == "open":
            assert span.sees is not None
            span.sees[:real, real:] = True
        spans = [Span(b.request, b.kv, DENSE, b.request.tokens[-1:], range(b.kv.layers[0].n, b.kv.layers[0].n + 1))
                 for b in others]  # fmt: skip
        x = forward(half(), [*spans[:1], span, *spans[1:]], mine.counters).x
        rows[way] = x[span.start : span.start + real].clone()
        mine.kv.commit(kept)
        planes[way] = [p[:, : slab.n].clone() for layer in mine.kv.layers for slab in layer.slabs
                       for p in slab.buffer.planes]  # fmt: skip
        assert {layer.n for layer in mine.kv.layers} == {36 + len(kept)}
    assert torch.equal(rows["prompts"], rows["none"]) and not torch.equal(rows["prompts"], rows["open"])
    assert all(torch.equal(a, b) for a, b in zip(planes["prompts"], planes["none"], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(planes["prompts"], planes["open"], strict=True))


# ---- the Markov chain
ACCURACY = ((0.5, 0.15, 0.08, 0.04), (0.4, 0.12, 0.06, 0.05), (0.35, 0.1, 0.05, 0.04))


@pytest.mark.parametrize("rows", [6, 7, 9, 12])
def test_prompt_tokens_stand_where_least_is_lost(rows: int) -> None:
    """Of a small table, against all ways to spread as many over the same guesses. The pending token keeps its own."""
    accuracy = ((0.7, 0.2), (0.6, 0.3))
    trees = prompt_trees(accuracy, rows)
    guesses = max(len(tree.paths) for tree in trees)
    gains = [0.0, *(sum(_chance(accuracy, path) for path in tree.paths) for tree in trees[1:])]
    for state, tree in enumerate(trees):
        assert tree.rows <= rows and tree.prompts[()] == 2 and len(tree.paths) == min(guesses, [0, 2, 9][state])
        last = {path: _chance(accuracy, path) - sum(_chance(accuracy, other) for other in tree.paths
                                                    if other[:-1] == path) for path in tree.paths}  # fmt: skip
        value = sum(last[path] * gains[tree.prompts[path]] for path in tree.paths)
        every = [each for each in product(range(3), repeat=len(tree.paths)) if sum(each) + len(each) + 2 <= rows]
        best = max(sum(last[path] * gains[n] for path, n in zip(tree.paths, each)) for each in every)
        assert value == pytest.approx(best)


def _chance(accuracy: Sequence[Sequence[float]], path: RankPath) -> float:
    found = 1.0
    for depth, rank in enumerate(path):
        found *= accuracy[depth][rank]
    return found


def test_more_rows_accept_more_and_prompt_tokens_go_where_they_are_needed() -> None:
    accepted = [expected_accepted(ACCURACY, prompt_trees(ACCURACY, rows)) for rows in (4, 8, 16, 32, 64)]
    assert accepted == sorted(accepted) and accepted[-1] > 1.5 * accepted[0]
    tree = prompt_trees(ACCURACY, 23)[-1]
    counts = [tree.prompts[path] for path in tree.paths]
    assert tree.rows == 23 and tree.prompts[()] == 3 and min(counts) < 3
    assert tree.prompts[(0,)] >= tree.prompts[tree.paths[-1]]


class Oracle(PromptDrafter):
    """Guesses of which each rank of each depth is right as often as a table says, and that of the text to come."""

    texts: dict[str, list[int]]
    rng: Random

    def ranked(self, asked: Any) -> list[list[list[int]]]:
        found = []
        for request, paths in asked:
            text, ids = self.texts[request.id], list[list[int]]()
            for depth in range(max(map(len, paths))):
                right = text[request.known + depth] if request.known + depth < len(text) else 3
                u, row = self.rng.random(), self.accuracy[depth]
                rank = next((i for i in range(len(row)) if u < sum(row[: i + 1])), len(row))
                wrong = [token for token in range(3, tiny.VOCAB) if token != right]
                ids.append([*wrong[:rank], right, *wrong[rank:]][: len(row)])
            found.append(ids)
        return found


@pytest.mark.parametrize("rows", [8, 23])
def test_the_stationary_prediction_is_what_an_oracle_measures(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that a pass accepts, within 5 %, with guesses as often right as the table says. The share of passes in
    each state as well."""
    new, prompts = 420, tiny.prompts(9, 12, 15, 10, 13, 16)
    texts = [[*prompt, *out] for prompt, out in zip(prompts, tiny.plain(prompts, tiny.greedy(new)))]

    def bind(self: PPD, host: Any) -> Oracle:
        made = Oracle(host, torch.randn(3, host.model.config.hidden), ACCURACY, self)
        made.texts, made.rng = {f"r{i}": text for i, text in enumerate(texts)}, Random(0)
        return made

    monkeypatch.setattr(PPD, "bind", bind)
    placed = engine({"draft": f"ppd:heads=none,rows={rows}"})
    requests = [Request(prompt, tiny.greedy(new), id=f"r{i}") for i, prompt in enumerate(prompts)]
    spans, accept = Counter[int](), Speculation.accept

    def counted(self: Any, spans_: Sequence[Span], hidden: Any) -> Any:
        outcomes = accept(self, spans_, hidden)
        for span, outcome in zip(spans_, outcomes):
            if span.note is not None and span.request.limit - span.request.known > 8:
                spans[0] += 1
                spans[1] += outcome.accepted
        return outcomes

    monkeypatch.setattr(loop.Speculation, "accept", counted)
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    assert [[*request.tokens] for request in requests] == texts
    assert spans[0] > 800
    assert spans[1] / spans[0] == pytest.approx(expected_accepted(ACCURACY, prompt_trees(ACCURACY, rows)), rel=0.05)


# ---- costs, to the row
@pytest.mark.parametrize("knobs", ["rows=23", "rows=11,depth=2", "rows=4"])
def test_a_pass_runs_its_guesses_and_prompt_tokens_once(knobs: str) -> None:
    """No pass beside the model's own, and no more KV after one than tokens were accepted."""
    placed = engine(prompting(knobs))
    watch, kept = Watch(placed), list[tuple[int, int]]()
    request = Request(PROMPTS[1], tiny.greedy(N))
    placed.add(request)
    while request.left is None:
        placed.step()
        if request.kv is not None:
            kept.append((request.kv.layers[0].n, request.known))
            assert len({layer.n for layer in request.kv.layers}) == 1
    c = placed.counters
    asked = sum(draft.ask for draft in watch.drafts.values())
    judged = sum(len(draft.tokens) - draft.ask for draft in watch.drafts.values())
    assert all(rows == known - 1 for rows, known in kept) and len(kept) > 3
    assert c.emitted == c.forwards + c.accepted and c.drafted == judged and c.draft_forwards == 0
    assert c.rows == len(PROMPTS[1]) + c.forwards - 1 + judged + asked
    assert max(len(draft.tokens) for draft in watch.drafts.values()) <= PPD(**_numbers(knobs)).rows


def _numbers(knobs: str) -> dict[str, int]:
    return {name: int(value) for name, value in (each.split("=") for each in knobs.split(","))}


# ---- whatever happens
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted() -> None:
    """But for the pass after rows were computed anew, which has nothing to guess by."""
    placed = engine(prompting())
    watch = Watch(placed)
    cold = [serve(placed, prompt) for prompt in PROMPTS]
    alone, watch.accepted = watch.accepted, {}
    warm = [serve(placed, prompt) for prompt in PROMPTS]
    assert [request.cached for request in warm] == [32, 64, 0]
    assert watch.accepted == alone and sum(alone.values()) > N / 4
    assert [request.out for request in warm] == [request.out for request in cold]
    assert all(request.state == {} for request in warm)
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N))


@pytest.mark.parametrize("schedule", ["layered:rows_per_group=8", "sarathi:budget=24", "prefill_first"])
def test_mates_and_slices_change_nothing(schedule: str) -> None:
    """Prompts that cross the model in pieces, rows of other recipes and drafts that there are too few rows for share
    steps with rows that are given. The KV of all layers is level after every step."""
    limits = Limits(kv_bytes=64 << 20)
    recipes = parse_recipes({}, {"ppd": prompting(), "plain": {}})
    placed = Builder(tiny.model(), parse({"schedule": schedule}), limits, load=tiny.load, recipes=recipes).build()
    assert isinstance(placed, Engine)
    requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in ("ppd", "plain")]
    for request in requests:
        placed.add(request)

    def level() -> None:
        for request in placed.running:
            if request.kv is not None and request.slice is None:
                assert len({layer.n for layer in request.kv.layers}) == 1

    step_all(placed, requests, level)
    want = [out for out in tiny.plain(PROMPTS, tiny.greedy(N)) for _ in range(2)]
    assert tiny.outs(requests) == want and placed.counters.accepted > 0


@pytest.mark.parametrize("budget", [0, 2, 3, 6, 15, 40])
def test_a_draft_that_there_are_few_rows_for_fits(budget: int) -> None:
    """It has fewer guesses, the least likely ones first, and then fewer prompt tokens."""
    placed = engine(prompting())
    drafter = drafter_of(placed)
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: draft(requests, [min(most, budget) for most in budgets])  # type: ignore[method-assign]
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS[:1], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[:1]
    sizes = [len(made.tokens) for made in watch.drafts.values()]
    assert max(sizes, default=0) <= budget and (len(sizes) > 3) == (budget > 0)
    assert budget < 3 or any(made.ask >= 3 for made in watch.drafts.values())


# ---- with other methods
@pytest.mark.parametrize("verbs", [
    {"store": "int8"}, {"evict": "snapkv:keep=0.5,window=4"}, {"attend": "hydragen:rows=16"}, {"attend": "quest"},
    {"evict": "streaming:sinks=2,window=30"}, {"skip": "unified:speedup=2,weights=none"},
], ids=str)  # fmt: skip
def test_over_other_methods_it_changes_nothing(verbs: dict[str, str]) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(N), verbs)
    placed = engine(prompting(**verbs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == want and placed.counters.drafted > 0


def test_rows_that_are_given_go_with_their_nodes() -> None:
    """Whoever cuts a draft cuts them."""
    rows = torch.arange(8.0).view(4, 2)
    draft = Draft([5, 6, 0, 0, 0, 0], [-1, 0, -1, 2, 1, 4], ask=4, given=rows)
    assert [[*draft.asking(node)] for node in (-1, 0, 1)] == [[2, 3], [], [4, 5]]
    few, some = draft.cut(4), draft.only([0, 2, 3])
    assert few.given is not None and torch.equal(few.given, rows[:2]) and few.ask == 2
    assert some.given is not None and torch.equal(some.given, rows[:2]) and some.ask == 2
    near = draft.prune(2)
    assert near.given is not None and near.ask == 2 and torch.equal(near.given, rows[:2])
    assert draft.cut(2).given is not None and not len(draft.cut(2).given)  # type: ignore[arg-type]


# ---- bad input
@pytest.mark.parametrize(("change", "why"), [
    ({"prompts": 0}, "num_prompts=0: there must be at least one prompt token"),
    ({"num_prompts": 4}, r"embeddings is \(3, 48\), and config.json asks for \(4, 48\)"),
    ({"num_prompts": "many"}, "num_prompts='many' must be a whole number"),
    ({"d": 32}, "hidden_size=32, the one in .* has 48"),
    ({"phasewise": {"base": "0123456789abcdef"}}, "were trained for another model"),
    ({"speculators_model_type": "medusa"}, "holds heads of kind 'medusa'"),
])  # fmt: skip
def test_files_that_do_not_fit_are_named(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        engine(prompting(source=tiny_prompts(tmp_path, **change)))


def test_other_drafters_name_the_one_that_reads_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--draft ppd:heads="):
        engine({"draft": f"eagle:heads={tiny_prompts(tmp_path)}"})


@pytest.mark.parametrize(("knobs", "why"), [
    ({"rows": 3}, "rows=3 must be from 4, a guess and 3 prompt tokens, to 127"), ({"rows": 128}, "rows=128"),
    ({"depth": 0}, "depth=0 must be from 1 to 8"), ({"depth": 9}, "depth=9"),
])  # fmt: skip
def test_knobs_out_of_range_are_named(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        PPD(**knobs)
