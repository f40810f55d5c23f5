"""Training to N:M sparse weights: dense steps are dense ones, the end is exactly N of M, a resumed run is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.load import load_model
from phasewise.model.levels import matrices
from phasewise.model.model import Model
from phasewise.model.nm import BITMASK, COMPRESSED, PATTERNS, largest
from phasewise.ops import native
from phasewise.train import dense, sparsify
from phasewise.train.dense import DenseShape, losses
from phasewise.train.device import halved
from phasewise.train.mixture import Stage
from phasewise.train.sparsify import (
    RECIPES,
    FadedWeight,
    NMLinear,
    Recipe,
    SparsifyJob,
    sparse_layers,
    start,
    step_loss,
    train,
)
from phasewise.train.trainer import fit, update, weighed
from tests.model.reference import holds_near, run
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 2, 4, 2, 128, head_dim=16, max_position_embeddings=512)
STAGE = Stage(1.0, 256, 512, 0.3, 0.2, 0.2)
HALF = PATTERNS["2:4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsify, "STAGES", (STAGE,))
    monkeypatch.setattr(sparsify, "STEP_TOKENS", STAGE.step_tokens)
    monkeypatch.setattr(sparsify, "of_model", lambda files, ends, seed: tiny.mixture(seed))


def job(base: str, out: Path, steps: int = 8, **more: Any) -> SparsifyJob:
    return SparsifyJob(
        base, out, **{"pattern": HALF, "dense": 0.1, "sparse": 0.3, "tokens": steps * STAGE.step_tokens, **more}
    )


# ---- layers
def test_values_outside_the_mask_fade_and_the_gradient_passes() -> None:
    """With the pull of SR-STE they are drawn to 0 beside it."""
    weight = torch.randn(6, 8, requires_grad=True)
    mask, wanted = largest(weight, HALF), torch.randn(6, 8)
    for share, pull in ((1.0, 0.0), (0.25, 0.0), (0.0, 0.5)):
        weight.grad = None
        found = FadedWeight.apply(weight, mask, share, pull)  # type: ignore[no-untyped-call]
        assert torch.equal(found, weight * (mask + ~mask * share))
        (found * wanted).sum().backward()
        assert torch.equal(weight.grad, wanted + pull * ~mask * weight)  # type: ignore[arg-type]


def test_what_only_kept_weights_learn() -> None:
    layer = NMLinear(torch.nn.Linear(8, 6, bias=False), HALF, "magnitude")
    layer(torch.randn(3, 8)).square().sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad[~layer.mask].any() and layer.weight.grad[layer.mask].all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_masks_are_chosen_anew_where_weights_may_come_back(recipe: Recipe) -> None:
    """In every step that is not dense, but for `magnitude`."""
    layer = NMLinear(torch.nn.Linear(16, 6, bias=False), HALF, recipe)
    first = layer.mask.clone()

    def after(share: float) -> Tensor:
        with torch.no_grad():
            layer.weight.copy_(torch.randn(6, 16))
        layer.enter(share if recipe == "decay" else 0.0)
        return largest(layer.weight, HALF)

    for share in (0.5, 0.0, 0.0):
        now = after(share)
        assert not torch.equal(now, first)
        assert torch.equal(layer.mask, first if recipe == "magnitude" else now)


def test_shares_fall_from_one_to_nothing(tmp_path: Path) -> None:
    shares = [job("", tmp_path, 20, dense=0.1, sparse=0.3, fade="linear").share(step) for step in range(20)]
    assert shares[:3] == [1, 1, 1] and shares[14:] == [0] * 6
    assert all(later < before for before, later in pairwise(shares[2:15]))
    assert {job("", tmp_path, 20, recipe="sr-ste").share(step) for step in range(20)} == {0}
    bent = [job("", tmp_path, 20, dense=0.1, sparse=0.3, fade="exponential").share(step) for step in range(20)]
    assert bent[:3] == [1, 1, 1] and bent[14:] == [0] * 6 and 0 < bent[13] < 0.02
    assert all(its < other for its, other in zip(bent[3:14], shares[3:14], strict=True))


# ---- steps
def test_dense_steps_are_those_of_dense_training(base: str, tmp_path: Path) -> None:
    """With d = 1, step for step and bit for bit; with d below 1 no longer."""
    wanted = job(base, tmp_path, 10, dense=0.5)
    ours, plain = dense.load(base), dense.load(base)
    layers = list(sparse_layers(ours, HALF, "decay").values())
    runs = start(wanted, ours), start(wanted, plain)
    data = tiny.mixture()
    for step in range(7):
        batch = data.step(step, STAGE)
        update(runs[0], step_loss(wanted, ours, layers, step, batch))
        blocks = [*batch[0], *batch[1]]
        with halved(torch.device("cpu")):
            each = losses(plain, blocks)
        update(runs[1], weighed(torch.cat(each[: len(batch[0])]), torch.cat(each[len(batch[0]) :]), 1))
        same = all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
        assert same == (step <= 5), step


@pytest.mark.parametrize(("recipe", "pattern"), [("decay", "2:4"), ("sr-ste", "1:4"), ("magnitude", "1:8")])
def test_in_the_end_exactly_n_of_m_are_left(recipe: Recipe, pattern: str, base: str, tmp_path: Path) -> None:
    wanted = PATTERNS[pattern]
    made = train(job(base, tmp_path, recipe=recipe, pattern=wanted, rate=0.02))
    learned = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    stored, before = load_file(made / "model.safetensors"), load_file(Path(base) / "model.safetensors")
    tensors = Model.load(made, dtype=torch.float32)
    twin = dense.load(made)
    for name in matrices(tensors.config):
        weight = twin.get_parameter(name.removeprefix("model."))
        assert ((weight != 0).view(-1, wanted.m).sum(1) == wanted.n).all(), name
        assert stored[name + COMPRESSED].numel() * wanted.m == weight.numel() * wanted.n
        now = before[name].float() if recipe == "magnitude" else learned[name.removeprefix("model.")]
        assert torch.equal(weight != 0, largest(now, wanted)), "of the weights at the end, or those at the beginning"
    assert not torch.equal(stored["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert (tmp_path / "losses.csv").is_file()


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_what_was_trained_is_what_is_served(base: str, tmp_path: Path) -> None:
    made, tokens = train(job(base, tmp_path)), [3 + i * 37 % 900 for i in range(40)]
    with torch.no_grad():
        want = dense.load(made)(torch.tensor([tokens]))[0]
    ours = load_model(str(made))
    assert {part for layer in ours.layers for part in layer.mlp.down.native.forms} == {"NM_2_4/bfloat16"}
    holds_near(run(ours, tokens), want, 0.05)


# ---- cut short
def dies_in(step: int) -> Callable[..., None]:
    """`fit` that writes a checkpoint after every step, and ends after some."""

    def fitted(training: Any, loss: Any, data: Any, recipe: Any, out: Path) -> None:
        def saved(now: Any) -> None:
            if now.step == step:
                raise KeyboardInterrupt

        fit(training, loss, data, replace(recipe, checkpoint_seconds=-1.0), out, saved)

    return fitted


@pytest.mark.parametrize(
    ("recipe", "step"), [("decay", 3), ("decay", 6), ("decay", 7), ("sr-ste", 4), ("magnitude", 5)]
)
def test_a_run_that_is_cut_short_goes_on_to_the_same_bits(
    recipe: Recipe, step: int, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps in which weights fade, in sparse ones, and in the other recipes."""
    whole = train(job(base, tmp_path / "whole", recipe=recipe, rate=0.02))
    cut = job(base, tmp_path / "cut", recipe=recipe, rate=0.02)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sparsify, "fit", dies_in(step))
        train(cut)
    assert not (cut.out / "model").exists()
    with pytest.raises(UserError, match=r"that run had pattern='2:4', this one has '1:4'"):
        train(replace(cut, pattern=PATTERNS["1:4"], resume=True))
    made = train(replace(cut, resume=True))
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / file).read_bytes() == (whole / file).read_bytes()


