"""Masked multi-token prediction: exact whatever was trained, guesses as its plain forward says, and low-rank weights
that no real row has."""

from __future__ import annotations

import tempfile
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
from phasewise.engine.lora import LORA, Lora
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.draft.masked_mtp import MaskedDrafter, MaskedMTP
from phasewise.model.lowrank import Delta, shapes
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.speculation.loop import Speculation, draft_span
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.verbs.draft import Draft
from tests import peft, tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import serve
from tests.draft.test_kangaroo import Watch
from tests.engine.engines import step_all
from tests.laws.scenario import preempt
from tests.speculation.masked_mtp_files import PlainMasks, tiny_masks

DEPTH = 3


@cache
def heads() -> Path:
    """Masks, low-rank weights and a sampler that have learned what the tiny model writes after `PROMPTS`, by the
    trainer's own loss."""
    out, target = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), FrozenTarget(str(tiny.checkpoint()))
    kind, answers = KINDS["masked_mtp"], tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = kind.build(target, DEPTH)
    kind.begin(module, target, block)
    adam = torch.optim.AdamW(module.parameters(), lr=2e-2)
    for _ in range(80):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), kind.tensors(module))
    return out


def masking(knobs: str = "", source: Path | str = "", **verbs: str) -> dict[str, str]:
    return {"draft": f"masked_mtp:heads={source or heads()}{knobs and ','}{knobs}", **verbs}


def engine(verbs: dict[str, str], **more: Any) -> Engine:
    placed = tiny.engine(verbs, **more)
    assert isinstance(placed, Engine)
    return placed


def drafter_of(placed: Engine) -> MaskedDrafter:
    drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, MaskedDrafter)
    return drafter


