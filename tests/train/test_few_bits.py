"""Calibration by closed forms, and conversions: what is written is what was rounded, and a cut one goes on the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.load import load_model
from phasewise.model.levels import rounded_to_nearest
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.source import source
from phasewise.model.weights_form import Calibration, WeightsForm
from phasewise.ops import native
from phasewise.train import awq, few_bits
from phasewise.train.awq import folded_norm, searched
from phasewise.train.few_bits import FewBitsJob, convert
from phasewise.train.gptq import gptq, row_errors
from phasewise.train.layer_walk import LayerWalk, LinearInputs
from tests.model import test_quantised, test_quantised_tables
from tests.model.reference import run, save_random
from tests.model.test_levels import MODELS, TOKENS, rounded_linears
from tests.serve.tiny_chat import write_tokenizer

G32 = WeightsForm("int4", 32)
GPTQ, AWQ = Calibration("gptq"), Calibration("awq")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@contextmanager
def silent(what: str, total: int) -> Iterator[Callable[..., None]]:
    yield lambda done, note="": None


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["the quick brown fox", "jumps over", "the lazy dog", "and then", "the other thing"]
    texts = {str(i): " ".join(words[(i + j * j) % 5] for j in range(200)) for i in range(9)}
    monkeypatch.setattr(few_bits, "sources", lambda held_out: texts)
    monkeypatch.setattr(few_bits, "TEXT", 48)


def model(name: str, path: Path) -> Path:
    save_random(MODELS[name](), path)
    write_tokenizer(path)
    return path


def given(inputs: int, rows: int = 400) -> Tensor:
    """Correlated inputs of unlike sizes, one of which is always 0."""
    draw = torch.Generator().manual_seed(1)
    mixed = torch.randn(rows, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    x = mixed * torch.logspace(-1, 1, inputs)[torch.randperm(inputs, generator=draw)]
    x[:, 3] = 0
    return x


def matrix(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2))


# ---- GPTQ
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", [G32, WeightsForm("int4", 64, True), WeightsForm("int8", 32)], ids=str)
def test_gptq_is_never_above_the_nearest_levels(form: WeightsForm, act_order: bool) -> None:
    x, w = given(192), matrix(48, 192)
    hessian = x.T @ x
    errors = [row_errors(w, hessian, found.values()) for found in
              (gptq(w, hessian, form, act_order=act_order), rounded_to_nearest(w, form))]  # fmt: skip
    assert bool((errors[0] <= errors[1]).all()) and float(errors[0].sum()) < 0.7 * float(errors[1].sum())


def test_a_row_that_greedy_rounding_makes_worse_takes_its_nearest_levels() -> None:
    """Of few texts some rows end above: the fewer, the more."""
    x, w = given(64, rows=3), matrix(400, 64)
    hessian = x.T @ x
    found, plain = gptq(w, hessian, G32), rounded_to_nearest(w, G32)
    errors, nearest = row_errors(w, hessian, found.values()), row_errors(w, hessian, plain.values())
    assert bool((errors <= nearest).all())
    kept = (found.levels == plain.levels).all(1)
    assert 0 < int(kept.sum()) < len(w) and torch.equal(errors[kept], nearest[kept])


def test_gptq_without_correlations_takes_the_nearest_levels() -> None:
    w = matrix(20, 128)
    for hessian in (torch.diag(torch.rand(128) + 0.1), torch.zeros(128, 128)):
        found, plain = gptq(w, hessian, G32), rounded_to_nearest(w, G32)
        assert torch.equal(found.levels, plain.levels) and torch.equal(found.scales, plain.scales)


def test_gptq_makes_up_for_an_error_as_least_squares_does() -> None:
    """Where only the last input is free to move, what it moves by is the regression of the others' errors on it."""
    x, w = given(32), matrix(6, 32)
    hessian = (x.T @ x).double()
    damped = hessian + 0.01 * hessian.diagonal().clamp_min(0).where(hessian.diagonal() > 0, torch.ones(())).mean() * (
        torch.eye(32, dtype=torch.float64))  # fmt: skip
    damped[3, 3] += 1.0
    found = gptq(w, hessian.float(), G32)
    off = (w - found.values()).double()
    wanted = w[:, -1].double() + off[:, :-1] @ damped[:-1, -1] / damped[-1, -1]
    plain = rounded_to_nearest(w, G32)
    for row in range(6):
        if not torch.equal(found.levels[row], plain.levels[row]):
            scale = float(found.scales[row, 0])
            level = torch.round(wanted[row] / scale + 8).clamp(0, 15)
            assert int(found.levels[row, -1]) == int(level)


