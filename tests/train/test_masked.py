"""Training under masks: the twin sees what the engine shows, the loss falls, and what is saved serves its knobs."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.methods.attend.infllm import InfLLM
from phasewise.methods.attend.power import Power
from phasewise.methods.evict._windows import Window
from phasewise.methods.evict.longgen import LongGen
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.train import dense, masked
from phasewise.train.artefacts import ArtefactJob, attend_infllm, attend_power, evict_longgen
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock, losses
from phasewise.train.lowrank import LowRank
from phasewise.train.masked import HiddenRows, Mask, masked_loss
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit
from phasewise.verbs.host import Host
from tests import tiny as engines
from tests.kv.harness import Walk, cuts
from tests.seeds import draw
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(1.0, 256, 700, code=0.3, long=0.2, copies=0.4, short=48),)
LONGGEN: dict[str, Any] = {"sinks": 2, "window": 6}
METHODS: dict[str, Any] = {
    "evict.longgen": lambda **more: LongGen(**LONGGEN, **more),
    "evict.longgen strided": lambda **more: LongGen(0, 5, 3, 4, **more),
    "attend.power": lambda **more: Power(2, 1, 0, **more),
    "attend.infllm": lambda **more: InfLLM(4, 1, 4, 1, 20, **more),
}
MODULES: dict[str, Any] = {"attend.power": attend_power, "attend.infllm": attend_infllm}
EVERY = pytest.mark.parametrize("name", draw(__name__).sample([*METHODS], 1))  # each of them, in turn
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
recipe = partial(tiny.recipe, stages=STAGES, size=700, warmup=2)
Batch = tuple[list[TokenBlock], list[TokenBlock]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer; random, but every layer does something."""
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


def mask_of(name: str, model: Model) -> HiddenRows:
    module: Any = MODULES.get(name, evict_longgen)
    mask: HiddenRows = module.mask(METHODS[name](), model.config)
    return mask


def served(model: Model, name: str, weights: str, tokens: list[int]) -> torch.Tensor:
    """Logits of a text's rows in the engine, in pieces."""
    verb = name.partition(".")[0]
    host = Host(model, None, Counters(), None, None)  # type: ignore[arg-type]
    walk = Walk(model, tokens[:1], **{verb: METHODS[name](weights=weights).bind(host)})
    walk.plain = walk.phase  # prompts run like everything else
    return torch.cat([walk.feed(piece) for piece in cuts(tokens, [1, 30, 7, 1])])


@EVERY
@pytest.mark.parametrize("seed", [None, 3], ids=["untuned", "low-rank"])
def test_the_twin_gives_the_engines_logits(base: Path, name: str, seed: int | None) -> None:
    """Texts of two lengths in one padded block, at masks and with weights that matter."""
    model, twin = Model.load(base, dtype=torch.float32), dense.load(base).requires_grad_(False)
    texts, delta = engines.prompts(90, 61, vocab=2048), None
    if seed is not None:
        wanted = METHODS[name]().artefact(model.config)
        delta = LowRank(wanted.shapes).requires_grad_(False)
        for each, value in artefacts.random(wanted, str(seed)).items():
            delta[each].copy_(value)
    ids = torch.tensor([[*text, *[0] * (90 - len(text))] for text in texts])
    block = TokenBlock.of(ids, ids)
    hidden = twin.hidden([block], mask_of(name, model).on([block], delta))
    rows = F.linear(hidden, twin.embed_tokens.weight).view(2, 90, -1)
    for text, found in zip(texts, rows):
        want = served(model, name, "none" if seed is None else f"random:{seed}", text)
        torch.testing.assert_close(found[: len(text)], want, **CLOSE)
        plain = twin(torch.tensor([text]))[0]
        assert (want - plain).abs().max() > 0.1, "the mask matters, or the test tests little"


def test_masks_go_by_positions() -> None:
    """Rows that stand apart see no further than positions say; the same for all rows where they stand alike."""
    mask = Mask((0,), LongGen(1, 3).seen.seen)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    far = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 50, 51, 52]])
    sees = mask.over([TokenBlock.of(ids, ids), TokenBlock(ids, ids, far)])
    alike, apart = sees(0, 0), sees(0, 1)
    assert sees(1, 0) is None and alike is not None and apart is not None
    assert alike.shape == (1, 5, 5) and apart.shape == (2, 5, 5)
    assert alike[0, 4].tolist() == [True, False, True, True, True]
    assert torch.equal(apart[0], alike[0]) and apart[1, 3].tolist() == [True, False, True, True, False]
    assert sees(0, 1) is apart, "made once"


def tune(
    twin: DenseDecoder,
    run: TrainingRun[LowRank],
    mask: HiddenRows,
    steps: TrainingRecipe,
    out: Path,
    saved: object = None,
) -> list[list[str]]:
    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return masked_loss(twin, run.model, mask, batch)

    fit(run, loss, tiny.mixture(), steps, out, saved)  # type: ignore[arg-type]
    with (out / "losses.csv").open() as file:
        return [row[:5] for row in csv.reader(file)]  # all but the speed


def ready(base: Path, name: str) -> tuple[DenseDecoder, TrainingRun[LowRank], HiddenRows]:
    torch.manual_seed(0)
    model = Model.load(base)
    run = masked.start(METHODS[name]().artefact(model.config))
    return dense.load(base).requires_grad_(False), run, mask_of(name, model)


