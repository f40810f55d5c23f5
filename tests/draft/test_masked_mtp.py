"""Masked multi-token prediction: exact whatever was trained, guesses as its plain forward says, and low-rank weights
that no real row has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.engine.lora import LORA, Lora
from phasewise.methods.draft.masked_mtp import MaskedMTP
from phasewise.model.lowrank import Delta, shapes
from phasewise.ops import native
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from tests import peft, tiny
from tests.draft.begun import CHAIN, Begun, Passed, half
from tests.draft.fitted import PROMPTS, N
from tests.draft.trained import MASKED_MTP
from tests.draft.watch import Watch, run_with_few_rows
from tests.speculation.masked_mtp_files import PlainMasks, tiny_masks

DEPTH = 3


# ---- guesses
@pytest.mark.parametrize("source", ["trained", "random"])
@pytest.mark.parametrize("knobs", ["", "sampler=false", "masks=linear"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, knobs: str, tmp_path: Path) -> None:
    """Whatever was accepted: the guesses of a pass follow from the masks behind the last accepted token alone. With
    linear masks there are some only where all guesses before were accepted."""
    path = MASKED_MTP.heads() if source == "trained" else tiny_masks(tmp_path)
    plain, placed = PlainMasks(path, tiny.checkpoint()), tiny.engine(MASKED_MTP.verbs(knobs, path))
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
        placed = tiny.engine(MASKED_MTP.verbs(f"masks={masks}"))
        tiny.run(placed, PROMPTS[:1], tiny.greedy(N))
        passes[masks] = placed.counters.forwards
    assert passes["quadratic"] < passes["linear"] < N


# ---- real rows beside mask rows, to the bit
EACH = [3, 2, 3]  # masks of the pending token and of each guess
REAL = 1 + len(CHAIN.tokens)


def delta(seed: int) -> Delta:
    generator, config = torch.Generator().manual_seed(seed), half().config
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes(config, range(config.layers), 4).items()
    }
    return Delta(tensors, torch.bfloat16, half().device)


def passed(way: str, adapted: bool, mates: int) -> Passed:
    """A pass over real rows and mask rows. way: "gated", "none" (no masks), "untuned" (masks without low-rank weights)
    or "open" (every row of the span has them)."""
    mine = Begun(tiny.prompts(37)[0], delta(5) if adapted else None)
    others = [Begun(prompt, lora) for prompt, lora in zip(tiny.prompts(20, 51, 9)[:mates], (delta(6), None, delta(7)))]
    each = [0] * REAL if way == "none" else EACH
    span = mine.with_given(CHAIN, each, None if way in ("none", "untuned") else delta(8))
    assert way in ("none", "untuned") or span.untuned == REAL
    if way == "open":
        span.untuned = 0
    return mine.run(span, others, REAL)


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("mates", [0, 1, 3])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_mask_rows(mates: int, adapted: bool) -> None:
    """Of the native step, in batches with other adapters and with none, with an adapter of its own or without. Where
    the gate is open, so that real rows have the masks' low-rank weights too, the same comparison fails."""
    want = passed("none", adapted, mates)
    for way in ("gated", "open"):
        found = passed(way, adapted, mates)
        assert found.same_rows(want, REAL) == found.same_kv(want) == (way == "gated")


@pytest.mark.parametrize("adapted", [False, True])
@torch.inference_mode()
def test_operator_by_operator_the_gate_holds_too(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows, for torch's kernels round by their number: mask rows alone change with the weights. They are
    what the native step says, but for rounding."""
    fast = passed("gated", adapted, 3).rows[REAL:]
    monkeypatch.setattr(half(), "stack", None)
    untuned, gated, opened = (passed(way, adapted, 3) for way in ("untuned", "gated", "open"))
    assert gated.same_rows(untuned, REAL) and not opened.same_rows(untuned, REAL)
    assert gated.same_kv(untuned) and not opened.same_kv(untuned)
    masks = gated.rows[REAL:]
    far = (masks - fast).norm() / masks.norm()
    assert far < 0.05 < 0.3 < (masks - untuned.rows[REAL:]).norm() / masks.norm()


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
    for verbs in ({}, MASKED_MTP.verbs("", tiny_masks(tmp_path / "heads", d=64))):
        methods = parse(verbs)
        recipes = {name: {**methods, LORA: lora} for name, lora in loras.items()}
        placed = Builder(model, methods, Limits(kv_bytes=64 << 20), load=tiny.load, recipes=recipes).build()
        requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in ("a", "", "b")]
        for request in requests:
            placed.add(request)
        tiny.finish(placed, requests)
        out.append(tiny.outs(requests))
    assert out[0] == out[1] and out[0][0] != out[0][1] != out[0][2]


# ---- costs and limits
@pytest.mark.parametrize("budget", [0, 2, 3, 6, 11])
def test_a_draft_that_there_are_few_rows_for_fits(budget: int) -> None:
    """It has fewer guesses, the last ones first, and then fewer masks."""
    watch = run_with_few_rows(MASKED_MTP.verbs(), budget)
    sizes = [len(made.tokens) for made in watch.drafts.values()]
    assert sizes[1:2] == ([{2: 2, 3: 3, 6: 3, 11: 11}[budget]] if budget else [])


def test_the_largest_draft_is_what_it_says() -> None:
    assert MaskedMTP(depth=8).traits.max_nodes == 80
