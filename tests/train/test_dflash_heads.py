"""DFlash's training computes what a draft would: every block of every position, on given tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation import one_pass_files as files
from tests.train.test_eagle_heads import ROWS, target

KIND = KINDS["dflash"]


def test_every_block_is_the_pass_of_a_draft(tmp_path: Path) -> None:
    """Against the plain forward, which computes each of them by itself."""
    its = target()
    made, _ = feature_heads(its.model, ("dflash",), "random:5")
    made.steps = made.parallel
    folder.write(tmp_path, KIND.config(made, its), tensors_of(made))
    plain = files.PlainPass(tmp_path, tiny.checkpoint(), mask=tiny.VOCAB - 1)
    seen = its.see(pad_rows(ROWS, 0), KIND.taps(made))
    for head, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(head)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], made.parallel)[head])
        assert len(wanted) == len(logits)
        if wanted:
            torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_what_training_lowers_is_what_it_is_told_to_learn() -> None:
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KIND.build(its, 4)
    adam, found = torch.optim.AdamW(module.parameters(), lr=3e-3), list[dict[str, float]]()
    for _ in range(30):
        loss = heads_loss(KIND, module, its, [block])
        found.append(dict(loss.parts))
        adam.zero_grad()
        loss.total.backward()
        adam.step()
    assert len(found[0]) == 4 and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])
