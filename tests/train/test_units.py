"""Teaching what pads mean: which units there are, what pads see, a falling loss, and a model that serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from phasewise.cli.app import main
from phasewise.model.model import Model
from phasewise.train import dense, units
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseShape, TokenBlock
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Pass
from phasewise.train.units import padded, unit_lengths
from tests import uncached
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 2, 4, 2, 96, head_dim=16, max_position_embeddings=512)
PADS, PAD = 3, 2047


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


def test_units_follow_one_another() -> None:
    """A unit goes on while the model is sure, has at most a token more than there are pads, and ends with what is
    learned."""
    sure, learned = [1, 0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert unit_lengths([bool(x) for x in sure], [bool(x) for x in learned], 3) == [(0, 1), (1, 4), (5, 1), (6, 2)]
    assert unit_lengths([True] * 4, [False, False, True, True], 3) == [(2, 2)]


def test_pads_see_what_they_see_in_the_engine(base: Path) -> None:
    """Every row of a padded block says what it says in a pass of its own: over the text before it, and the pads before
    it of the same unit. What it learns is the token after the one that it stands for."""
    torch.manual_seed(1)
    ids = torch.randint(6, 2000, (2, 11))
    targets = torch.cat((ids[:, 1:], torch.randint(6, 2000, (2, 1))), 1)
    targets[1, 8:] = -1
    block, sure = TokenBlock.of(ids, targets), torch.rand(2, 11) < 0.6
    laid, twin, model = padded(block, sure, PADS, PAD), dense.load(base), Model.load(base, dtype=torch.float32)
    with torch.no_grad():
        rows = twin.hidden([laid.block], Pass(sees=lambda layer, number: laid.sees))
        said = F.linear(rows, twin.embed_tokens.weight).view(2, laid.block.ids.shape[1], -1)
    checked = 0
    for row in range(2):
        its = unit_lengths(sure[row].tolist(), (targets[row] >= 0).tolist(), PADS)
        slot = ids.shape[1]
        for at, size in its:
            for which in range(min(size, PADS)):
                alone = [*ids[row, : at + 1].tolist(), *[PAD] * (which + 1)]
                torch.testing.assert_close(said[row, slot], uncached.logits(model, alone)[-1], atol=2e-4, rtol=2e-4)
                learned = at + which + 1
                assert int(laid.block.targets[row, slot]) == (targets[row, learned] if learned < ids.shape[1] else -1)
                slot, checked = slot + 1, checked + 1
        plain = uncached.logits(model, ids[row].tolist())
        torch.testing.assert_close(said[row, : ids.shape[1]], plain, atol=2e-4, rtol=2e-4)
    assert checked > 8
    assert int(laid.behind.sum()) == int((laid.block.targets[:, 11:] >= 0).sum())


def test_the_command_makes_a_model_that_serves(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of pads falls, the text's own rows hardly move, and the model decodes by units."""
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(units, "STAGES", (Stage(1.0, 200, 500, code=0.5, long=0.0, copies=0.4, short=48),))
    monkeypatch.setattr(units, "ALPHA", 0.0)
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as left:
        main(["train", "units", "--model", str(base), "--out", str(out), "--tokens", "9000"])
    assert not left.value.code and capsys.readouterr().out.split()[-1] == str(out / "model")
    rows = [line.split(",") for line in (out / "losses.csv").read_text().splitlines()]
    assert rows[0][2:4] == ["pads_loss", "kept_loss"] and float(rows[1][3]) == 0.0
    first, last = (sum(float(row[2]) for row in some) / 3 for some in (rows[1:4], rows[-3:]))
    assert last < first - 0.3
    with pytest.raises(SystemExit) as left:
        main(["run", "def add(", "--model", str(out / "model"), "--decode", "lud:beta=0", "--max-tokens", "9"])
    assert not left.value.code