def test_a_first_token_far_above_all_others_neither_outweighs_them_nor_is_left_out() -> None:
    """Its output is off by no more than by nearest levels, and that of the others by less."""
    x, w = given(64) * torch.where(torch.arange(64) < 56, 1.0, 0.01), matrix(400, 64)
    first = torch.zeros(64)
    first[56:] = 1e4 * torch.randn(8, generator=torch.Generator().manual_seed(3))
    counted = LinearInputs.none(64)
    counted.add(torch.cat([first[None], x]))
    every = (rounded_to_nearest(w, G32), gptq(w, counted.hessian, G32), gptq(w, x.T @ x, G32))
    plain, found, blind = (((w - each.values()) @ first).norm() / (w @ first).norm() for each in every)
    assert found <= plain and blind > 2 * found, (plain, found, blind)
    plain, found, _ = ((x @ (w - each.values()).T).norm() for each in every)
    assert found < 0.9 * plain, (plain, found)


def test_rows_are_counted_with_at_most_four_times_the_median_length() -> None:
    x = torch.tensor([[0.0, 80.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [2.0, 0.0]])
    counted = LinearInputs.none(2)
    counted.add(x)
    assert torch.allclose(counted.hessian, torch.diag(torch.tensor([14.0, 68.0]))) and counted.rows == 5
    counted.add(torch.zeros(3, 2))  # of rows that are mostly 0, and of none, there is no length to hold to
    counted.add(torch.zeros(0, 2))
    assert counted.rows == 8 and torch.allclose(counted.size, torch.tensor([6.0, 10.0]) / 8)


# ---- AWQ
def test_awq_at_alpha_0_is_the_matrix_as_it_is() -> None:
    x, w = given(64), matrix(16, 64)
    assert torch.equal(searched(w, x.T @ x, x.abs().mean(0), G32, lambda s: s, (0.0,)), torch.ones(64))


def test_awq_is_never_above_the_nearest_levels() -> None:
    x, w = given(128), matrix(32, 128)
    hessian = x.T @ x
    scales = searched(w, hessian, x.abs().mean(0), G32, lambda s: s)
    ours = row_errors(w, hessian, rounded_to_nearest(w * scales, G32).values() / scales).sum()
    assert float(ours) < 0.9 * float(row_errors(w, hessian, rounded_to_nearest(w, G32).values()).sum())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_folded_norm_times_its_scales_is_the_norm(offset: float) -> None:
    stored = (torch.randn(64) * 0.5).bfloat16()
    stored[4] = -offset
    norm, scales = folded_norm(stored, offset, torch.rand(64) + 0.5)
    assert norm.dtype == torch.bfloat16 and float(scales[4]) == 1.0
    assert torch.allclose((norm.float() + offset) * scales, stored.float() + offset, rtol=1e-6)
    again, same = folded_norm(stored, offset, scales)
    assert torch.equal(again, norm) and torch.equal(same, scales)


# ---- conversions
@needs_kernels
@pytest.mark.parametrize("form", ["int4:group=32", "int4:group=64,zeros=true", "int8:group=32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_written_model_is_the_rounded_one(name: str, form: str, tmp_path: Path) -> None:
    base, out = model(name, tmp_path / "base"), tmp_path / "out"
    main_of(base, out, form)
    ours, theirs = Model.load(out), load_model(str(base), weights=form)
    for a, b in zip(run(ours, TOKENS), run(theirs, TOKENS), strict=True):
        assert torch.equal(a, b)
    meant = load_model(str(base), dtype=torch.float32, weights=form)
    for a, b in zip(rounded_linears(Model.load(out, dtype=torch.float32)), rounded_linears(meant), strict=True):
        assert torch.equal(a, b)


def main_of(base: Path, out: Path, form: str, *words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(base), str(out), "--weights", form, "--windows", "0", *words])
    assert not left.value.code


@pytest.mark.parametrize("name", MODELS)
def test_what_awq_folds_changes_nothing_but_what_is_rounded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales that are far from 1 logits are about as near to the model's as those of its nearest levels."""
    monkeypatch.setattr(awq.searched, "__defaults__", ((0.5,),))
    base = model(name, tmp_path / "base")
    for out, how in (("plain", Calibration()), ("out", AWQ)):
        convert(FewBitsJob(str(base), tmp_path / out, WeightsForm("int8", 32), how, tokens=200), silent)
    changed, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(changed[norm].float(), before[norm].float())
    want, plain, got = (run(Model.load(each, dtype=torch.float32), TOKENS)
                        for each in (base, tmp_path / "plain", tmp_path / "out"))  # fmt: skip
    assert 0 < float((got - want).norm()) < 2.5 * float((plain - want).norm()) < 0.3 * float(want.norm())


def test_awq_at_alpha_0_writes_the_nearest_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq.searched, "__defaults__", ((0.0,),))
    base = model("llama", tmp_path / "base")
    for out, how in (("plain", Calibration()), ("awq", AWQ)):
        convert(FewBitsJob(str(base), tmp_path / out, G32, how, tokens=200), silent)
    plain, ours = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "awq"))
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], ours[name]) for name in plain)


