"""Training lowers the loss, resumes to the bit, and exports a model that others can load."""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

import pytest
import torch

from phasewise.errors import UserError
from phasewise.train import dense, device
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.mixture import STRETCHED, stretch
from phasewise.train.pocket import export
from phasewise.train.trainer import TrainingRun, start, train, update, whole_loss
from tests.train import tiny


def fresh(steps: int) -> TrainingRun:
    torch.manual_seed(0)
    return start(DenseDecoder(tiny.SHAPE), tiny.recipe(steps))


def losses(folder: Path) -> list[list[str]]:
    with (folder / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


@pytest.mark.thorough
def test_thirty_steps_lower_the_loss_and_the_export_loads(tmp_path: Path) -> None:
    run = fresh(30)
    train(run, tiny.mixture(), tiny.recipe(30), tmp_path)
    rows = losses(tmp_path)[1:]
    assert len(rows) == run.step >= 30
    for column in (2, 3):
        first = sum(float(row[column]) for row in rows[:3]) / 3
        last = sum(float(row[column]) for row in rows[-3:]) / 3
        assert last < first - 0.7
    export(run.model, tiny.tokenizer(), tmp_path / "model")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.tensor([tiny.tokenizer().encode("def f(x):").ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, dense.load(tmp_path / "model")(ids), atol=1e-4, rtol=1e-4)
    assert loaded.generation_config.eos_token_id == [4, 0]
    assert loaded.generation_config.bos_token_id == loaded.config.bos_token_id == 5


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight = fresh(6)
    train(straight, tiny.mixture(), tiny.recipe(6), whole)

    def interrupt(run: TrainingRun) -> None:
        if run.step == 3:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        train(fresh(6), tiny.mixture(), tiny.recipe(6, checkpoint_seconds=0.0), cut, interrupt)
    with (cut / "losses.csv").open("a") as file:
        file.write("4,1,9.9,9.9,1,1\n")  # a step that was logged but not saved
    torch.manual_seed(123)
    resumed = start(DenseDecoder(tiny.SHAPE), tiny.recipe(6))
    resumed.read(cut / "checkpoint.pt")
    assert resumed.step == 3
    train(resumed, tiny.mixture(), tiny.recipe(6), cut)
    assert losses(cut) == losses(whole)
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    run = fresh(10)
    run.settings = {"seed": 0, "batch": 512}
    run.write(tmp_path / "checkpoint.pt")
    other = fresh(10)
    other.settings = {"seed": 0, "batch": 1024}
    with pytest.raises(UserError, match="that run had batch=512, this one has 1024"):
        other.read(tmp_path / "checkpoint.pt")
    other.settings = dict(run.settings)
    other.read(tmp_path / "checkpoint.pt")


def test_weights_gradients_and_optimisers_stay_in_single_precision() -> None:
    run = fresh(2)
    loss = whole_loss(run, tiny.STAGES[0], tiny.mixture().step(0, tiny.STAGES[0]))
    torch.autograd.backward(loss.total)
    assert {p.grad.dtype for p in run.model.parameters() if p.grad is not None} == {torch.float32}
    update(run, whole_loss(run, tiny.STAGES[0], tiny.mixture().step(1, tiny.STAGES[0])))
    kept = [v for optimizer in run.optimizers for state in optimizer.state.values() for v in state.values()]
    floats = {value.dtype for value in (*kept, *run.model.parameters()) if torch.is_floating_point(value)}
    assert len(kept) > 10 and floats == {torch.float32}


def test_half_precision_changes_the_loss_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    run, batch = fresh(2), tiny.mixture().step(0, tiny.STAGES[0])
    for parameter in run.model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    both = []
    for native in (True, False):
        monkeypatch.setattr(device, "computes_in_bfloat16", lambda device, native=native: native)
        both.append(float(whole_loss(run, tiny.STAGES[0], batch).total.detach()))
    assert both[0] != both[1] and both[0] == pytest.approx(both[1], rel=0.01)


def test_another_seed_sees_other_data() -> None:
    stage = tiny.STAGES[0]
    ids = [tiny.mixture(seed).step(3, stage)[0][0][0] for seed in (0, 0, 1)]
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], ids[2])


def test_the_pace_warms_up_stays_and_falls() -> None:
    recipe = tiny.recipe(100)
    plan = list(recipe.steps())
    pace = [recipe.pace(step, progress) for step, (_, progress) in enumerate(plan)]
    assert pace[0] == 0.25
    assert pace[3] == pace[40] == 1.0
    assert pace[-1] < 0.1
    assert pace[60:] == sorted(pace[60:], reverse=True)


def test_stretched_rows_keep_their_order_within_the_context() -> None:
    rng = Random(0)
    ids = torch.zeros(4, 100, dtype=torch.int64)
    seen = [stretch(rng, TokenBlock.of(ids, ids)).positions for _ in range(50)]
    steps = torch.stack(seen).diff(dim=-1)  # [50, rows, 99]
    assert int(steps.min()) == 1
    assert int(max(positions.max() for positions in seen)) < STRETCHED
    gaps = (steps > 1).sum(-1)
    assert int(gaps.max()) == 1  # one gap per row
    assert 10 < int((gaps.sum(-1) == 0).sum()) < 40  # about half of the blocks stay as they are


def test_matrices_decay_and_nothing_else_does() -> None:
    run = fresh(10)
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in run.optimizers:
        optimizer.step()
    for name, value in run.model.named_parameters():
        rate = 0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        left = 1 - 0.1 * rate if "_proj." in name else 1.0
        torch.testing.assert_close(value.detach(), left * before[name])
