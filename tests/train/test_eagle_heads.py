"""Unrolled training of EAGLE's heads and MTP modules computes what the drafter would: every step of every position, on
given tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.feature import FeatureKind
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import frequent, heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.train.written import WrittenText
from tests import tiny
from tests.speculation import eagle_files as files
from tests.train.learned import lowered

ROWS = [
    [([5, 9, 3, 8, 4], False), ([11, 7, 9, 20, 6, 13], True)],
    [([6, 4], False), ([3, 9, 12, 30, 14, 15], True)],
]
DEPTH = 4


def target() -> FrozenTarget:
    return FrozenTarget(str(tiny.checkpoint()))


def written(kind: str, out: Path, its: FrozenTarget) -> FeatureHeads:
    """Random heads of a kind, in a folder."""
    made, _ = feature_heads(its.model, (kind,), "random:5")
    made.steps = DEPTH
    folder.write(out, KINDS[kind].config(made, its), tensors_of(made))
    return made


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_every_step_is_the_draft_loops_on_the_same_tokens(kind: str, tmp_path: Path) -> None:
    """Against the plain forward, which goes on with its own outputs token by token and sees all that came before."""
    its = target()
    heads = written(kind, tmp_path, its)
    plain = files.Plain(tmp_path, tiny.checkpoint())
    plain.third = kind == "eagle3"
    seen = its.see(pad_rows(ROWS, 0), KINDS[kind].taps(heads))
    for step, logits in enumerate(KINDS[kind].guesses(heads, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(step)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], text[t + 2 : t + 2 + step])[-1])
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_what_training_lowers_is_what_it_is_told_to_learn(kind: str) -> None:
    """A few steps on one block lower the loss of every depth; with one depth learned, the others are not asked for."""
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KINDS[kind].build(its, DEPTH)
    assert isinstance(KINDS[kind], FeatureKind) and module.steps == DEPTH
    found = lowered(KINDS[kind], module, its, block, 30)
    assert len(found[0]) == DEPTH and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])
    assert list(heads_loss(KINDS[kind], module, its, [block], 1).parts) == ["head1"]


KNOWN = torch.tensor([3, 4, 6, 9, 12, 13, 14, 20, 30, 41])


def test_a_draft_vocabulary_is_guessed_and_learned_alone(tmp_path: Path) -> None:
    """Stored heads lead to the same tokens; the loss counts the chances of known tokens alone."""
    its, block, kind = target(), pad_rows(ROWS, 0), KINDS["eagle3"]
    torch.manual_seed(0)
    made = kind.build(its, 2, KNOWN)
    torch.nn.init.normal_(made.get_parameter("lm_head.weight"), std=0.3)
    folder.write(tmp_path, kind.config(made, its), kind.tensors(made), torch.bfloat16)
    again, _ = feature_heads(its.model, ("eagle3",), str(tmp_path))
    assert torch.equal(again.draft_ids(), KNOWN)
    seen = its.see(block, kind.taps(made))
    wanted = []
    for step, logits in enumerate(kind.guesses(made, its, seen)):
        places = [
            (row, t) for row, line in enumerate(seen.wanted(step).tolist()) for t, asked in enumerate(line) if asked
        ]
        chances = torch.stack([its.log_chances(seen.h[row, t + 1 + step]).exp() for row, t in places])
        own = logits[:, KNOWN].log_softmax(-1)
        assert float(logits.detach().max(-1).values.min()) > -100 and len(places) == len(logits)
        wanted.append(float(-(chances[:, KNOWN] * own).sum(-1).mean().detach()))
    found = list(heads_loss(kind, made, its, [block]).parts.values())
    assert found == pytest.approx(wanted, rel=1e-4)


def test_the_most_frequent_tokens_are_known() -> None:
    texts = [WrittenText([1] * 50, [20, 20, 7, 7, 7, *range(30, 41)]), WrittenText([1], [20, 20, 33])]
    known = frequent(texts, 12, 64).tolist()
    assert (
        known == sorted(known)
        and {20, 7, 33} <= {*known}
        and len({*known}) == 12
        and {*known} <= {7, 20, *range(30, 41)}
    )
    for count in (3, 65):
        with pytest.raises(UserError, match=f"draft_vocab={count} must be from 10 to the model's 64"):
            frequent(texts, count, 64)
