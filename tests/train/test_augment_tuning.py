"""Training for decode.augment: the loss falls below the base's, other latents lose, a resumed run is the same run, it
serves, and twin and engine give the same logits."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.methods.decode.augment import Augment
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.artefacts import decode_augment as tuning
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.exchanges import Exchanges, PromptReplyBatch, exchange
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit
from tests import tiny as engines
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
COUNT = 4
Batch = tuple[list[PromptReplyBatch], list[PromptReplyBatch]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


recipe = partial(tiny.recipe, stages=STAGES, size=700, warmup=2)


def run(base: Path) -> tuple[DenseDecoder, TrainingRun[LowRank]]:
    torch.manual_seed(0)
    twin = dense.load(base).requires_grad_(False)
    return twin, tuning.start(LowRank(Augment(COUNT).artefact(Model.load(base).config).shapes), twin)


def tune(
    twin: DenseDecoder, run: TrainingRun[LowRank], steps: TrainingRecipe, out: Path, saved: object = None
) -> list[list[str]]:
    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return tuning.ahead_loss(twin, run.model, batch)

    fit(run, loss, Exchanges(tiny.mixture()), steps, out, saved)  # type: ignore[arg-type]
    with (out / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


def mean(each: list[Tensor]) -> float:
    return float(torch.cat(each).mean())


@torch.no_grad()
def after(twin: DenseDecoder, made: LowRank) -> dict[str, float]:
    """The loss of texts not trained on, after their own latents, none, and random ones as long."""
    source, tasks = Exchanges(tiny.mixture(seed=7)).step(0, STAGES[0])
    both = [*source, *tasks]
    past = tuning.past_of(twin, both)
    z = tuning.latents(twin, made, both, past)
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    noise *= z.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    three = ("own", z), ("none", None), ("random", noise)
    return {name: mean(tuning.losses_after(twin, both, past, each, first=False)) for name, each in three}


def test_the_loss_falls_below_the_bases_and_other_latents_lose(base: Path, tmp_path: Path) -> None:
    twin, tuned = run(base)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    tuned.optimizers[0].param_groups[0]["peak"] = 0.05
    first = after(twin, tuned.model)
    rows = tune(twin, tuned, recipe(30), tmp_path)
    assert rows[0][:5] == ["step", "tokens", "code_loss", "task_loss", "pace"]
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items()), "the base, to the bit"
    assert all(parameter.grad is None for parameter in twin.parameters())
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert set(saved) == set(tuned.model.state_dict()), "a checkpoint holds what is trained, not the base"
    last = after(twin, tuned.model)
    assert last["own"] < first["own"] - 0.1 and last["none"] == first["none"]
    assert last["own"] < last["none"] - 0.1 and last["own"] < last["random"] - 0.1, last


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    twin, straight = run(base)
    whole = tune(twin, straight, recipe(6), tmp_path / "whole")

    def interrupt(run: TrainingRun[LowRank]) -> None:
        if run.step == 3:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        tune(*run(base), recipe(6, checkpoint_seconds=0.0), tmp_path / "cut", interrupt)
    _, resumed = run(base)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1.0)  # whatever it was before
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert tune(twin, resumed, recipe(6), tmp_path / "cut") == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_command_trains_what_the_engine_then_finds(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(tuning, "STAGES", STAGES)
    out = tmp_path / "run"
    words = ["train", "artefact", "decode.augment:latents=4", "--model", str(base), "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main([*words, "--tokens", "1400"])
    path = out / "decode.augment-latents4.safetensors"
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()
    with safe_open(path, framework="pt") as file:
        assert "decode.augment:latents=4" in str(file.metadata()["command"])
    model = Model.load(base)
    placed = engines.engine({"decode": f"augment:latents=4,weights={path}"}, of=model)
    assert len(engines.outs(engines.run(placed, engines.prompts(20, vocab=2048), engines.greedy(8)))[0]) == 8
    with pytest.raises(UserError, match=r"not for .*latents.*: 5"):
        engines.engine({"decode": f"augment:latents=5,weights={path}"}, of=model)
    with pytest.raises(UserError, match=r"Train them: phasewise train artefact decode.augment:latents=4 .*latents=0"):
        engines.engine({"decode": "augment:latents=4"}, of=model)
    with pytest.raises(SystemExit) as none:
        main(["train", "artefact", "decode.augment:latents=0", "--model", str(base), "--out", str(out)])
    assert none.value.code == 2 and "needs no training" in capsys.readouterr().err


# ---- twin and engine
def drawn(of: Model, seed: int) -> LowRank:
    """What `random:seed` stands for, as training holds it."""
    wanted = Augment(COUNT).artefact(of.config)
    made = LowRank(wanted.shapes).requires_grad_(False)
    for name, value in artefacts.random(wanted, str(seed)).items():
        made[name].copy_(value)
    return made


def test_twin_and_engine_give_the_same_log_probabilities(base: Path) -> None:
    """Prompts and replies of several lengths in one padded block, the first token among them."""
    model, twin = Model.load(base, dtype=torch.float32), dense.load(base).requires_grad_(False)
    prompts = engines.prompts(40, 7, 29, vocab=2048)
    placed = engines.engine({"decode": f"augment:latents={COUNT},weights=random:3"}, of=model)
    requests = [Request(prompt, Params(max_tokens=9, ignore_eos=True, logprobs=0)) for prompt in prompts]
    for request in requests:
        placed.add(request)
    engines.finish(placed, requests)
    both = exchange([(prompt, request.out) for prompt, request in zip(prompts, requests)], 0)
    past = tuning.past_of(twin, [both])
    made = drawn(model, 3)
    z = tuning.latents(twin, made, [both], past)
    (found,) = tuning.losses_after(twin, [both], past, z)
    want = [-request.scores[at].logprob for request in requests for at in range(request.prompt_len, request.known)]
    torch.testing.assert_close(found, torch.tensor(want), atol=2e-4, rtol=1e-4)
    (plain,) = tuning.losses_after(twin, [both], past, None)
    assert (found.view(3, 9)[:, 1:].flatten() - plain).abs().max() > 0.1, "latents matter, or the test tests little"
    (rolled,) = tuning.losses_after(twin, [both], past, z.roll(1, 0))
    assert (found - rolled).abs().max() > 1e-2, "and so does whose they are"


def test_soft_rows_are_tokens_embeddings_where_they_are(base: Path) -> None:
    twin = dense.load(base).requires_grad_(False)
    ids = torch.tensor(engines.prompts(20, vocab=2048))
    block = dense.TokenBlock.of(ids, ids)
    soft = torch.arange(5, 9), twin.embed_tokens(ids[0, 5:9])
    changed = ids.clone()
    changed[0, 5:9] = 0
    want = twin.hidden([block])
    assert torch.equal(twin.hidden([dense.TokenBlock.of(changed, changed)], Pass(soft=soft)), want)
    other = F.normalize(soft[1])
    assert not torch.allclose(twin.hidden([block], Pass(soft=(soft[0], other))), want)