# ---- tokens
@pytest.mark.parametrize("source", ["trained", "random:0"])
@pytest.mark.parametrize("knobs", ["", "depth=1", "masks=linear", "sampler=false,depth=2"])
def test_greedy_tokens_are_plain_decodings(source: str, knobs: str) -> None:
    placed = engine(masking(knobs, heads() if source == "trained" else source))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > 0


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_sampled_tokens_are_plain_decodings_too(verify: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = engine(masking(verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize("source", ["trained", "random"])
@pytest.mark.parametrize("knobs", ["", "sampler=false", "masks=linear"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, knobs: str, tmp_path: Path) -> None:
    """Whatever was accepted: the guesses of a pass follow from the masks behind the last accepted token alone. With
    linear masks there are some only where all guesses before were accepted."""
    path = heads() if source == "trained" else tiny_masks(tmp_path)
    plain, placed = PlainMasks(path, tiny.checkpoint()), engine(masking(knobs, path))
    watch, everywhere = Watch(placed), "linear" not in knobs
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text, first, drawn = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]], True, 0
    masks = 0  # behind the token before the pending one
    for (prompt, known), draft in watch.drafts.items():
        levels, guesses = len(text) - known - 1, len(draft.tokens) - draft.ask
        depth = min(masks, levels)
        assert draft.tokens[:guesses] == plain.guesses(text[:known], depth, "sampler" not in knobs)
        for node in range(-1, guesses):
            behind = max(0, min(DEPTH, levels - node - 2)) if everywhere or node == guesses - 1 else 0
            assert len(draft.asking(node)) == behind
        assert first == (not guesses) or not everywhere
        accepted = watch.accepted[prompt, known]
        first, drawn = False, drawn + (guesses > 0)
        masks = len(draft.asking(accepted - 1))
    assert drawn > 3


def test_masks_behind_every_guess_have_more_accepted_than_behind_the_last() -> None:
    """On the same prompts: after a rejection linear masks leave nothing to guess by. Both have the same weights."""
    passes = dict[str, int]()
    for masks in ("quadratic", "linear"):
        placed = engine(masking(f"masks={masks}"))
        tiny.run(placed, PROMPTS[:1], tiny.greedy(N))
        passes[masks] = placed.counters.forwards
    assert passes["quadratic"] < passes["linear"] < N


# ---- real rows beside mask rows, to the bit
CHAIN = Draft([7, 30], [-1, 0])
DENSE = Phase("decode", None, catalog.build("attend", "dense"))  # type: ignore[arg-type]
EACH = [3, 2, 3]  # masks of the pending token and of each guess
REAL = 1 + len(CHAIN.tokens)


@cache
def half() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def delta(seed: int) -> Delta:
    generator, config = torch.Generator().manual_seed(seed), half().config
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes(config, range(config.layers), 4).items()
    }
    return Delta(tensors, torch.bfloat16, half().device)


class Begun:
    """A request of the model in bfloat16 whose prompt is computed but for the pending token; `lora`: its adapter."""

    def __init__(self, prompt: Sequence[int], lora: Delta | None = None) -> None:
        self.counters = Counters()
        store = Store(kv_shapes(half()), Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.request = Request(prompt, tiny.greedy(40))
        self.request.lora = lora
        self.kv = self.request.kv = store.open(self.request, len(prompt) + 64)
        self.kv.reserve(len(prompt) + 64)
        n = len(prompt) - 1
        forward(half(), [Span(self.request, self.kv, DENSE, prompt[:n], range(n))], self.counters)
        self.kv.commit(n)
        self.request.computed = n

    def plain(self) -> Span:
        """The span of its pending token."""
        n = self.kv.layers[0].n
        return Span(self.request, self.kv, DENSE, self.request.tokens[-1:], range(n, n + 1))

    def masked(self, each: Sequence[int], tuned: Delta | None) -> Span:
        """The span of the draft with so many masks behind its rows, as the loop makes it."""
        whole, rows = Draft([*CHAIN.tokens], [*CHAIN.parents], tuned=tuned), list[torch.Tensor]()
        embeddings = torch.randn(max(each, default=0), 64, generator=torch.Generator().manual_seed(0))
        for node, count in enumerate(each, -1):
            above = node
            for i in range(count):
                above = whole.add(above, 0)
                whole.ask += 1
                rows.append(embeddings[i])
        if rows:
            whole.given = torch.stack(rows)
        made: Any = type("Loop", (), {"host": type("Host", (), {"model": half()})})
        return Speculation._entering(made, draft_span(self.request, whole, DENSE), whole)


def rows_of(way: str, adapted: bool, mates: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Real rows after the last layer, the KV that stays, and mask rows. way: "gated", "none" (no masks), "untuned"
    (masks without low-rank weights) or "open" (every row of the span has them)."""
    mine = Begun(tiny.prompts(37)[0], delta(5) if adapted else None)
    others = [Begun(prompt, lora) for prompt, lora in zip(tiny.prompts(20, 51, 9)[:mates], (delta(6), None, delta(7)))]
    span = mine.masked([0] * REAL if way == "none" else EACH, None if way in ("none", "untuned") else delta(8))
    assert way in ("none", "untuned") or span.untuned == REAL
    if way == "open":
        span.untuned = 0
    spans = [each.plain() for each in others]
    x = forward(half(), [*spans[:1], span, *spans[1:]], mine.counters).x
    found = x[span.slice].clone()
    mine.kv.commit(REAL)
    planes = [p[:, : slab.n].clone() for layer in mine.kv.layers for slab in layer.slabs for p in slab.buffer.planes]
    return found[:REAL], planes, found[REAL:]


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("mates", [0, 1, 3])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_mask_rows(mates: int, adapted: bool) -> None:
    """Of the native step, in batches with other adapters and with none, with an adapter of its own or without. Where
    the gate is open, so that real rows have the masks' low-rank weights too, the same comparison fails."""
    want, kept, _ = rows_of("none", adapted, mates)
    for way in ("gated", "open"):
        rows, planes, _ = rows_of(way, adapted, mates)
        assert torch.equal(rows, want) == (way == "gated")
        assert all(torch.equal(a, b) for a, b in zip(planes, kept, strict=True)) == (way == "gated")


@pytest.mark.parametrize("adapted", [False, True])
@torch.inference_mode()
def test_operator_by_operator_the_gate_holds_too(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows, for torch's kernels round by their number: mask rows alone change with the weights. They are
    what the native step says, but for rounding."""
    fast = rows_of("gated", adapted, 3)[2]
    monkeypatch.setattr(half(), "stack", None)
    want, kept, untuned = rows_of("untuned", adapted, 3)
    rows, planes, masks = rows_of("gated", adapted, 3)
    opened, others, _ = rows_of("open", adapted, 3)
    assert torch.equal(rows, want) and not torch.equal(opened, want)
    assert all(torch.equal(a, b) for a, b in zip(planes, kept, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))
    far = (masks - fast).norm() / masks.norm()
    assert far < 0.05 < 0.3 < (masks - untuned).norm() / masks.norm()


def test_low_rank_weights_go_with_the_nodes_that_have_them() -> None:
    """Whoever cuts a draft keeps them with what is left of those."""
    rows, tuned = torch.arange(6.0).view(3, 2), delta(1)
    draft = Draft([5, 0, 0, 0], [-1, -1, 1, 0], ask=3, given=rows, tuned=tuned)
    for less in (draft.cut(3), draft.only([0, 1, 3]), draft.prune(1)):
        assert less.tuned is tuned and less.given is not None and len(less.given) == less.ask > 0


# ---- beside adapters
def test_a_request_has_its_adapter_and_masks_have_theirs(tmp_path: Path) -> None:
    """Tokens are those of the adapter's plain decoding, in steps with requests of other adapters and of none."""
    base, model = tiny.checkpoint(hidden=64), tiny.model(hidden=64)
    loras = {name: Lora.read(name, str(peft.write(tmp_path / name, base, seed=seed)), model.config, 64)
             for seed, name in enumerate(("a", "b"))}  # fmt: skip
    out = list[list[list[int]]]()
    for verbs in ({}, masking("", tiny_masks(tmp_path / "heads", d=64))):
        methods = parse(verbs)
        recipes = {name: {**methods, LORA: lora} for name, lora in loras.items()}
        placed = Builder(model, methods, Limits(kv_bytes=64 << 20), load=tiny.load, recipes=recipes).build()
        requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in ("a", "", "b")]
        for request in requests:
            placed.add(request)
        tiny.finish(placed, requests)
        out.append(tiny.outs(requests))
    assert out[0] == out[1] and out[0][0] != out[0][1] != out[0][2]


# ---- costs, to the row
@pytest.mark.parametrize(("knobs", "most"), [("", 15), ("depth=2", 8), ("masks=linear", 6), ("depth=1", 3)])
def test_a_pass_runs_its_guesses_and_masks_once(knobs: str, most: int) -> None:
    """No pass beside the model's own, and no more KV after one than tokens were accepted."""
    placed = engine(masking(knobs))
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
    assert max(len(draft.tokens) for draft in watch.drafts.values()) == most


# ---- whatever happens
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted() -> None:
    """But for the pass after rows were computed anew, which has nothing to guess by."""
    placed = engine(masking())
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
    steps with mask rows."""
    recipes = parse_recipes({}, {"masks": masking(), "other": {"draft": "prompt_lookup"}, "plain": {}})
    limits = Limits(kv_bytes=64 << 20)
    placed = Builder(tiny.model(), parse({"schedule": schedule}), limits, load=tiny.load, recipes=recipes).build()
    assert isinstance(placed, Engine)
    names = ("masks", "other", "plain")
    requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in names]
    for request in requests:
        placed.add(request)
    step_all(placed, requests, lambda: None)
    want = [out for out in tiny.plain(PROMPTS, tiny.greedy(N)) for _ in names]
    assert tiny.outs(requests) == want and placed.counters.accepted > 0


@pytest.mark.parametrize("budget", [0, 2, 3, 6, 11])
def test_a_draft_that_there_are_few_rows_for_fits(budget: int) -> None:
    """It has fewer guesses, the last ones first, and then fewer masks."""
    placed = engine(masking())
    drafter = drafter_of(placed)
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: draft(requests, [min(most, budget) for most in budgets])  # type: ignore[method-assign]
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS[:1], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[:1]
    sizes = [len(made.tokens) for made in watch.drafts.values()]
    assert max(sizes, default=0) <= budget and sizes[1:2] == ([{2: 2, 3: 3, 6: 3, 11: 11}[budget]] if budget else [])


# ---- with other methods
@pytest.mark.parametrize("verbs", [
    {"store": "int8"}, {"evict": "snapkv:keep=0.5,window=4"}, {"attend": "hydragen:rows=16"}, {"attend": "quest"},
    {"evict": "streaming:sinks=2,window=30"}, {"skip": "unified:speedup=2,weights=none"},
], ids=str)  # fmt: skip
def test_over_other_methods_it_changes_nothing(verbs: dict[str, str]) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(N), verbs)
    placed = engine(masking(**verbs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == want and placed.counters.drafted > 0


# ---- bad input
@pytest.mark.parametrize(("change", "why"), [
    ({"num_masks": 0}, "num_masks=0 and lora_rank=2: neither may be 0"),
    ({"num_masks": 4}, r"masks is \(3, 48\), and config.json asks for \(4, 48\)"),
    ({"lora_rank": 3}, r"low_rank.0.qkv.a is \(2, 48\), and config.json asks for \(3, 48\)"),
    ({"d": 32}, "hidden_size=32, the one in .* has 48"),
    ({"phasewise": {"base": "0123456789abcdef"}}, "were trained for another model"),
    ({"speculators_model_type": "medusa"}, "holds heads of kind 'medusa'"),
])  # fmt: skip
def test_files_that_do_not_fit_are_named(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        engine(masking(source=tiny_masks(tmp_path, **change)))


def test_other_drafters_name_the_one_that_reads_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--draft masked_mtp:heads="):
        engine({"draft": f"eagle:heads={tiny_masks(tmp_path)}"})


@pytest.mark.parametrize(("knobs", "why"), [("depth=0", "depth=0 must be from 1 to 8"), ("depth=9", "depth=9"),
                                            ("masks=cubic", "cubic")])  # fmt: skip
def test_knobs_out_of_range_are_named(knobs: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse({"draft": f"masked_mtp:{knobs}"})


def test_the_largest_draft_is_what_it_says() -> None:
    assert MaskedMTP(depth=8).traits.max_nodes == 80
