"""Maps for decode.kv_prediction: what is trained is what serves, the losses fall, and both models stay as they are."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.cli.app import main
from phasewise.engine.engine import Engine
from phasewise.methods.decode.kv_prediction import Auxiliary, KVPrediction, Maps, tuned
from phasewise.model import artefacts
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.model import Model
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob, decode_kv_prediction
from phasewise.train.artefacts.decode_kv_prediction import Predictor, begin, placed, predicted, predicted_loss, start
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Pass, Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, update
from tests import tiny as engines
from tests.train import tiny

BASE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
SMALL = DenseShape(2048, 48, 2, 3, 1, 64, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
Batch = tuple[list[TokenBlock], list[TokenBlock]]


@cache
def folder(shape: DenseShape) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(shape, Path(mkdtemp(prefix="phasewise-prediction-")) / "model")


@cache
def twins() -> tuple[DenseDecoder, DenseDecoder]:
    base, small = (dense.load(folder(shape)).requires_grad_(False) for shape in (BASE, SMALL))
    return base, small


def declared() -> Artefact:
    base, small = (Model.load(folder(shape)) for shape in (BASE, SMALL))
    return KVPrediction(str(folder(SMALL))).artefact(base.config, small.config, fingerprint(small))


def fresh() -> TrainingRun[Predictor]:
    torch.manual_seed(0)
    return start(Predictor(declared()))


def randomly(seed: int) -> Predictor:
    """What `random:seed` stands for, as training holds it."""
    made = declared()
    learns = Predictor(made).requires_grad_(False)
    held = learns.tensors()
    for name, value in artefacts.random(made, str(seed)).items():
        held[name].copy_(value)
    return learns


def pad() -> int:
    return tiny.mixture().pad


def loss_of(learns: Predictor, step: int) -> StepLoss:
    return predicted_loss(*twins(), learns, tiny.mixture().step(step, STAGES[0]), pad())


# ---- what is trained is what serves
@torch.no_grad()
def test_training_predicts_the_rows_that_the_engine_reads() -> None:
    ids = torch.tensor(engines.prompts(40, vocab=2048))
    block, real = TokenBlock.of(ids, ids), torch.ones_like(ids, dtype=torch.bool)
    learns, (base, small) = randomly(3), twins()
    kept = [Past(real)]
    small.hidden([block], Pass(kept=kept, delta=learns.added))
    (mine,) = placed(base, [block], predicted(base, small, learns, [block], kept))

    model = Model.load(folder(BASE), dtype=torch.float32)
    tensors = artefacts.random(declared(), "3")
    aux = tuned(Auxiliary.of(Model.load(folder(SMALL), dtype=torch.float32)), tensors)
    rows = [(k[0].transpose(0, 1), v[0].transpose(0, 1)) for k, v in dense_rows(aux, ids)]
    for layer, (k, v) in enumerate(Maps(model, aux, tensors)(rows, 0)):
        torch.testing.assert_close(mine.layers[layer][0][0].transpose(0, 1), k, **CLOSE)
        torch.testing.assert_close(mine.layers[layer][1][0].transpose(0, 1), v, **CLOSE)


def dense_rows(model: Model, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What the engine caches of a text, [1, length, heads, D]."""
    from tests.kv.harness import Walk

    walk = Walk(model, ids[0].tolist())
    walk.feed(ids[0].tolist())
    parts = [layer.read()[0] for layer in walk.kv.layers]
    return [(part.k.transpose(0, 1)[None], part.v.transpose(0, 1)[None]) for part in parts]


@torch.no_grad()
def test_rows_that_read_what_they_would_have_made_are_plain() -> None:
    """`Pass.instead`: a model's own keys and values change nothing, others do."""
    base, _ = twins()
    ids = torch.tensor(engines.prompts(30, vocab=2048))
    block, real = TokenBlock.of(ids, ids), torch.ones_like(ids, dtype=torch.bool)
    own = base.prefill([block], [real])
    plain = base.hidden([block])
    torch.testing.assert_close(base.hidden([block], Pass(instead=own)), plain, **CLOSE)
    other = [replace_rows(own[0])]
    changed = base.hidden([block], Pass(instead=other)).view(1, 30, -1)
    assert (changed - plain.view(1, 30, -1))[:, 5:].abs().max() > 0.1
    torch.testing.assert_close(changed[:, :5], plain.view(1, 30, -1)[:, :5], **CLOSE)


def replace_rows(past: Past) -> Past:
    """Another value at position 5: nobody before it can tell."""
    layers = {layer: (k, v.clone()) for layer, (k, v) in past.layers.items()}
    for _, v in layers.values():
        v[:, 5] += 3.0
    return replace(past, layers=layers)


# ---- learning
def test_losses_fall_and_both_models_stay(tmp_path: Path) -> None:
    run, (base, small) = fresh(), twins()
    before = [{name: value.clone() for name, value in twin.state_dict().items()} for twin in (base, small)]
    nothing = loss_of(run.model, 100).parts
    begin(base, small, run.model, [tiny.mixture().step(step, STAGES[0]) for step in range(3)], pad())
    fitted = loss_of(run.model, 100).parts
    assert fitted["apart"] < nothing["apart"], "least squares alone are nearer than zeros"
    run.optimizers[0].param_groups[0]["peak"] = 0.01
    rows = trained(run, tiny.recipe(16, stages=STAGES, size=700, warmup=2), tmp_path)
    assert rows[0][:6] == ["step", "tokens", "code_loss", "task_loss", "aux_loss", "apart_loss"]
    learned, random = loss_of(run.model, 100).parts, loss_of(randomly(0), 100).parts
    for name in ("code", "task"):
        assert learned[name] < min(fitted[name] - 0.3, random[name]), name
    assert learned["aux"] < fitted["aux"] and 0 < learned["apart"] < random["apart"]
    for twin, was in zip((base, small), before):
        assert all(torch.equal(value, was[name]) for name, value in twin.state_dict().items())
        assert all(parameter.grad is None for parameter in twin.parameters())
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert set(saved) == set(run.model.state_dict()), "a checkpoint holds what is trained, not the models"


