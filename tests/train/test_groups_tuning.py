"""Training for decode.hamburger: groups in training stand where they stand in the engine and say the same, the loss
falls, a resumed run is the same run, and what is made serves."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.methods.decode.hamburger import Hamburger
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.artefacts import decode_hamburger as tuning
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit
from tests import tiny as engines
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
recipe = partial(tiny.recipe, stages=STAGES, size=700, warmup=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


def run(base: Path) -> tuple[DenseDecoder, TrainingRun[tuning.Trained]]:
    torch.manual_seed(0)
    return dense.load(base).requires_grad_(False), tuning.start(tuning.Trained(Model.load(base).config))


def tune(
    twin: DenseDecoder, run: TrainingRun[tuning.Trained], steps: TrainingRecipe, out: Path, saved: object = None
) -> list[list[str]]:
    def loss(stage: Stage, batch: tuning.Batch) -> StepLoss:
        return tuning.group_loss(twin, run.model, *batch)

    fit(run, loss, tuning.GroupBatches(tiny.mixture()), steps, out, saved)  # type: ignore[arg-type]
    with (out / "losses.csv").open() as file:
        return [row[:7] for row in csv.reader(file)]  # all but the speed


# ---- how texts are cut
def test_rows_of_groups_stand_at_their_last_tokens() -> None:
    """Two texts of 8 tokens, of which the last ones are learned: of the first all, of the second the later half."""
    ids = torch.arange(10, 26).view(2, 8)
    targets = torch.cat((ids[:, 1:], torch.tensor([[90], [91]])), 1)
    targets[:, :2] = -1  # tokens 3 to 8 are learned, the last of which lies behind the row
    low, high = 0.0, 9.0
    made = tuning.grouped([TokenBlock.of(ids, targets)], [0.0, 0.5], [high, low, low, high, low, low] * 2)
    assert made.tokens == [[13, 14, 15], [16, 17, 90], [24, 25, 91]]
    (block,) = made.blocks
    assert block.positions.tolist() == [[0, 1, 2, 5, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert block.ids[0, :4].tolist() == [10, 11, 12, 15] and block.ids[1].tolist() == [18, 19, 20, 21, 22, 23]
    assert made.said_by == [2, 3, 11] and made.enters == [(3, 0)]
    assert made.learned == [0, 3, 9] and made.last == [False, True, True] and made.mean == 3


def test_what_lies_between_replies_has_rows_of_its_own() -> None:
    ids = torch.arange(10, 18)[None]
    targets = torch.tensor([[11, 12, -1, -1, 15, 16, -1, -1]])
    made = tuning.grouped([TokenBlock.of(ids, targets)], [0.0], [5.0, 0.0, 5.0, 0.0])
    assert made.tokens == [[11, 12], [15, 16]]
    assert made.blocks[0].positions.tolist() == [[0, 2, 3, 4, 6, 7]]
    assert made.said_by == [0, 3] and made.enters == [(1, 0), (4, 1)]


# ---- twin and engine
def loaded(model: Model, seed: str) -> tuning.Trained:
    """Random weights, as the engine has them."""
    made = tuning.Trained(model.config)
    found = artefacts.random(Hamburger().artefact(model.config), seed)
    with torch.no_grad():
        for name, tensor in made.tensors().items():
            tensor.copy_(found[name])
    return made


@torch.no_grad()
def test_twin_and_engine_say_the_same(base: Path) -> None:
    """Log-probabilities of all tokens of a text that the engine has written in groups, at twin and engine."""
    model, twin = Model.load(base, dtype=torch.float32), dense.load(base)
    prompts = engines.prompts(40, 7, 29, vocab=2048)
    placed = engines.engine({"decode": "hamburger:confidence=0.48,weights=random:0"}, of=model)
    requests = [Request(prompt, Params(30, ignore_eos=True, logprobs=0)) for prompt in prompts]
    for request in requests:
        placed.add(request)
    engines.finish(placed, requests)
    made = loaded(model, "0")
    assert {size for request in requests for size in request.groups} >= {1, 2, 4}
    for request in requests:
        told = [request.scores[at].logprob for at in range(request.prompt_len, request.known)]
        assert told == pytest.approx(said(twin, made, request), abs=2e-3)


def said(twin: DenseDecoder, made: tuning.Trained, request: Request) -> list[float]:
    """The log-probability of each token of the output, by training's pass over the request's own groups."""
    groups, prompt = tuning.Groups(), request.prompt
    tokens, positions, at = [*prompt], [*range(len(prompt))], len(prompt)
    for number, size in enumerate(request.groups):
        groups.said_by.append(len(tokens) - 1)
        groups.tokens.append(request.tokens[at : at + size])
        groups.last.append(False)
        at += size
        if size > 1:
            groups.enters.append((len(tokens), number))
        tokens.append(request.tokens[at - 1])
        positions.append(at - 1)
    groups.blocks = [TokenBlock(torch.tensor([tokens]), torch.tensor([tokens]), torch.tensor([positions]))]
    first, later, _, _ = tuning.outputs(twin, made, groups, torch.device("cpu"))

    def each(x: Tensor, wanted: list[int]) -> list[float]:
        rows = F.linear(x, twin.embed_tokens.weight).float().log_softmax(-1)
        return rows.gather(1, torch.tensor(wanted)[:, None])[:, 0].tolist()

    ones = each(first, [group[0] for group in groups.tokens])
    others = iter(each(later, [token for group in groups.tokens for token in group[1:]]))
    return [value for one, group in zip(ones, groups.tokens) for value in (one, *(next(others) for _ in group[1:]))]


# ---- training
def test_the_loss_falls_and_a_resumed_run_is_the_same_run(base: Path, tmp_path: Path) -> None:
    twin, tuned = run(base)
    before = [parameter.clone() for parameter in twin.parameters()]
    rows = tune(twin, tuned, recipe(12), tmp_path / "whole")
    assert rows[0][2:] == ["first_loss", "later_loss", "kept_loss", "stop_loss", "group_loss"]
    first, last = (sum(float(row[3]) for row in some) / 3 for some in (rows[1:4], rows[-3:]))
    assert last < first - 0.1
    assert all(torch.equal(one, other) for one, other in zip(before, twin.parameters()))

    class Cut(Exception):
        pass

    def cut(run: TrainingRun[tuning.Trained]) -> None:
        if run.step == 5:
            raise Cut

    _, again = run(base)
    with pytest.raises(Cut):
        tune(twin, again, recipe(12, checkpoint_seconds=0.0), tmp_path / "cut", cut)
    _, resumed = run(base)
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert tune(twin, resumed, recipe(12), tmp_path / "cut") == rows


def test_the_command_trains_what_the_engine_then_finds(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(tuning, "STAGES", STAGES)
    words = ["train", "artefact", "decode.hamburger", "--model", str(base), "--out", str(tmp_path), "--tokens", "1400"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    said = capsys.readouterr().out
    path = tmp_path / "decode.hamburger.safetensors"
    assert f"hamburger:weights={path}" in said
    model: Any = Model.load(base)
    placed = engines.engine({"decode": f"hamburger:weights={path}"}, of=model)
    assert len(engines.outs(engines.run(placed, engines.prompts(20, vocab=2048), engines.greedy(8)))[0]) == 8
    with pytest.raises(UserError, match=r"phasewise train artefact decode\.hamburger"):
        engines.engine({"decode": "hamburger"}, of=model)
    with pytest.raises(UserError, match="most=1 is the model alone"):
        tuning.train(Hamburger(most=1), ArtefactJob(str(base), tmp_path))
