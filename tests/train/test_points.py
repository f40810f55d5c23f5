"""Several points of a row at which decode.augment is trained: each as if its row ended there, and computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.methods.decode.augment import Augment
from phasewise.model.model import Model
from phasewise.train import dense
from phasewise.train.artefacts import decode_augment as tuning
from phasewise.train.artefacts.decode_augment import AHEAD
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.exchanges import Exchanges, exchange
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage
from tests.train import tiny

SHAPE = DenseShape(2048, 32, 2, 2, 1, 48, head_dim=16, max_position_embeddings=512)
STAGE = Stage(1.0, 256, 700, code=0.6, long=0.2, copies=0.4, short=48)


@torch.no_grad()
def test_the_loss_at_a_point_is_that_of_a_prompt_which_ends_there(tmp_path: Path) -> None:
    """Prompts cut by hand, computed by themselves: tokens behind a point see it, its own latents, and no other's."""
    folder = tiny.lively(SHAPE, tmp_path / "model")
    twin = dense.load(folder).requires_grad_(False)
    torch.manual_seed(0)
    made = tuning.start(LowRank(Augment(3).artefact(Model.load(folder).config).shapes), twin).model
    source, _ = Exchanges(tiny.mixture(), 4, AHEAD).step(0, STAGE)
    part = max(source, key=lambda each: len(each.points))
    assert len({row for row, _ in part.points}) > 1 and len(part.points) > 4
    (past,) = tuning.past_of(twin, [part])
    points, its = tuning.spread(part, past)
    z = tuning.latents(twin, made, [points], [its])
    (got,) = tuning.losses_after(twin, [points], [its], z)
    for i, (row, n) in enumerate(part.points):
        ids = part.prompts.ids[row, : int(part.real[row].sum())].tolist()
        assert n + AHEAD <= len(ids)
        alone = exchange([(ids[:n], ids[n : n + AHEAD])], 0)
        cut = tuning.past_of(twin, [alone])
        (want,) = tuning.losses_after(twin, [alone], cut, tuning.latents(twin, made, [alone], cut))
        torch.testing.assert_close(got.view(len(part.points), AHEAD)[i], want, atol=1e-4, rtol=1e-4)


def test_the_base_computes_a_row_once_for_all_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.lively(SHAPE, tmp_path / "model")
    twin, prefill, computed = dense.load(folder).requires_grad_(False), DenseDecoder.prefill, list[int]()
    made = tuning.start(LowRank(Augment(3).artefact(Model.load(folder).config).shapes), twin).model
    monkeypatch.setattr(
        DenseDecoder,
        "prefill",
        lambda self, blocks, real: (computed.append(len(blocks)), prefill(self, blocks, real))[1],
    )
    batches = [Exchanges(tiny.mixture(), points, AHEAD).step(0, STAGE) for points in (0, 4)]
    few, many = (tuning.ahead_loss(twin, made, batch) for batch in batches)
    assert len(computed) == 2 and computed[0] == computed[1]
    points = sum(len(part.points) for part in batches[1][0])
    assert many.tokens == few.tokens + points * (AHEAD - 1) and points > 8
    assert few.parts["task"] == pytest.approx(many.parts["task"]) and few.parts["code"] != many.parts["code"]
    again = Exchanges(tiny.mixture(), 4, AHEAD).step(0, STAGE)
    assert [part.points for part in again[0]] == [part.points for part in batches[1][0]], "a function of seed and step"