@EVERY
def test_the_loss_falls_below_the_masks_alone(base: Path, tmp_path: Path, name: str) -> None:
    """On a batch that was not learned; the base stays frozen, and the control is the mask without the weights."""
    twin, run, mask = ready(base, name)
    before = {each: value.clone() for each, value in twin.state_dict().items()}
    run.optimizers[0].param_groups[0]["peak"] = 0.02
    fresh = tiny.mixture(seed=7).step(0, STAGES[0])
    untuned = masked_loss(twin, None, mask, fresh)
    with torch.no_grad():
        start = masked_loss(twin, run.model, mask, fresh)
    assert float(start.total) == pytest.approx(float(untuned.total)), "training starts at the control"
    tune(twin, run, mask, recipe(14), tmp_path)
    with torch.no_grad():
        tuned = masked_loss(twin, run.model, mask, fresh)
    assert float(tuned.total) < float(untuned.total) - 0.5
    assert all(torch.equal(value, before[each]) for each, value in twin.state_dict().items())
    assert all(parameter.grad is None for parameter in twin.parameters())


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    twin, straight, mask = ready(base, "evict.longgen")
    whole = tune(twin, straight, mask, recipe(6), tmp_path / "whole")

    def interrupt(run: TrainingRun[LowRank]) -> None:
        if run.step == 3:
            raise _Interrupted

    cut = tmp_path / "cut"
    _, broken, _ = ready(base, "evict.longgen")
    with pytest.raises(_Interrupted):
        tune(twin, broken, mask, recipe(6, checkpoint_seconds=0.0), cut, interrupt)
    _, resumed, _ = ready(base, "evict.longgen")
    resumed.read(cut / "checkpoint.pt")
    assert resumed.step == 3
    assert tune(twin, resumed, mask, recipe(6), cut) == whole
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = masked.start(LongGen(2, 7).artefact(Model.load(base).config))
    with pytest.raises(UserError, match=r"window=6.*this one has .*window=7"):
        other.read(cut / "checkpoint.pt")


COMMANDS = {
    "evict.longgen:sinks=2,window=6": ("evict.longgen-sinks2-window6-fullmiddle.safetensors", "longgen:window=7"),
    "attend.infllm:block=4,window=4,topk=1,dense_len=20": (
        "attend.infllm-block4-init1-window4-topk1-dense_len20.safetensors",
        "infllm:block=4,window=4,topk=2,dense_len=20",
    ),
    "attend.power:block=2,window=1": ("attend.power-block2-window1-sinks1.safetensors", "power:block=2,window=2"),
}


@pytest.mark.parametrize("setting", draw(__name__).sample([*COMMANDS], 1))
def test_the_command_trains_what_the_engine_then_finds(
    base: Path, tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(masked, "STAGES", STAGES)
    file, other = COMMANDS[setting]
    verb, _, method = setting.partition(".")
    out, words = tmp_path / "run", ["train", "artefact", setting, "--model", str(base)]
    with pytest.raises(SystemExit) as left:
        main([*words, "--out", str(out), "--tokens", "1400"])
    path = out / file
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()
    model, prompt = Model.load(base), engines.prompts(20, vocab=2048)
    placed = engines.engine({verb: f"{method},weights={path}"}, of=model)
    assert len(engines.outs(engines.run(placed, prompt, engines.greedy(8)))[0]) == 8
    with pytest.raises(UserError, match="was trained for"):
        engines.engine({verb: f"{other},weights={path}"}, of=model)
    with pytest.raises(UserError, match="another base model"):
        engines.engine({verb: f"{method},weights={path}"})


def test_nothing_hidden_is_nothing_to_train(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("evict.longgen:window=508", "attend.power:block=128", "attend.infllm"):
        with pytest.raises(SystemExit) as left:
            main(["train", "artefact", setting, "--model", str(base), "--out", str(tmp_path)])
        assert left.value.code == 2 and "choose a smaller window" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "learns"), [("power", True), ("window", False)])
def test_from_scratch_copying_over_distance_is_learned_beyond_the_windows_reach(name: str, learns: bool) -> None:
    """Twelve tokens back, in two layers: two hops of powers of two, 8 and 4; a window of the same degree ends at 10."""
    distance, length, vocab, degree = 12, 24, 12, 6
    power, at = Power(1, 1, 0), torch.arange(24)
    assert int(power.seen(at[:, None], at[None]).tril().sum(1).max()) == degree
    mask = Mask(range(2), power.seen if name == "power" else Window(0, degree).seen)
    torch.manual_seed(0)
    model = DenseDecoder(DenseShape(vocab, 64, 2, 4, 4, 64, head_dim=16, max_position_embeddings=64))
    for each, parameter in model.named_parameters():
        if each.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.05)
    torch.nn.init.ones_(model.norm.weight)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    last = 0.0
    for _ in range(140):
        ids = torch.randint(vocab, (32, length))
        targets = ids.roll(distance, 1)
        targets[:, :distance] = -1
        block = TokenBlock.of(ids, targets)
        (each_loss,) = losses(model, [block], mask.on([block], None))
        optimizer.zero_grad()
        each_loss.mean().backward()
        optimizer.step()
        last = float(each_loss.detach().mean())
    chance = math.log(vocab)
    assert last < 0.1 * chance if learns else last > 0.97 * chance
