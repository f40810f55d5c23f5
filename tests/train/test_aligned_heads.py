"""Heads that learn to pass on the model's states: the two losses, whose parameters they move, and what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads import aligned
from phasewise.train.heads.aligned import AlignedKind, noise, state_size
from phasewise.train.heads.kinds import KINDS, HeadsKind
from phasewise.train.heads.run import HeadsJob, heads_loss, train
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.fspad_files import PlainFspad
from tests.train.learned import lowered
from tests.train.test_eagle_heads import DEPTH, ROWS, target
from tests.train.test_heads import silent

FSPAD = KINDS["fspad"]
DOWN = "layers.0.mlp.down_proj.weight"


def random_heads(its: FrozenTarget) -> FeatureHeads:
    made, _ = feature_heads(its.model, ("fspad",), "random:5")
    made.steps = DEPTH
    return made


def stored(its: FrozenTarget, out: Path) -> PlainFspad:
    """The same heads, as their plain forward."""
    made = random_heads(its)
    folder.write(out, FSPAD.config(made, its), tensors_of(made))
    return PlainFspad(out, tiny.checkpoint())


def test_every_step_is_the_draft_loops_on_the_same_tokens(tmp_path: Path) -> None:
    its = target()
    plain, seen = stored(its, tmp_path), its.see(pad_rows(ROWS, 0))
    for step, logits in enumerate(FSPAD.guesses(random_heads(its), its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(step)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], text[t + 2 : t + 2 + step])[-1])
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_the_loss_is_that_of_the_state_and_of_what_the_model_says_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position by position, against the plain forward: 1.0 of a smooth L1 and 0.1 of a soft cross-entropy."""
    monkeypatch.setattr(aligned, "NOISE", 0.0)
    its = target()
    plain, rows = stored(its, tmp_path), pad_rows(ROWS, 0)
    seen, size = its.see(rows), float(its.model.norm.weight.square().mean()) ** 0.5
    passed, said = list[Tensor](), list[Tensor]()
    for row, pieces in enumerate(ROWS):
        text = [token for piece, _ in pieces for token in piece]
        learned = [own for piece, own in pieces for _ in piece]
        for t in range(len(text) - 2):
            if not learned[t + 2]:
                continue
            output = plain.run(plain.embeddings[text[1 : t + 2]], seen.h[row, : t + 1])[-1]
            off = ((output[plain.embeddings.shape[1] :] - seen.h[row, t + 1]) / size).abs()
            passed.append(torch.where(off < 1, off.square() / 2, off - 0.5).mean())
            expected = its.unembed(seen.h[row, t + 1]).softmax(-1)
            said.append(-(expected * its.unembed(output[: plain.embeddings.shape[1]]).log_softmax(-1)).sum())
    found = heads_loss(FSPAD, random_heads(its), its, [rows, rows])
    wanted = [float(torch.stack(each).mean()) for each in (passed, said)]
    assert len(said) == 12 and [found.parts["feature"], found.parts["head1"]] == pytest.approx(wanted, rel=1e-4)
    assert float(found.total.detach()) == pytest.approx(wanted[0] + 0.1 * wanted[1], rel=1e-4)


def test_each_loss_moves_its_own_output_alone() -> None:
    """Partial alignment: of the last projection the halves have nothing to do with the other one's loss."""
    its = target()
    module, seen = random_heads(its), its.see(pad_rows(ROWS, 0))
    assert isinstance(FSPAD, AlignedKind)
    halves = list[tuple[float, float]]()
    for which in (0, 1):
        module.zero_grad()
        FSPAD.losses(module, its, seen)[which].backward()
        grad = module.get_parameter(DOWN).grad
        assert grad is not None
        first, second = (float(half.abs().max()) for half in grad.chunk(2))
        halves.append((first, second))
    of_feature, of_logits = halves
    assert of_feature[0] == 0 < of_feature[1] and of_logits[1] == 0 < of_logits[0]


@pytest.mark.parametrize("kind", [FSPAD, AlignedKind("eagle1", inner=20)], ids=["fspad", "eagle1"])
def test_both_losses_are_lowered(kind: HeadsKind) -> None:
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = kind.build(its, DEPTH)
    found = lowered(kind, module, its, block, 30)
    assert [*found[0]] == ["feature", "head1"]
    assert all(found[-1][name] < 0.5 * found[0][name] for name in found[0])


def test_noise_is_small_and_hangs_on_the_text_alone() -> None:
    its = target()
    first, other = (SeenBlock(pad_rows([row], 0), torch.zeros(1, 11, 48)) for row in ROWS)
    assert torch.equal(noise(first), noise(first)) and not torch.equal(noise(first)[:, :8], noise(other)[:, :8])
    assert 0.9 * aligned.NOISE < float(noise(first).abs().max()) <= aligned.NOISE
    assert state_size(its) == pytest.approx(float(its.model.norm.weight.square().mean()) ** 0.5)


def test_an_eagle_block_of_any_size_is_eagles(tmp_path: Path) -> None:
    its = target()
    kind = AlignedKind("eagle1", inner=20)
    made = kind.build(its, 2)
    folder.write(tmp_path, kind.config(made, its), kind.tensors(made))
    again, _ = feature_heads(its.model, ("eagle1",), str(tmp_path))
    assert again.config.intermediate == 20 and isinstance(again, nn.Module)


def test_later_depths_are_not_learned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unroll=2: heads of kind fspad learn the first depth alone"):
        train(HeadsJob("fspad", "pocket-draft", tmp_path, unroll=2), silent)
