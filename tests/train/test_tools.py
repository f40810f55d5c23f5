"""Teaching to call: the loss falls, the base stays as it is, a resumed run is the same run, and what is made serves."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from phasewise.cli.app import main
from phasewise.model import tuned
from phasewise.model.lowrank import shapes
from phasewise.model.model import Model
from phasewise.train import dense, tools, tuning
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Pass
from phasewise.train.tooluse import ToolBatch, ToolConversations
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit
from tests import uncached
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 2, 4, 2, 96, head_dim=16, max_position_embeddings=512)
STAGES = tuple(Stage(until, 400, 700, code=0.2, long=0.0, copies=0.4, short=48) for until in (0.5, 1.0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


recipe = partial(tiny.recipe, stages=STAGES, size=700, warmup=2)


def run(base: Path) -> tuple[DenseDecoder, TrainingRun[LowRank]]:
    torch.manual_seed(0)
    wanted = shapes(Model.load(base).config, range(SHAPE.num_hidden_layers), 4)
    return dense.load(base).requires_grad_(False), tuning.start(LowRank(wanted))


def teach(
    twin: DenseDecoder, run: TrainingRun[LowRank], steps: TrainingRecipe, out: Path, saved: object = None
) -> list[list[str]]:
    def loss(stage: Stage, batch: ToolBatch) -> StepLoss:
        return tools.tool_loss(twin, run.model, batch)

    fit(run, loss, ToolConversations(tiny.mixture()), steps, out, saved)  # type: ignore[arg-type]
    with (out / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


def test_the_loss_falls_and_the_base_stays_frozen(base: Path, tmp_path: Path) -> None:
    twin, taught = run(base)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    taught.optimizers[0].param_groups[0]["peak"] = 0.02
    rows = teach(twin, taught, recipe(14), tmp_path)
    assert rows[0] == ["step", "tokens", "call_loss", "kept_loss", "pace"]
    first, last = (sum(float(row[2]) for row in some) / 3 for some in (rows[1:4], rows[-3:]))
    assert last < first - 0.5
    assert float(rows[1][3]) == 0.0, "before the first step nothing is changed"
    assert all(float(row[3]) > 0 for row in rows[3:])
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert all(parameter.grad is None for parameter in twin.parameters())
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert set(saved) == set(taught.model.state_dict()), "a checkpoint holds what is trained, not the base"


def test_the_divergence_is_that_of_whole_distributions(base: Path) -> None:
    twin, taught = run(base)
    with torch.no_grad():
        for parameter in taught.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    ids = torch.randint(6, 2048, (2, 9))
    targets = ids.roll(-1, 1)
    targets[:, 6:] = -1
    found = tools.divergence(twin, [TokenBlock.of(ids, targets)], Pass(delta=taught.model))
    logits = [F.linear(twin.hidden([TokenBlock.of(ids, ids)], how), twin.embed_tokens.weight).view(2, 9, -1)[:, :6]
              for how in (Pass(), Pass(delta=taught.model))]  # fmt: skip
    p, q = (each.double().softmax(-1) for each in logits)
    wanted = (p * (p.log() - q.log())).sum(-1).flatten()
    assert float(wanted.detach().min()) > 0
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    twin, straight = run(base)
    whole = teach(twin, straight, recipe(6), tmp_path / "whole")

    def interrupt(run: TrainingRun[LowRank]) -> None:
        if run.step == 3:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        teach(*run(base), recipe(6, checkpoint_seconds=0.0), tmp_path / "cut", interrupt)
    _, resumed = run(base)
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert resumed.step == 3
    assert teach(twin, resumed, recipe(6), tmp_path / "cut") == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_command_makes_a_model_that_serves(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(tools, "STAGES", STAGES)
    out = tmp_path / "run"
    words = ["train", "tools", "--model", str(base), "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main([*words, "--tokens", "2100"])
    assert not left.value.code and capsys.readouterr().out.split()[-1] == str(out / "model")

    (tmp_path / "shelf").mkdir()  # as it is shipped: beside its base
    (tmp_path / "shelf" / base.name).symlink_to(base)
    (tmp_path / "shelf" / "tools").mkdir()
    (out / tuned.FILE).rename(tmp_path / "shelf" / "tools" / tuned.FILE)
    whole, light = (Model.load(path, dtype=torch.bfloat16) for path in (out / "model", tmp_path / "shelf" / "tools"))
    ids = torch.randint(6, 2048, (20,)).tolist()
    assert torch.equal(uncached.logits(whole, ids), uncached.logits(light, ids))

    wide = Model.load(tmp_path / "shelf" / "tools", dtype=torch.float32)
    delta = _delta(tmp_path / "shelf" / "tools" / tuned.FILE)
    block = TokenBlock.of(torch.tensor([ids]), torch.tensor([ids]))
    twin = dense.load(base)
    with torch.no_grad():
        learned = F.linear(twin.hidden([block], Pass(delta=delta)), twin.embed_tokens.weight)
        untaught = F.linear(twin.hidden([block]), twin.embed_tokens.weight)
    torch.testing.assert_close(uncached.logits(wide, ids), learned, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(learned, untaught, atol=2e-2)

    with pytest.raises(SystemExit):
        main([*words, "--tokens", "2800", "--resume"])
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 4
    with pytest.raises(SystemExit) as left:
        main([*words, "--resume", "--seed", "1"])
    assert left.value.code == 2 and "that run had seed=0" in capsys.readouterr().err


def _delta(path: Path) -> LowRank:
    tensors = load_file(path)
    made = LowRank({name: tuple(value.shape) for name, value in tensors.items()})
    with torch.no_grad():
        for name, value in tensors.items():
            made[name].copy_(value)
    return made
