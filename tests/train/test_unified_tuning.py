"""Tuning for skip.unified: the loss falls, the base stays as it is, a resumed run is the same run, and it serves."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.methods.skip.unified import Unified, kept
from phasewise.model.model import Model
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob, skip_unified
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.exchanges import REPLY, Exchanges, PromptReplyBatch, exchange
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import NO_LOSS, Mixture, Stage
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit
from tests import tiny as engines
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
LAYERS = kept(4, 2)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
Batch = tuple[list[PromptReplyBatch], list[PromptReplyBatch]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


recipe = partial(tiny.recipe, stages=STAGES, size=700, warmup=2)


def run(base: Path) -> tuple[DenseDecoder, TrainingRun[LowRank]]:
    torch.manual_seed(0)
    shapes = Unified(2).artefact(Model.load(base).config).shapes
    return dense.load(base).requires_grad_(False), skip_unified.start(LowRank(shapes))


def tune(
    twin: DenseDecoder, run: TrainingRun[LowRank], steps: TrainingRecipe, out: Path, saved: object = None
) -> list[list[str]]:
    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return skip_unified.reply_loss(twin, run.model, LAYERS, batch)

    fit(run, loss, Exchanges(tiny.mixture()), steps, out, saved)  # type: ignore[arg-type]
    with (out / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


@pytest.mark.thorough
def test_the_loss_falls_and_the_base_stays_frozen(base: Path, tmp_path: Path) -> None:
    twin, tuned = run(base)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    tuned.optimizers[0].param_groups[0]["peak"] = 0.02
    rows = tune(twin, tuned, recipe(16), tmp_path)
    assert rows[0][:5] == ["step", "tokens", "code_loss", "task_loss", "pace"]
    for column in (2, 3):
        first, last = (sum(float(row[column]) for row in some) / 3 for some in (rows[1:4], rows[-3:]))
        assert last < first - 0.5
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert all(parameter.grad is None for parameter in twin.parameters())
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert set(saved) == set(tuned.model.state_dict()), "a checkpoint holds what is trained, not the base"


class _Interrupted(Exception):
    pass


@pytest.mark.thorough
def test_a_resumed_run_repeats_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    twin, straight = run(base)
    whole = tune(twin, straight, recipe(8), tmp_path / "whole")

    def interrupt(run: TrainingRun[LowRank]) -> None:
        if run.step == 3:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        tune(*run(base), recipe(8, checkpoint_seconds=0.0), tmp_path / "cut", interrupt)
    _, resumed = run(base)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1.0)  # whatever it was before
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert resumed.step == 3
    assert tune(twin, resumed, recipe(8), tmp_path / "cut") == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_command_trains_what_the_engine_then_finds(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(skip_unified, "STAGES", STAGES)
    out = tmp_path / "run"
    words = ["train", "artefact", "skip.unified:speedup=2", "--model", str(base), "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main([*words, "--tokens", "1400"])
    path = out / "skip.unified-speedup2.safetensors"
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()

    model = Model.load(base)
    prompt = engines.prompts(20, vocab=2048)
    placed = engines.engine({"skip": f"unified:weights={path}"}, of=model)
    assert len(engines.outs(engines.run(placed, prompt, engines.greedy(8)))[0]) == 8
    with pytest.raises(UserError, match=r"not for .*speedup.*: 4"):
        engines.engine({"skip": f"unified:speedup=4,weights={path}"}, of=model)
    with pytest.raises(SystemExit):
        main([*words, "--tokens", "2800", "--resume"])
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 4
    assert "--tokens 2800" in _command(path)


def _command(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["command"])


@pytest.mark.parametrize(("words", "says"), [
    (["skip.unifed", "--out", "x"], "'skip.unifed' needs no training or is unknown. Did you mean skip.unified"),
    (["skip.unified"], "say where it goes: --out runs/skip.unified"),
    (["skip.unified", "--out", "x", "--resume"], "nothing to resume: x/checkpoint.pt"),
    (["attend.zero_tuning", "--out", "x", "--resume"], "nothing to resume: x/trials.csv"),
    (["skip.unified:speed=2", "--out", "x"], "no knob 'speed'"),
    (["skip.unified:speedup=1", "--out", "x"], "needs no training"),
])  # fmt: skip
def test_mistakes_on_the_command_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "artefact", *words])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_the_command_line_lists_what_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "artefact"])
    assert "skip.unified" in capsys.readouterr().out.split()


def test_models_that_the_twin_does_not_know_are_refused() -> None:
    with pytest.raises(UserError, match="tie_word_embeddings=False"):
        dense.load(engines.checkpoint())


def test_exchanges_are_prompts_and_what_follows_them() -> None:
    made = exchange([([5, 6, 7], [1, 2, 3]), ([8], [4, 9])], pad=0)
    assert made.prompts.ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert made.real.tolist() == [[True] * 3, [True, False, False]]
    assert made.replies.ids.tolist() == [[1, 2], [4, 0]]
    assert made.replies.targets.tolist() == [[2, 3], [9, NO_LOSS]]
    assert made.replies.positions.tolist() == [[3, 4], [1, 2]]
    assert made.tokens == 10


def test_exchanges_are_a_function_of_the_step_and_fit_the_stage() -> None:
    source, tasks = Exchanges(tiny.mixture()).step(3, STAGES[0])
    again = Exchanges(tiny.mixture()).step(3, STAGES[0])[0]
    assert torch.equal(source[0].prompts.ids, again[0].prompts.ids)
    assert not torch.equal(Exchanges(tiny.mixture()).step(4, STAGES[0])[0][0].replies.ids, source[0].replies.ids)
    assert all(part.replies.ids.shape[1] == REPLY - 1 for part in source)
    for part in source + tasks:
        lengths, replies = part.real.sum(1), (part.replies.targets >= 0).sum(1)
        assert int((lengths + replies).max()) <= STAGES[0].row and int(replies.min()) >= 1
    for part in tasks:
        for row in part.replies.targets:
            assert tiny.tokenizer().id_to_token(int(row[row >= 0][-1])) == "<|im_end|>"
