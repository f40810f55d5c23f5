"""Clover's heads in training are those of the draft loop, begin as the model's last layer, and learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.speculation.heads import folder
from phasewise.speculation.heads.clover import CloverHeads
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.clover import CloverKind
from phasewise.train.heads.feature import BEGIN
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import oracle, tiny
from tests.speculation.clover_files import PlainClover
from tests.speculation.eagle_files import normed
from tests.train.learned import lowered
from tests.train.test_eagle_heads import DEPTH, ROWS, target

CLOVER = KINDS["clover"]


def made(its: FrozenTarget, kind: CloverKind | None = None) -> CloverHeads:
    torch.manual_seed(0)
    heads = (kind or CLOVER).build(its, DEPTH)
    assert isinstance(heads, CloverHeads)
    return heads


def test_every_step_is_the_draft_loops_on_the_same_tokens(tmp_path: Path) -> None:
    its = target()
    heads, _ = feature_heads(its.model, ("clover",), "random:5")
    folder.write(tmp_path, CLOVER.config(heads, its), tensors_of(heads))
    plain, seen = PlainClover(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0), CLOVER.taps(heads))
    for step, logits in enumerate(CLOVER.guesses(heads, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(step)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], text[t + 2 : t + 2 + step])[-1])
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_they_begin_as_the_models_last_layer_run_twice() -> None:
    """Every step says what the norm and output head say of the last layer's rows, after that layer again."""
    its = target()
    heads, text = made(its), tiny.prompts(11)[0]
    seen = its.see(pad_rows([[(text, True)]], 0), CLOVER.taps(heads))
    layers = its.model.config.layers
    state = oracle.onward(tiny.checkpoint(), oracle.states(tiny.checkpoint(), text)[-1], layers - 1)[-1]
    logits = oracle.unembedded(tiny.checkpoint(), oracle.last(tiny.checkpoint(), state))
    for step, found in enumerate(CLOVER.guesses(heads, its, seen)):
        torch.testing.assert_close(found, BEGIN * logits[: len(found)], atol=1e-3, rtol=1e-3)
        assert len(found) == len(text) - 2 - step


@torch.no_grad()
def test_before_a_mixture_of_experts_blocks_begin_by_adding_nothing() -> None:
    its = FrozenTarget(str(tiny.checkpoint(experts=2)))
    heads = made(its)
    seen = its.see(pad_rows([[(tiny.prompts(11)[0], True)]], 0), CLOVER.taps(heads))
    (x,) = seen.taps.values()
    state = normed(x, BEGIN * its.model.norm.weight)
    found = next(iter(CLOVER.guesses(heads, its, seen)))
    torch.testing.assert_close(found, its.unembed(state[0, : len(found)]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("regressive", [True, False])
def test_losses_are_lowered_and_a_control_reads_no_guess(regressive: bool) -> None:
    its, block, kind = target(), pad_rows(ROWS, 0), CloverKind(regressive=regressive)
    heads = made(its, kind)
    found = lowered(kind, heads, its, block, 25)
    assert [*found[0]] == [f"head{i + 1}" for i in range(DEPTH)]
    assert all(found[-1][name] < 0.7 * found[0][name] for name in found[0])
    assert bool(heads.decoder.value.weight.any()) == regressive


def test_the_drafter_takes_what_training_writes(tmp_path: Path) -> None:
    its = target()
    heads = made(its)
    folder.write(tmp_path, CLOVER.config(heads, its), CLOVER.tensors(heads))
    placed, prompts = tiny.engine({"draft": f"clover:heads={tmp_path},depth={DEPTH}"}), tiny.prompts(12, 40)
    assert tiny.outs(tiny.run(placed, prompts)) == tiny.plain(prompts, tiny.greedy())
    assert placed.counters.drafted > 0 and placed.counters.draft_forwards > 0
