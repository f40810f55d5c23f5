"""Hidden Transfer: exact whatever its maps know, guesses as its plain forward says, no real row sees a pseudo row."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
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
from phasewise.load import model_path
from phasewise.methods.draft.hidden_transfer import HiddenTransfer
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import first_layers
from phasewise.speculation.first_layers import FirstLayers
from phasewise.speculation.heads import folder
from phasewise.speculation.loop import draft_span
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.beside_others import GOES_WITH, REFUSED
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import serve
from tests.draft.test_kangaroo import Watch, layers_run
from tests.engine.engines import Boom, step_all
from tests.laws.scenario import preempt
from tests.speculation.transfer_files import PlainTransfer, tiny_maps

LAYERS, LAYER, MAPS = 4, 2, 3


@cache
def heads() -> Path:
    """Maps that have learned what the tiny model writes after `PROMPTS`, by the trainer's own loss."""
    out, target = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), FrozenTarget(str(tiny.checkpoint()))
    kind, answers = KINDS["hidden_transfer"], tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = kind.build(target, MAPS)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(80):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), kind.tensors(module))
    return out


def transfer(knobs: str = "nodes=7", source: Path | str = "", **verbs: str) -> dict[str, str]:
    return {"draft": f"hidden_transfer:heads={source or heads()},{knobs}", **verbs}


def engine(verbs: dict[str, str], **more: Any) -> Engine:
    placed = tiny.engine(verbs, **more)
    assert isinstance(placed, Engine)
    return placed