def recalling(rows: int, seed: int) -> TokenBlock:
    """Every token is followed by the first one of its row, one of 12: who has not read that can only guess."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 64, (rows, 12), generator=gen)
    ids[:, 0] = torch.randint(3, 15, (rows,), generator=gen)
    return TokenBlock.of(ids, ids[:, :1].expand(-1, 12).contiguous())


def taught(shape: DenseShape, seed: int) -> DenseDecoder:
    torch.manual_seed(seed)
    model = DenseDecoder(replace(shape, vocab_size=64))
    torch.nn.init.ones_(model.norm.weight)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(150):
        torch.cat(dense.losses(model, [recalling(32, step)])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


def test_what_was_learned_lies_between_random_maps_and_the_true_rows() -> None:
    """On a task for which a row has to read others: cross-entropy and distance; and shuffled maps are no better."""
    base, small = taught(replace(BASE, num_hidden_layers=3), 0), taught(SMALL, 1)
    held = ([recalling(32, 1000)], [recalling(32, 1001)])
    true = float(torch.cat(dense.losses(base, [*held[0], *held[1]])).mean())
    config = [engines.model(layers=layers, hidden=hidden, heads=heads, kv_heads=kv).config
              for layers, hidden, heads, kv in ((3, 64, 4, 2), (2, 48, 3, 1))]  # fmt: skip
    made = KVPrediction("small").artefact(*config)
    torch.manual_seed(2)
    made = replace(made, shapes={name: shape for name, shape in made.shapes.items() if name.split(".")[0] != "aux"})
    run = start(Predictor(made))
    draw = artefacts.random(made, "0")
    with torch.no_grad():
        for name, held_one in run.model.tensors().items():
            held_one.copy_(draw[name])
    random = predicted_loss(base, small, run.model, held, -1).parts
    begin(base, small, run.model, [([recalling(32, 500)], [recalling(32, 501)])], -1)
    for step in range(60):
        update(run, predicted_loss(base, small, run.model, ([recalling(16, step)], [recalling(16, 7000 + step)]), -1))
    learned = predicted_loss(base, small, run.model, held, -1).parts
    assert true < 0.1 and learned["task"] > true, "true rows are the bound"
    assert learned["task"] < 0.3 and random["task"] > 2.0, "of ln 12 = 2.5"
    assert learned["apart"] < 0.7 * random["apart"]
    with torch.no_grad():
        run.model.maps["k_weight"].copy_(run.model.maps["k_weight"].flip(0))
        run.model.maps["v_weight"].copy_(run.model.maps["v_weight"].flip(0))
    assert predicted_loss(base, small, run.model, held, -1).parts["task"] > 2 * learned["task"] + 0.3


def trained(run: TrainingRun[Predictor], recipe: TrainingRecipe, out: Path, saved: Any = None) -> list[list[str]]:
    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return predicted_loss(*twins(), run.model, batch, pad())

    fit(run, loss, tiny.mixture(), recipe, out, saved)
    with (out / "losses.csv").open() as file:
        return [row[:7] for row in csv.reader(file)]  # all but the speed


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = fresh()
    whole = trained(straight, tiny.recipe(6, stages=STAGES, size=700, warmup=2), tmp_path / "whole")

    def interrupt(run: TrainingRun[Predictor]) -> None:
        if run.step == 3:
            raise _Interrupted

    recipe = tiny.recipe(6, 0.0, stages=STAGES, size=700, warmup=2)
    with pytest.raises(_Interrupted):
        trained(fresh(), recipe, tmp_path / "cut", interrupt)
    resumed = fresh()
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert resumed.step == 3
    assert trained(resumed, recipe, tmp_path / "cut") == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("own", [False, True])
def test_the_command_trains_what_the_engine_then_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    """For another model, and for half of the model's own layers."""
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(decode_kv_prediction, "STAGES", STAGES)
    monkeypatch.setattr(decode_kv_prediction, "FIRST", 1)
    name = "own:0.5" if own else str(folder(SMALL))
    kind = f"decode.kv_prediction:model={name}"
    words = ["train", "artefact", kind, "--model", str(folder(BASE)), "--out", str(tmp_path), "--tokens", "1400"]
    with pytest.raises(SystemExit) as left:
        main(words)
    path = tmp_path / f"decode.kv_prediction-model{'own0.5' if own else 'model'}.safetensors"
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2

    prompt, model = engines.prompts(70, vocab=2048), Model.load(folder(BASE))
    placed = engines.engine({"decode": f"kv_prediction:model={name},weights={path}"}, of=model)
    assert isinstance(placed, Engine)
    (request,) = engines.run(placed, prompt, engines.greedy(8))
    assert len(request.out) == 8 and request.recalled == 69
