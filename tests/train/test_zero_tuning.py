"""Choosing for attend.zero_tuning: heads are told apart, the best of what was tried is taken, and it serves."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.model.model import Model
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.artefacts import attend_zero_tuning as tuning
from phasewise.train.dense import DenseShape
from phasewise.verbs.host import Host
from tests import oracle
from tests import tiny as engines
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 2, 4, 2, 96, head_dim=16, max_position_embeddings=1024)


def test_heads_are_told_apart_and_the_best_is_found() -> None:
    """A loss that two heads lower and the others raise; best at ln 4, in those two alone."""
    good = torch.tensor([[True, False], [False, True]])

    def loss(lift: Tensor) -> float:
        return float((lift[good] - torch.tensor(4.0).log()).square().sum() + 3 * lift[~good].square().sum())

    trials = list(tuning.search(loss, (2, 2)))
    assert trials[0].name == "none" and float(trials[0].lift.abs().sum()) == 0
    assert len(trials) == 1 + 4 + 3 * len(tuning.GAMMAS)
    best = min(trials, key=lambda trial: trial.loss)
    assert (best.name, best.gamma) == ("up", 4.0) and torch.equal(best.lift != 0, good)


def test_what_helps_nobody_is_dense() -> None:
    trials = tuning.search(lambda lift: float(lift.square().sum()), (2, 3))
    assert float(min(trials, key=lambda trial: trial.loss).lift.abs().sum()) == 0


def test_the_loss_is_that_of_whole_texts() -> None:
    model = engines.model()
    texts = engines.prompts(20, 50, 33)
    examples = [tuning.TuningExample(text, [i % 3 != 0 for i in range(len(text))]) for text in texts]
    total, count = 0.0, 0
    for one in examples:
        scores = oracle.logits(model.files.path, one.tokens).log_softmax(-1)
        wanted = [i for i in range(1, len(one.tokens)) if one.learned[i]]
        total -= sum(float(scores[i - 1, one.tokens[i]]) for i in wanted)
        count += len(wanted)
    assert tuning.mean_loss(model, examples, Dense()) == pytest.approx(total / count, rel=1e-5)
    lifted = tuning.mean_loss(model, examples, Tuned(torch.full((4, 4), 3.0)))
    assert abs(lifted - total / count) > 1e-3


def test_a_run_writes_what_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.lively(SHAPE, tmp_path / "model")
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: tiny.mixture())
    path = tuning.train(ZeroTuning(), ArtefactJob(str(base), tmp_path / "run", tokens=600))
    assert path.name == "attend.zero_tuning.safetensors"
    with (tmp_path / "run" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert [row["heads"] for row in rows[:2]] == ["none", "layer 0 head 0"]
    best = min(rows, key=lambda row: float(row["loss"]))
    made = ZeroTuning(weights=str(path)).bind(Host(Model.load(base), None, None, None, None))  # type: ignore[arg-type]
    assert isinstance(made, Dense) == (best["heads"] == "none")
    again = tuning.train(ZeroTuning(), ArtefactJob(str(base), tmp_path / "again", tokens=600))
    assert (tmp_path / "again" / "trials.csv").read_text() == (tmp_path / "run" / "trials.csv").read_text()
    assert again.read_bytes()[-64:] == path.read_bytes()[-64:]


@pytest.mark.thorough
def test_a_run_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.lively(SHAPE, tmp_path / "model")
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: tiny.mixture())
    whole = tuning.train(ZeroTuning(), ArtefactJob(str(base), tmp_path / "run", tokens=300))
    log, real, asked = tmp_path / "run" / "trials.csv", tuning.mean_loss, list[float]()
    text = log.read_text()
    log.write_text("".join(text.splitlines(keepends=True)[:8]))  # what stands there after seven trials

    def counted(*args: Any) -> float:
        asked.append(real(*args))
        return asked[-1]

    monkeypatch.setattr(tuning, "mean_loss", counted)
    again = tuning.train(ZeroTuning(), ArtefactJob(str(base), tmp_path / "run", tokens=300, resume=True))
    assert log.read_text() == text and len(asked) == 1 + (len(text.splitlines()) - 8)
    assert load_file(again)["lift"].equal(load_file(whole)["lift"])
    with pytest.raises(UserError, match=r"trials.csv is of another run: .* leave out --resume"):
        tuning.train(ZeroTuning(), ArtefactJob(str(base), tmp_path / "run", tokens=900, resume=True))
