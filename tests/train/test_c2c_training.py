"""The fuser of decode.c2c: what is trained is what serves, and it lets a model say what only another one knows."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.cli.app import main
from phasewise.methods.decode.c2c import C2C, fuse
from phasewise.methods.decode.c2c import Fuser as Serving
from phasewise.model import artefacts
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.model import Model
from phasewise.reproduce.knowers import LARGE, facts, split, taught
from phasewise.reproduce.knowers import SMALL as SMALL_KNOWER
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob, decode_c2c
from phasewise.train.artefacts.decode_c2c import C2CSplit, TrainedFuser, fused, noisy, reply_loss, settled, start
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.exchanges import PromptReplyBatch
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, update
from tests import tiny as engines
from tests.train import tiny

BASE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
SMALL = DenseShape(2048, 48, 2, 3, 1, 64, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
Batch = tuple[list[PromptReplyBatch], list[PromptReplyBatch]]


@cache
def folder(shape: DenseShape) -> Path:
    return tiny.lively(shape, Path(mkdtemp(prefix="phasewise-fuser-")) / "model")


@cache
def twins() -> tuple[DenseDecoder, DenseDecoder]:
    base, small = (dense.load(folder(shape)).requires_grad_(False) for shape in (BASE, SMALL))
    return base, small


def declared() -> Artefact:
    base, small = (Model.load(folder(shape)) for shape in (BASE, SMALL))
    return C2C(str(folder(SMALL)), width=24).artefact(base.config, small.config, fingerprint(small))


def fresh() -> TrainingRun[TrainedFuser]:
    torch.manual_seed(0)
    return start(TrainedFuser(declared()))


# ---- what is trained is what serves
@torch.no_grad()
def test_training_fuses_as_the_engine_does() -> None:
    gen = torch.Generator().manual_seed(0)
    made, learns = declared(), TrainedFuser(declared())
    for name, value in artefacts.random(made, "3").items():
        learns.tensors()[name].copy_(value)
    past = [
        Past(torch.ones(1, 9, dtype=torch.bool), {i: (rows(gen, heads), rows(gen, heads)) for i in range(layers)})
        for layers, heads in ((4, 2), (2, 1))
    ]
    (mine,) = fused(learns, settled(learns), past[:1], past[1:])
    models = [Model.load(folder(shape), dtype=torch.float32) for shape in (BASE, SMALL)]
    own, other = ([tuple(x[0].transpose(0, 1) for x in pair) for pair in each.layers.values()] for each in past)
    serving: Any = own, [other]
    served = fuse([Serving(*models, artefacts.random(made, "3"))], *serving)
    assert any(not torch.equal(k, own[layer][0]) for layer, (k, _) in enumerate(served))
    for layer, pair in enumerate(served):
        for got, want in zip(pair, mine.layers[layer]):
            torch.testing.assert_close(got, want[0].transpose(0, 1), **CLOSE)


def rows(gen: torch.Generator, heads: int) -> Tensor:
    return torch.randn(1, 9, heads, 16, generator=gen)


def test_gates_harden_and_follow_their_seed() -> None:
    learns = fresh().model
    soft, again, other, hard = (noisy(learns, *how) for how in ((0.0, 0, 5), (0.0, 0, 5), (0.0, 0, 6), (1.0, 0, 5)))
    for side in "kv":
        assert torch.equal(soft[side], again[side]) and not torch.equal(soft[side], other[side])
        assert ((soft[side] > 0.01) & (soft[side] < 0.99)).any()
        assert ((hard[side] < 0.01) | (hard[side] > 0.99)).all()
    learns.parts["k_gate"].data[:] = torch.tensor([1.0, -1.0, 0.0, 0.1])
    assert settled(learns)["k"].tolist() == [1, 0, 0, 1]


def test_prompts_end_before_their_last_token_which_is_read_over_what_was_fused() -> None:
    source, tasks = C2CSplit(tiny.mixture()).step(0, STAGES[0])
    for part in (*source, *tasks):
        assert torch.equal(part.replies.positions[:, 0], part.real.sum(1)), "no gap"
        assert int((part.replies.targets >= 0).sum(1).min()) >= 2


# ---- facts that one model knows and the other does not
KEYS = 20  # keys 3 .. 22 of the receiver, 23 .. 42 of the sharer
OF_SHARER = list(range(3 + KEYS, 3 + 2 * KEYS))


def moved(past: Past, rows: int) -> Past:
    """Every prompt gets another one's."""
    return Past(past.real, {i: (k.roll(rows, 0), v.roll(rows, 0)) for i, (k, v) in past.layers.items()})


@torch.no_grad()
def right(receiver: DenseDecoder, past: list[Past] | None, asked: PromptReplyBatch) -> float:
    """Share of the values that are the most likely ones."""
    from torch.nn import functional as F

    from phasewise.train.passes import Pass

    past = past or receiver.prefill([asked.prompts], [asked.real])
    logits = F.linear(receiver.hidden([asked.replies], Pass(past=past)), receiver.embed_tokens.weight)
    return float((logits.argmax(-1) == asked.replies.targets.flatten()).float().mean())


