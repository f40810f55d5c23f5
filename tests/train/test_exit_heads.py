"""Training of Kangaroo's adapter computes what a draft would, at all positions of a text at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from phasewise.speculation.heads import folder
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.exit import ExitKind
from phasewise.train.heads.kinds import KINDS
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.exit_files import PlainAdapter
from tests.train.learned import lowered
from tests.train.test_eagle_heads import DEPTH, ROWS, target

KIND = KINDS["kangaroo"]


def test_every_depth_is_the_adapters_own_row(tmp_path: Path) -> None:
    """Against the plain forward of each text by itself; what is stored is what the drafter loads."""
    its = target()
    made, _ = feature_heads(its.model, ("kangaroo",), "random:5")
    made.steps = DEPTH
    folder.write(tmp_path, KIND.config(made, its), tensors_of(made))
    plain, seen = PlainAdapter(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0), KIND.taps(made))
    for step, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            said = plain.logits(text)
            wanted += [said[t + 1 + step] for t in seen.wanted(step)[row].nonzero()[:, 0].tolist()]
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)
    again, _ = feature_heads(its.model, ("kangaroo",), str(tmp_path))
    assert isinstance(again, ExitAdapter) and again.exit == plain.exit == 1


def test_what_training_lowers_is_what_it_is_told_to_learn() -> None:
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KIND.build(its, DEPTH)
    found = lowered(KIND, module, its, block, 30)
    assert len(found[0]) == DEPTH and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])


def test_the_exit_is_what_it_is_told() -> None:
    its = target()
    assert isinstance(KIND, ExitKind)
    deeper = replace(KIND, exit=3)
    made = deeper.build(its, 2)
    assert deeper.taps(made) == (2,) and deeper.config(made, its)["exit_layer"] == 3