def handed_on_is_what_the_rounded_layer_makes(cut: FewBitsJob, whole: Path) -> None:
    """The inputs of layer 1 that were saved are those behind layer 0 as it was rounded, not as it was."""
    hidden = load_file(cut.aside / "hidden-00001.safetensors")
    saved, made = torch.cat([hidden[str(i)] for i in range(len(hidden))]), []
    for path in (Path(cut.model), whole):
        files = source(path)
        config = parse_config(files.settings())
        texts = few_bits.calibration_texts(source(cut.model), config, cut.tokens, cut.seed)
        walk = LayerWalk(config, files.tensors(), texts)
        with torch.inference_mode():
            made.append(torch.cat(walk.run(walk.next())))
    plain, rounded = ((saved - each).norm() for each in made)
    assert float(rounded) < 0.2 * float(plain)  # but for embeddings in bfloat16


@pytest.mark.parametrize("how", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_a_conversion_that_is_cut_short_goes_on_to_the_same_bits(
    how: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model("llama", tmp_path / "base")
    errors = convert(FewBitsJob(str(base), tmp_path / "whole", G32, how, tokens=200), silent)
    assert [(each.layer, each.name) for each in errors[:5]] == [(0, "qkv"), (0, "o"), (0, "gate_up"), (0, "down"),
                                                                (1, "qkv")]  # fmt: skip
    assert all(0 < each.weights < 1 and each.outputs is not None and 0 < each.outputs < 1 for each in errors)

    real, count = few_bits.save_whole, []

    def killed(path: Path, *told: Any) -> None:
        count.append(path.name)
        if count[-1].startswith("layer-00001"):
            raise KeyboardInterrupt
        real(path, *told)

    cut = FewBitsJob(str(base), tmp_path / "cut", G32, how, tokens=200)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(few_bits, "save_whole", killed)
        convert(cut, silent)
    assert not cut.out.exists() and (cut.aside / "layer-00000.safetensors").is_file()
    handed_on_is_what_the_rounded_layer_makes(cut, tmp_path / "whole")
    with pytest.raises(UserError, match=r"cut\.parts holds a conversion that was cut short: add --resume"):
        convert(cut, silent)
    with pytest.raises(UserError, match="was begun with tokens 200, not 300: resume with the same, or remove it"):
        convert(FewBitsJob(str(base), cut.out, G32, how, tokens=300, resume=True), silent)
    again = convert(FewBitsJob(str(base), cut.out, G32, how, tokens=200, resume=True), silent)
    assert again == errors and not cut.aside.exists()
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (cut.out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@needs_kernels
@pytest.mark.parametrize("name", ["gptq, inputs by activation", "mlx"])
def test_a_checkpoint_in_few_bits_is_rounded_again_and_said_to_be(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "mlx":
        test_quantised_tables.write(test_quantised_tables.CASES[name], tmp_path / "base")
    else:
        test_quantised.write(test_quantised.CASES[name], tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    convert(FewBitsJob(str(tmp_path / "base"), tmp_path / "out", G32), silent)
    assert "is in few bits already (model.layers.0.self_attn.q_proj.weight" in caplog.text
    meant = Model.load(tmp_path / "base" / "dense", dtype=torch.float32, form=G32)
    for a, b in zip(
        rounded_linears(Model.load(tmp_path / "out", dtype=torch.float32)), rounded_linears(meant), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-6)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, full = model("llama", tmp_path / "base"), tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    for words, says in (
        (["--weights", "int5"], "no form of weights is called 'int5'"),
        (["--weights", "int4:group=128"], "128 does not divide its 64 inputs; choose group=32 or 64"),
        (["--resume"], "there is nothing to resume"),
        (["--text", "notes.txt"], "--text notes.txt is for calibrate=gptq or awq"),
        (["--weights", "int4:group=32,calibrate=gptq", "--text", "/no/such/file"], "/no/such/file cannot be read"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["convert", "weights", str(base), str(tmp_path / "out"), *words])
        assert left.value.code == 2 and says in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(base), str(full)])
    assert left.value.code == 2 and "full is there already: name another folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.parts").exists()


def test_the_command_tells_errors_sizes_and_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = model("llama", tmp_path / "base"), tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(base), str(out), "--weights", "int4:group=32,calibrate=gptq", "--tokens", "512",
              "--windows", "2"])  # fmt: skip
    said = capsys.readouterr().out
    assert not left.value.code and f"Use it with --model {out}" in said
    assert "| layer | qkv | o | gate_up | down |" in said and re.search(r"\| 1 \| \d+\.\d\d% / \d+\.\d\d% \|", said)
    assert "mean abs delta log p" in said and "weights: " in said
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    assert told["format"] == "pack-quantized" and told["config_groups"]["group_0"]["weights"]["group_size"] == 32