def test_a_trained_fuser_lets_the_receiver_say_what_the_sharer_knows() -> None:
    """Of facts that it was not trained on: more than by itself, and no more than that if the sharer's rows are those of
    other prompts."""
    receiver = taught(LARGE, list(range(3, 3 + KEYS)), 0)
    sharer = taught(SMALL_KNOWER, OF_SHARER, 1)
    config = [engines.model(layers=layers, hidden=hidden, heads=heads, kv_heads=kv).config
              for layers, hidden, heads, kv in ((3, 64, 4, 2), (3, 48, 3, 3))]  # fmt: skip
    torch.manual_seed(2)
    run, gen = start(TrainedFuser(C2C("small", width=32).artefact(*config))), torch.Generator().manual_seed(3)
    run.optimizers[0].param_groups[0]["lr"] = 4e-3
    learned, held = OF_SHARER[::2] + OF_SHARER[1::4], OF_SHARER[3::4]
    before = [{name: value.clone() for name, value in twin.state_dict().items()} for twin in (receiver, sharer)]
    for step in range(200):
        pairs = facts(learned, gen, 16), facts([*range(3, 3 + KEYS)], gen, 8)
        gates = noisy(run.model, step / 200, 0, step)
        update(run, reply_loss(receiver, sharer, run.model, gates, tuple([split(each)] for each in pairs)))  # type: ignore[arg-type]
    found = {}
    for name, keys in (("learned", learned), ("held", held)):
        asked = split(facts(keys, torch.Generator().manual_seed(9), 100))
        own, other = (model.prefill([asked.prompts], [asked.real]) for model in (receiver, sharer))
        mixed = [moved(past, 7) for past in other]
        gates = settled(run.model)
        found[name] = [
            right(receiver, None, asked),
            right(receiver, fused(run.model, gates, own, other), asked),
            right(receiver, fused(run.model, gates, own, mixed), asked),
        ]
    alone, with_sharer, with_others = found["learned"]
    assert with_sharer > 0.8 and alone < 0.4 and with_others < 0.4, found
    assert found["held"][1] > found["held"][0] + 0.2 and found["held"][2] < found["held"][1] - 0.2, found
    for twin, was in zip((receiver, sharer), before):
        assert all(torch.equal(value, was[name]) for name, value in twin.state_dict().items())


# ---- the run
def trained(run: TrainingRun[TrainedFuser], recipe: TrainingRecipe, out: Path, saved: Any = None) -> list[list[str]]:
    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return reply_loss(*twins(), run.model, noisy(run.model, run.step / 16, 0, run.step), batch)

    fit(run, loss, C2CSplit(tiny.mixture()), recipe, out, saved)
    with (out / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


def test_the_loss_falls(tmp_path: Path) -> None:
    run = fresh()
    run.optimizers[0].param_groups[0]["peak"] = 0.01
    rows = trained(run, tiny.recipe(16, stages=STAGES, size=700, warmup=2), tmp_path)
    assert rows[0] == ["step", "tokens", "code_loss", "task_loss", "pace"]
    for column in (2, 3):
        first, last = (sum(float(row[column]) for row in some) / 3 for some in (rows[1:4], rows[-3:]))
        assert last < first - 0.3
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert set(saved) == set(run.model.state_dict())


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = fresh()
    whole = trained(straight, tiny.recipe(6, stages=STAGES, size=700, warmup=2), tmp_path / "whole")

    def interrupt(run: TrainingRun[TrainedFuser]) -> None:
        if run.step == 3:
            raise _Interrupted

    recipe = tiny.recipe(6, 0.0, stages=STAGES, size=700, warmup=2)
    with pytest.raises(_Interrupted):
        trained(fresh(), recipe, tmp_path / "cut", interrupt)
    resumed = fresh()
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert trained(resumed, recipe, tmp_path / "cut") == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_command_trains_what_the_engine_then_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(decode_c2c, "STAGES", STAGES)
    kind = f"decode.c2c:sharer={folder(SMALL)},width=24"
    words = ["train", "artefact", kind, "--model", str(folder(BASE)), "--out", str(tmp_path), "--tokens", "1400"]
    with pytest.raises(SystemExit) as left:
        main(words)
    path = tmp_path / "decode.c2c-sharermodel-width24.safetensors"
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()
    prompt, model = engines.prompts(70, vocab=2048), Model.load(folder(BASE))
    placed = engines.engine({"decode": f"c2c:sharer={folder(SMALL)},width=24,weights={path}"}, of=model)
    (request,) = engines.run(placed, prompt, engines.greedy(8))
    assert len(request.out) == 8 and request.recalled == 69
