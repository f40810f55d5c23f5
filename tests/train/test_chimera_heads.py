"""Unrolled training of Chimera's heads computes what the drafter would, and lowers what it is told to learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.speculation.heads.trigram import TrigramHeads
from phasewise.train.heads.chimera import ChimeraKind
from phasewise.train.heads.kinds import KINDS, HeadsKind
from phasewise.train.heads.run import HeadsJob, heads_loss, train
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.chimera_files import PlainChimera
from tests.train.learned import lowered
from tests.train.test_eagle_heads import DEPTH, ROWS, target
from tests.train.test_heads import silent

ONE_TOKEN = ChimeraKind(ngram=1)


def random_heads(its: FrozenTarget, ngram: int = 3) -> TrigramHeads:
    """Random heads of the model's own widths, an output head for each step."""
    made, _ = feature_heads(its.model, ("chimera",), "random:5")
    assert isinstance(made, TrigramHeads) and made.steps == DEPTH
    made.options = replace(made.options, ngram=ngram)
    return made


@pytest.mark.parametrize("kind", [ChimeraKind(), ONE_TOKEN], ids=["trigrams", "one token"])
def test_every_step_is_the_draft_loops_on_the_same_tokens(kind: ChimeraKind, tmp_path: Path) -> None:
    its = target()
    made = random_heads(its, kind.ngram)
    folder.write(tmp_path, kind.config(made, its), tensors_of(made))
    plain, seen = PlainChimera(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0))
    for step, logits in enumerate(kind.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(step)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], text[t + 2 : t + 2 + step])[-1])
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_it_begins_with_what_the_model_says_less_surely() -> None:
    its = target()
    made, seen = KINDS["chimera"].build(its, DEPTH), its.see(pad_rows(ROWS, 0))
    for logits in KINDS["chimera"].guesses(made, its, seen):
        assert logits.shape[1] == its.vocab
    first = next(iter(KINDS["chimera"].guesses(made, its, seen))).detach()
    wanted = 0.3 * its.unembed(seen.states(0))
    assert float((first - wanted).norm() / wanted.norm()) < 0.45


@pytest.mark.parametrize("kind", [KINDS["chimera"], ONE_TOKEN], ids=["trigrams", "one token"])
def test_what_training_lowers_is_what_it_is_told_to_learn(kind: HeadsKind) -> None:
    """A few steps on one block lower the loss of every depth; every parameter is moved by them."""
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = kind.build(its, DEPTH)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    found = lowered(kind, module, its, block, 30, decay=0.0)
    assert len(found[0]) == DEPTH and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])
    assert all(not torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert list(heads_loss(kind, module, its, [block], 1).parts) == ["head1"]


def test_later_depths_are_learned_through_earlier_surrogates() -> None:
    """The loss of the second depth alone moves what makes the first surrogate: no gradient is cut between steps."""
    its = target()
    made = random_heads(its)
    seen = its.see(pad_rows(ROWS, 0))
    trigrams = list[torch.Tensor]()
    made.trimlp.register_forward_hook(lambda _, __, out: (out.retain_grad(), trigrams.append(out))[1])
    logits = list(KINDS["chimera"].guesses(made, its, seen))
    logits[1].square().sum().backward()
    (trigram,) = trigrams
    assert trigram.grad is not None
    row = trigram.grad[0].abs().sum(-1)
    learned = seen.wanted(1)[0].nonzero()[:, 0].tolist()
    assert bool((row[[learned[0] + 1]] > 0).all()), "the root's own trigram, behind which the surrogate was made"


def test_a_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="heads of kind chimera guess by the model's own output matrix"):
        train(HeadsJob("chimera", "pocket-draft", tmp_path, draft_vocab=64), silent)


def test_the_ngram_is_stored(tmp_path: Path) -> None:
    its = target()
    made = ONE_TOKEN.build(its, 2)
    folder.write(tmp_path, ONE_TOKEN.config(made, its), ONE_TOKEN.tensors(made))
    again, _ = feature_heads(its.model, ("chimera",), str(tmp_path))
    assert isinstance(again, TrigramHeads) and again.options.ngram == 1 and again.options.heads == 2
