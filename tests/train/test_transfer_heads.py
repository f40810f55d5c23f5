"""Training of Hidden Transfer's maps computes what a draft would, at all positions of a text at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hidden_transfer_layout import transfer_maps, usual_maps
from phasewise.speculation.heads.last_state import random_weights
from phasewise.train.heads.hidden_transfer import TransferKind
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.transfer_files import PlainTransfer
from tests.train.learned import lowered
from tests.train.test_eagle_heads import ROWS, target

KIND, MAPS = KINDS["hidden_transfer"], 3


def test_every_map_says_what_the_plain_forward_says(tmp_path: Path) -> None:
    """Of each text by itself; what is stored is what the drafter loads."""
    its = target()
    made = usual_maps(its.model, MAPS)
    random_weights(made, 5)
    folder.write(tmp_path, KIND.config(made, its), KIND.tensors(made))
    plain, seen = PlainTransfer(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0), KIND.taps(made))
    for head, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            places = seen.wanted(head)[row].nonzero()[:, 0].tolist()
            wanted += [plain.logits(text[: t + 1])[head] for t in places]
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)
    again, _ = transfer_maps(its.model, str(tmp_path))
    assert again.layer == plain.layer == 2 and again.depth == MAPS
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), made.parameters()))


def test_of_some_positions_the_same_is_said() -> None:
    """A step learns one position of two: those rows are what they are among all."""
    its = target()
    made = usual_maps(its.model, MAPS)
    random_weights(made, 5)
    seen = its.see(pad_rows(ROWS, 0), KIND.taps(made))
    thin = seen.thinned(2)
    said = [[*KIND.guesses(made, its, each)] for each in (seen, thin)]
    for head, (every, some) in enumerate(zip(*said, strict=True)):
        chosen = thin.wanted(head)[seen.wanted(head)]
        assert 0 < len(some) < len(every)
        torch.testing.assert_close(some, every[chosen], atol=1e-4, rtol=1e-4)


def test_what_training_lowers_is_what_it_is_told_to_learn() -> None:
    """The maps alone learn: nothing of the model has a gradient."""
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KIND.build(its, MAPS)
    before = its.model.layers[3].o.dense().clone()
    found = lowered(KIND, module, its, block, 30)
    assert len(found[0]) == MAPS and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])
    weight = its.model.layers[3].o.dense()
    assert weight.grad is None and torch.equal(weight, before)


def test_the_layer_is_what_it_is_told() -> None:
    its = target()
    assert isinstance(KIND, TransferKind)
    later = replace(KIND, layer=3)
    made = later.build(its, 2)
    assert later.taps(made) == (2,) and later.config(made, its)["transfer_layer"] == 3
    assert KIND.taps(KIND.build(its, 2)) == (1, 2)


def test_in_sixteen_bits_there_is_nothing_to_learn_through() -> None:
    with pytest.raises(UserError, match="leave out --dtype"):
        KIND.build(FrozenTarget(str(tiny.checkpoint()), "bfloat16"), 2)