# ---- tokens
@pytest.mark.parametrize("source", ["trained", "random:0"])
@pytest.mark.parametrize("knobs", ["nodes=7", "nodes=15,depth=2", "nodes=1,depth=1", "nodes=40"])
def test_greedy_tokens_are_plain_decodings(source: str, knobs: str) -> None:
    placed = engine(transfer(knobs, heads() if source == "trained" else source))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    c = placed.counters
    assert c.drafted > 0 and (c.emitted > 1.5 * c.forwards * len(PROMPTS)) == (source == "trained")


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_sampled_tokens_are_plain_decodings_too(verify: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = engine(transfer(verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize("source", ["trained", "random:0"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, tmp_path: Path) -> None:
    """Every guess is the rank of its map that its path in the tree names, and the guesses are all that fit."""
    path = heads() if source == "trained" else tiny_maps(tmp_path)
    plain, placed = PlainTransfer(path, tiny.checkpoint()), engine(transfer("nodes=9", path))
    watch = Watch(placed)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
    text, drawn = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]], 0
    for (_, known), draft in watch.drafts.items():
        levels, guesses = len(text) - known - 1, len(draft.tokens) - draft.ask
        ranks = plain.logits(text[: known - 1]).topk(10, -1).indices.tolist()
        paths = [path for path in drafter.tree if len(path) <= levels]
        want = [tuple(ranks[head][rank] for head, rank in enumerate(path)) for path in paths]
        if known > len(PROMPTS[2]) + 1:  # the first pass after a prompt has nothing to guess by
            assert draft.cut(guesses).paths(guesses) == want
            drawn += 1
        else:
            assert not guesses and draft.ask == MAPS
    assert drawn > 3 and len(drafter.tree) == 9


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("store", ["slab", "int8"])
def test_in_bfloat16_tokens_are_those_of_whole_passes(store: str) -> None:
    model = Model.load(model_path("pocket"))
    prompts, params = tiny.prompts(40, 9, 90, vocab=model.config.vocab), tiny.greedy(32)
    outs = []
    for verbs in ({"store": store}, transfer("nodes=6", "random:0", store=store)):
        placed = Builder(model, parse(verbs), Limits(kv_bytes=64 << 20), load=tiny.load).build()
        outs.append(tiny.outs(tiny.run(placed, prompts, params)))
    assert outs[0] == outs[1]


# ---- real rows beside pseudo rows, to the bit
TREE = Draft([7, 30, 12, 50, 9], [-1, -1, 0, 0, 1])
CHAIN = Draft([7, 30], [-1, 0])
DENSE = Phase("decode", None, catalog.build("attend", "dense"))  # type: ignore[arg-type]


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

    def span(self, draft: Draft, maps: Sequence[torch.Tensor]) -> Span:
        """The span of a draft that goes on from layer `LAYER`, with a pseudo row of each map behind each row."""
        whole, first = Draft([*draft.tokens], [*draft.parents]), FirstLayers(half(), LAYER, self.counters)
        for node in range(-1, len(draft.tokens)):
            above = node
            for _ in maps:
                above = whole.add(above, 0)
                whole.ask += 1
        with first.lent(DENSE):
            (rows,) = first.run_trees([self.request], [whole])
            if maps:
                first.begin_behind(self.request, torch.stack([row @ w for row in rows for w in maps]))
            span = draft_span(self.request, whole, DENSE)
            first.hand_over(span)
        assert span.layers == (LAYER, LAYERS)
        return span


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("draft", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("mates", [0, 1, 2])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_pseudo_rows(draft: Draft, mates: int) -> None:
    """Rows after the last layer and the KV that stays, in the same batches, and rows that run all layers at once. Where
    the mask lets real rows see pseudo rows, the same comparison fails."""
    generator, kept = torch.Generator().manual_seed(0), [0, 1, 3]
    maps = [(torch.randn(64, 64, generator=generator) / 8).bfloat16() for _ in range(MAPS)]
    rows, planes = list[torch.Tensor](), list[list[torch.Tensor]]()
    real = 1 + len(draft.tokens)
    for way in ("pseudo", "none", "whole", "open"):
        mine, others = Begun(tiny.prompts(37)[0]), [Begun(prompt) for prompt in tiny.prompts(20, 51)[:mates]]
        if way == "whole":
            span = draft_span(mine.request, draft, DENSE)
        else:
            span = mine.span(draft, [] if way == "none" else maps)
        if way == "open":
            assert span.sees is not None
            span.sees[:real, real:] = True
        spans = [Span(b.request, b.kv, DENSE, b.request.tokens[-1:], range(b.kv.layers[0].n, b.kv.layers[0].n + 1))
                 for b in others]  # fmt: skip
        x = forward(half(), [*spans[:1], span, *spans[1:]], mine.counters).x
        rows.append(x[span.start : span.start + real].clone())
        mine.kv.commit(kept if draft is TREE else 2)
        planes.append([p[:, : slab.n].clone() for layer in mine.kv.layers for slab in layer.slabs
                       for p in slab.buffer.planes])  # fmt: skip
        assert len({layer.n for layer in mine.kv.layers}) == 1
    pseudo, none, whole, opened = range(4)
    assert torch.equal(rows[pseudo], rows[none]) and torch.equal(rows[pseudo], rows[whole])
    for other in (none, whole):
        assert all(torch.equal(a, b) for a, b in zip(planes[pseudo], planes[other], strict=True))
    assert not torch.equal(rows[pseudo], rows[opened])
    assert not all(torch.equal(a, b) for a, b in zip(planes[pseudo], planes[opened], strict=True))


# ---- costs, to the row


@pytest.mark.parametrize("knobs", ["nodes=7", "nodes=15,depth=2", "nodes=1"])
def test_real_rows_run_every_layer_once_and_pseudo_rows_the_later_ones(
    knobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass is one of the first layers and one of the others. A row has as many pseudo rows as there are maps, but
    for tokens that the next draft could not reach any more."""
    verbs = transfer(knobs)
    ran, placed = layers_run(monkeypatch), engine(verbs)
    watch = Watch(placed)
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    c, prompt = placed.counters, len(PROMPTS[1])
    depth, pseudo, judged = (2 if "depth=2" in knobs else MAPS), 0, 0
    for (_, known), draft in watch.drafts.items():
        guesses, left = len(draft.tokens) - draft.ask, prompt + N - known - 1
        paths = [(), *draft.paths(guesses)]
        assert draft.ask == sum(max(0, min(depth, left - len(path) - 1)) for path in paths)
        pseudo, judged = pseudo + draft.ask, judged + guesses
    rounds = c.forwards - 1
    assert request.n_out == N and c.emitted == c.forwards + c.accepted and c.drafted == judged
    assert c.rows == prompt + rounds + judged
    assert ran == {i: c.rows + (pseudo if i >= LAYER else 0) for i in range(LAYERS)}
    assert c.row_layers == LAYERS * c.rows + (LAYERS - LAYER) * pseudo and pseudo > judged
    assert c.draft_forwards == len(watch.drafts) and c.draft_depth == LAYER * len(watch.drafts)
    assert rounds - len(watch.drafts) <= 1  # the last token alone is guessed by nobody


def test_where_first_rows_were_computed_anew_the_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form fails for a drafter that drops what it has begun. Its tokens are the same, and nothing is
    guessed: pseudo rows that ran all layers are none."""

    def dropped(self: Any, span: Any) -> None:
        self.drop(span.request)

    monkeypatch.setattr(first_layers.FirstLayers, "hand_over", dropped)
    placed = engine(transfer())
    assert tiny.outs(tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[1:2]
    c = placed.counters
    assert c.drafted == 0 and c.forwards == N and c.draft_forwards > N // 2
    assert c.rows > len(PROMPTS[1]) + c.forwards - 1 + c.draft_forwards


# ---- whatever happens
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted() -> None:
    """But for the pass after rows were computed anew, which has nothing to guess by."""
    placed = engine(transfer())
    watch = Watch(placed)
    cold = [serve(placed, prompt) for prompt in PROMPTS]
    alone, watch.accepted = watch.accepted, {}
    warm = [serve(placed, prompt) for prompt in PROMPTS]
    assert [request.cached for request in warm] == [32, 64, 0]
    assert watch.accepted == alone and sum(alone.values()) > N / 2
    assert [request.out for request in warm] == [request.out for request in cold]
    assert all(request.state == {} for request in warm)
    watch.accepted, watch.drafts = {}, {}
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N))
    whole = {key for key, draft in watch.drafts.items() if len(draft.tokens) > draft.ask}
    shared = watch.accepted.keys() & alone.keys() & whole
    assert {key: watch.accepted[key] for key in shared} == {key: alone[key] for key in shared} and len(shared) > 2


@pytest.mark.parametrize("schedule", ["layered:rows_per_group=8", "sarathi:budget=24", "prefill_first"])
def test_mates_and_slices_change_nothing(schedule: str) -> None:
    """Prompts that cross the model in pieces, rows of other recipes and drafts that there are too few rows for share
    steps with rows that begin late. The KV of all layers is level after every step."""
    limits = Limits(kv_bytes=64 << 20)
    recipes = parse_recipes({}, {"transfer": transfer(), "plain": {}})
    placed = Builder(tiny.model(), parse({"schedule": schedule}), limits, load=tiny.load, recipes=recipes).build()
    assert isinstance(placed, Engine)
    requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in ("transfer", "plain")]
    later = requests[3:]
    for request in requests[:3]:
        placed.add(request)

    def level() -> None:
        if later:
            placed.add(later.pop(0))
        for request in placed.running:
            if request.kv is not None and request.slice is None:
                assert len({layer.n for layer in request.kv.layers}) == 1

    for _ in range(4):
        placed.step()
        level()
    step_all(placed, requests, level)
    want = [out for out in tiny.plain(PROMPTS, tiny.greedy(N)) for _ in range(2)]
    assert tiny.outs(requests) == want and placed.counters.accepted > 0


@pytest.mark.parametrize("budget", [3, 6, 7, 14, 15, 40])
def test_a_draft_that_there_are_few_rows_for_keeps_its_pseudo_rows(budget: int) -> None:
    """It has fewer guesses instead; where not even the pending token's fit, there is none."""
    placed = engine(transfer())
    drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: draft(requests, [min(most, budget) for most in budgets])
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS[:1], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[:1]
    sizes = Counter[int]()
    for (_, known), made in watch.drafts.items():
        guesses, left = len(made.tokens) - made.ask, len(PROMPTS[0]) + N - known - 1
        paths = [(), *made.paths(guesses)]
        assert made.ask == sum(max(0, min(MAPS, left - len(path) - 1)) for path in paths)
        assert len(made.tokens) <= budget
        sizes[guesses] += left > 2 * MAPS  # all of whose rows have all theirs
    assert max(n for n in sizes if sizes[n]) == min(7, (1 + budget) // (1 + MAPS) - 1)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("where", ["first", "others"])
def test_whoever_raises_leaves_no_rows_behind(where: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layers, or after those behind: only the culprit fails, and nothing is left uncommitted."""
    left, real = [calls], first_layers.forward

    def breaks(spans: Any) -> None:
        if any(span.request.id == "bad" and (where == "first" or span.note is not None) for span in spans):
            left[0] -= 1
            if left[0] < 0:
                raise Boom("on the way")

    def broken(model: Model, spans: Any, counters: Counters, *more: Any) -> Any:
        found = real(model, spans, counters, *more)
        breaks(spans)
        return found

    def broken_accept(self: Any, spans: Any, hidden: Any) -> Any:
        breaks(spans)
        return accept(self, spans, hidden)

    placed = engine(transfer())
    decode = placed.recipes[""].phases[-1].decode
    accept = type(decode).accept
    if where == "first":
        monkeypatch.setattr(first_layers, "forward", broken)
    else:
        monkeypatch.setattr(type(decode), "accept", broken_accept)
    requests = [Request(p, tiny.greedy(N), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    want, bad = tiny.plain(PROMPTS, tiny.greedy(N)), requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: on the way")
    assert [request.out for request in requests] == [want[0], want[2]]


# ---- with other methods
@GOES_WITH
def test_over_methods_that_leave_decode_rows_alone_it_changes_nothing(verbs: dict[str, str]) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(N), verbs)
    placed = engine(transfer(**verbs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == want and placed.counters.accepted > 0


@REFUSED
def test_methods_that_choose_among_rows_or_layers_are_refused(verbs: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        engine(transfer(**verbs))


# ---- bad input
@pytest.mark.parametrize(("change", "why"), [
    ({"layer": 0}, "transfer_layer=0, and the model has 4 layers: it must be from 1 to 3"),
    ({"layer": 4}, "transfer_layer=4"),
    ({"layer": "deep"}, "transfer_layer='deep' must be a whole number"),
    ({"maps": 0}, "num_maps=0: there must be at least one map"),
    ({"num_maps": 4}, "maps.3.weight is absent"),
    ({"d": 32}, "hidden_size=32, the one in .* has 48"),
])  # fmt: skip
def test_files_that_do_not_fit_are_named(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        engine(transfer(source=tiny_maps(tmp_path, **change)))


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(UserError, match="has 1 layer; maps stand between two"):
        engine(transfer(source="random:0"), of=tiny.model(layers=1))


def test_heads_of_another_kind_are_named(tmp_path: Path) -> None:
    path = tiny_maps(tmp_path)
    with pytest.raises(UserError, match="--draft hidden_transfer:heads="):
        engine({"draft": f"eagle:heads={path}"})
    other = tiny_maps(tmp_path / "other", speculators_model_type="medusa")
    with pytest.raises(UserError, match="holds heads of kind 'medusa'"):
        engine(transfer(source=other))


@pytest.mark.parametrize(("knobs", "why"), [({"nodes": 0}, "nodes=0"), ({"nodes": 64}, "nodes=64"),
                                            ({"depth": 0}, "depth=0"), ({"depth": 9}, "depth=9")])  # fmt: skip
def test_knobs_out_of_range_are_named(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        HiddenTransfer(**knobs)