# ---- what is refused
def test_a_loss_that_is_no_number_is_named(base: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss became .*nan.* at step \d: .* now --rate 1e\+30\. Begin anew"):
        train(job(base, tmp_path, recipe="magnitude", rate=1e30))
    assert not (tmp_path / "model").exists()


WRONG = [
    (["--pattern", "3:4"], "--pattern='3:4': kernels have 2:4, 1:4, 1:8: choose one of them"),
    (["--dense", "0.6", "--sparse", "0.4"], "--dense 0.6 and --sparse 0.4 leave no steps in which weights fade"),
    (["--resume"], "there is nothing to resume"),
    (["--recipe", "wanda"], "'wanda' is not one of"),
    (["--rate", "0"], "should be greater than or equal to"),
]


@pytest.mark.parametrize(("more", "says"), WRONG)
def test_what_is_written_wrong_is_named(
    more: list[str], says: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "sparsify", "--model", base, "--out", str(tmp_path / "out"), *more])
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert left.value.code == 2 and says in told


def test_a_model_that_no_kernel_takes_is_named(tmp_path: Path) -> None:
    odd = tiny.lively(replace(SHAPE, intermediate_size=96), tmp_path / "odd")
    with pytest.raises(UserError, match=r"down_proj\.weight has 96 inputs, which blocks of 64 do not divide"):
        train(job(str(odd), tmp_path / "out"))


def test_the_command_trains(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "sparsify", "--model", base, "--out", str(tmp_path / "out"), "--pattern", "1:8", "--recipe",
              "sr-ste", "--tokens", "1500"])  # fmt: skip
    assert not left.value.code
    made = tmp_path / "out" / "model"
    assert f"Use it with --model {made}" in " ".join(capsys.readouterr().out.split())
    assert json.loads((made / "config.json").read_text())["quantization_config"]["pattern"] == "1:8"
    assert any(name.endswith(BITMASK) for name in load_file(made / "model.safetensors"))
