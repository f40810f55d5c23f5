"""Learned codebooks: k-means and learning, the order of neurons, and conversions that go on to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.load import load_model, weight_bytes
from phasewise.model.codebook import CODEBOOKS, CODES, SCALES, CodebookForm, parse_codebook
from phasewise.model.layout import layout
from phasewise.model.levels import matrices
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.train import codebook, codebook_job, few_bits, neuron_order
from phasewise.train.codebook import CodebookState, learned, looked_up, output_errors, per_panel, searched, started
from phasewise.train.codebook_job import CodebookJob, convert
from tests.model.families import make
from tests.model.reference import run, save_random
from tests.serve.tiny_chat import write_tokenizer
from tests.train.test_few_bits import silent

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 330,
                         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}  # fmt: skip
MODELS = {
    "llama": make("LlamaConfig", **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mixtral": make("MixtralConfig", **SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
}
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["the quick brown fox", "jumps over", "the lazy dog", "and then", "the other thing"]
    texts = {str(i): " ".join(words[(i + j * j) % 5] for j in range(200)) for i in range(9)}
    monkeypatch.setattr(few_bits, "sources", lambda held_out: texts)
    monkeypatch.setattr(few_bits, "TEXT", 48)


def model(path: Path, name: str = "llama", few: int = 0) -> Path:
    """A random model; `few`: each matrix of its layers has only so many different weights."""
    save_random(MODELS[name](), path)
    write_tokenizer(path)
    stored = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    values = (torch.randn(few, generator=draw) * 0.1).bfloat16().float()
    for each in matrices(Model.load(path).config) if few else ():
        stored[each] = values[torch.randint(0, few, stored[each].shape, generator=draw)]
    for each in [each for each in stored if each.endswith("bias")]:
        stored[each] = torch.randn(stored[each].shape, generator=draw)
    save_file({each: tensor.bfloat16().float() for each, tensor in stored.items()}, path / "model.safetensors")
    return path


def matrix(outputs: int = 100, inputs: int = 256) -> tuple[Tensor, Tensor]:
    """Weights whose rows are of unlike sizes, and the Hessian of inputs that hang together."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=draw) * torch.logspace(-1, 1, outputs)[:, None]
    mixed = torch.randn(inputs, inputs, generator=draw) * 0.1 + torch.eye(inputs) * torch.logspace(-1, 0.5, inputs)
    x = torch.randn(2000, inputs, generator=draw) @ mixed
    return weight, x.T @ x


def errors(weight: Tensor, hessian: Tensor, made: CodebookState) -> float:
    return float(output_errors(weight, hessian, made.values()).sum())


# ---- one matrix
@pytest.mark.parametrize("learn", [0, 3])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_as_many_different_weights_as_values_are_kept_exactly(bits: int, learn: int) -> None:
    """Each panel of 64 outputs may have others; one has fewer."""
    draw = torch.Generator().manual_seed(bits)
    values = torch.randn(3, 1 << bits, generator=draw).bfloat16().float()
    values[2, 1:] = values[2, 0]
    rows = values[torch.arange(150) // 64]
    weight = rows.gather(1, torch.randint(0, 1 << bits, (150, 256), generator=draw))
    found = learned(weight, matrix()[1], CodebookForm(bits, 128, learn=learn)).coded
    assert torch.equal(found.values(), weight) and found.codebooks.shape == (3, 1 << bits)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_learning_lowers_errors_of_every_panel(bits: int) -> None:
    """Those over the calibration texts, and by much; what is stored is what was judged."""
    weight, hessian = matrix()
    found = learned(weight, hessian, CodebookForm(bits, 64))
    now, then = (per_panel(output_errors(weight, hessian, each.values())) for each in (found.coded, found.before))
    assert (now < 0.75 * then).all()
    assert found.coded.codebooks.dtype == torch.bfloat16 and found.coded.scales.dtype == torch.float16
    plain = learned(weight, hessian, CodebookForm(bits, 64, learn=0))
    assert all(torch.equal(a, b) for a, b in zip(plain.coded[1:], found.before[1:]))


def test_codebooks_are_better_than_even_levels() -> None:
    """At the same size, before learning and after it. Even levels stay even while they learn."""
    weight, hessian = matrix()
    for learn in (0, 4):
        form = CodebookForm(3, 128, learn=learn)
        ours, even = (learned(weight, hessian, form, start).coded for start in ("kmeans", "uniform"))
        assert output_errors(weight, hessian, ours.values()).sum() < output_errors(weight, hessian, even.values()).sum()
        assert torch.equal(even.codebooks, codebook.uniform(form).bfloat16().expand(2, -1))


def test_a_panel_that_learning_would_make_worse_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that spoils the second panel: that one keeps what it had by k-means."""
    weight, hessian = matrix(128)

    def spoils(weight: Tensor, hessian: Tensor, made: CodebookState) -> CodebookState:
        levels = made.levels.clone()
        levels[64:] = 0
        return made._replace(levels=levels)

    monkeypatch.setattr(codebook, "searched", spoils)
    found = learned(weight, hessian, CodebookForm(3, 128, learn=2))
    assert torch.equal(found.coded.values()[64:], found.before.values()[64:])
    assert not torch.equal(found.coded.values()[:64], found.before.values()[:64])


def test_a_search_is_that_of_one_input_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written a second time, with the error of all outputs computed anew for both neighbours of every level."""
    weight, hessian = (each.double() for each in matrix(12, 128))
    form = CodebookForm(2, 128)
    made = started(weight.float(), hessian.diagonal().float(), form)
    made = made._replace(codebooks=made.codebooks.double(), scales=made.scales.double())
    monkeypatch.setattr(codebook, "SWEEP", 16)
    found, levels = searched(weight, hessian, made), made.levels.clone()

    def off(levels: Tensor) -> Tensor:
        return output_errors(weight, hessian, looked_up(made.codebooks, levels) * made.wide_scales())

    for i in range(128):
        best, least = levels.clone(), off(levels)
        for step in (-1, 1):
            tried = levels.clone()
            tried[:, i] = (levels[:, i] + step).clamp(0, 3)
            now = off(tried)
            best[:, i] = torch.where(now < least - 1e-9, tried[:, i], best[:, i])
            least = torch.minimum(now, least)
        levels = best
    assert torch.equal(found.levels, levels) and not torch.equal(levels, made.levels)
    assert (found.levels - made.levels).abs().max() == 1
    assert errors(weight, hessian, found) < errors(weight, hessian, made)


def test_steps_go_against_gradients_and_lower_errors() -> None:
    """The gradient by values and scales is autograd's; a step of either is shorter or longer, as is best, in this
    direction scaled by the curvature."""
    weight, hessian = matrix()
    made = started(weight, hessian.diagonal(), CodebookForm(3, 128))
    books, scales = made.codebooks.clone().requires_grad_(), made.scales.clone().requires_grad_()
    off = looked_up(books, made.levels) * scales.repeat_interleave(128, 1) - weight
    ((off @ hessian) * off).sum().backward()
    slope, wide = codebook._slope(weight, hessian, made), made.wide_scales()
    by_value = codebook._by_level(made, slope * wide)
    by_scale = (slope * made.unscaled).reshape(*made.scales.shape, 128).sum(2)
    for grad, own in ((books.grad, by_value), (scales.grad, by_scale)):
        assert grad is not None and torch.allclose(grad / 2, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))
    before = errors(weight, hessian, made)
    for step in (codebook._book_step, codebook._scale_step):
        moved = step(weight, hessian, made)
        assert errors(weight, hessian, moved) < 0.9998 * before
        assert (moved.codebooks.diff(dim=1) >= 0).all()


def test_numbers_that_are_not_finite_are_refused() -> None:
    weight, hessian = matrix()
    weight[3, 4] = torch.nan
    with pytest.raises(UserError, match="not finite, which no codebook stands for"):
        learned(weight, hessian, CodebookForm(3, 128))


# ---- the order of neurons
def test_alike_neurons_become_neighbours() -> None:
    """Of two kinds that were mixed the ones come before the others, in either matrix; nothing is lost."""
    draw = torch.Generator().manual_seed(5)
    wide = torch.arange(128) % 2 == 0
    flat, pointed = torch.rand(128, 512, generator=draw) - 0.5, torch.randn(128, 512, generator=draw) ** 3
    rows = torch.where(wide[:, None], flat, pointed)
    order = neuron_order.alike([rows * torch.rand(128, 1, generator=draw), rows])
    assert torch.equal(order.sort().values, torch.arange(128))
    assert wide[order][:64].unique().numel() == wide[order][64:].unique().numel() == 1
    found = neuron_order.NeuronOrder({"a": order}, {"b": order})
    back = neuron_order.NeuronOrder({"a": order.argsort()}, {"b": order.argsort()})
    assert torch.equal(back.weight("a", found.weight("a", rows)), rows)
    assert torch.equal(back.weight("b", found.weight("b", rows.T)), rows.T)


@pytest.mark.parametrize("name", MODELS)
def test_an_order_folds_away(name: str, tmp_path: Path) -> None:
    """A model that codebooks hold exactly computes the same once its neurons are reordered, to the rounding of sums:
    those of MLPs and experts, and the values within a head. Biases go along. Putting rows and columns back gives the
    old matrices, bit for bit."""
    base = model(tmp_path / "base", name, few=16)
    convert(CodebookJob(str(base), tmp_path / "out", CodebookForm(4, 128, reorder=True), tokens=300), silent)
    before, after = (Model.load(path, dtype=torch.float32) for path in (base, tmp_path / "out"))
    tokens = [3 + i * 37 % 60 for i in range(24)]
    assert torch.allclose(run(after, tokens), run(before, tokens), atol=2e-4, rtol=1e-4)
    stored, moved = load_file(base / "model.safetensors"), Model.load(tmp_path / "out", dtype=torch.float32)
    names = {part: key for key, parts in layout(before.config).items() for part, _ in parts}
    key, mlp = ("1.down" if name == "llama" else "1.expert.0.down"), moved.layers[1].mlp
    down = next(each for each in stored if names.get(each) == key)
    new = (mlp if name == "llama" else mlp.experts[0]).down  # type: ignore[union-attr]
    columns = sorted(map(tuple, stored[down].T.tolist()))
    assert sorted(map(tuple, new.dense().T.tolist())) == columns and not torch.equal(new.dense(), stored[down])


# ---- conversions
FORM = CodebookForm(3, 128, reorder=True, learn=2)


def test_a_conversion_that_is_cut_short_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(model(tmp_path / "base"))
    whole = convert(CodebookJob(base, tmp_path / "whole", FORM, tokens=300), silent)
    assert [(each.layer, each.name) for each in whole.errors[:5]] == [(0, "qkv"), (0, "o"), (0, "gate_up"),
                                                                      (0, "down"), (1, "qkv")]  # fmt: skip
    assert all(each.outputs is not None and each.outputs <= then for each, then in zip(whole.errors, whole.before))
    assert 0 < whole.less < 1
    job, real, count = CodebookJob(base, tmp_path / "cut", FORM, tokens=300), codebook_job._Run._layer, []

    def dies(self: Any, *told: Any) -> Any:
        count.append(told)
        if len(count) == 2:
            raise KeyboardInterrupt
        return real(self, *told)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(codebook_job._Run, "_layer", dies)
        convert(job, silent)
    assert not job.out.exists()
    with pytest.raises(UserError, match=r"cut\.parts holds a conversion that was cut short: add --resume"):
        convert(job, silent)
    with pytest.raises(UserError, match="was begun with tokens 300, not 400: resume with the same, or remove it"):
        convert(CodebookJob(base, job.out, FORM, tokens=400, resume=True), silent)
    again = convert(CodebookJob(**{**vars(job), "resume": True}), silent)
    assert again == whole and not job.aside.exists()
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (job.out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    with pytest.raises(UserError, match="is there already: name another folder"):
        convert(job, silent)
    with pytest.raises(UserError, match="there is nothing to resume"):
        convert(CodebookJob(base, tmp_path / "new", FORM, tokens=300, resume=True), silent)


@needs_kernels
def test_the_command_tells_bits_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = model(tmp_path / "base"), tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(base), str(out), "--weights", "codebook:bits=2,learn=1", "--tokens", "512",
              "--windows", "0"])  # fmt: skip
    assert not left.value.code
    told = capsys.readouterr().out
    assert "bits a weight with scales and codebooks" in told and "below those of k-means alone" in told
    stored = load_file(out / "model.safetensors")
    bytes_ = sum(each.nbytes for name, each in stored.items() if name.endswith((CODES, SCALES, CODEBOOKS)))
    sizes = matrices(Model.load(base).config).values()
    count = sum(outputs * inputs for outputs, inputs in sizes)
    claimed = sum(o * i * (2 + 16 / 128) + -(-o // 64) * 4 * 16 for o, i in sizes) / 8
    assert bytes_ == claimed and f"{8 * bytes_ / count:.3f} bits" in told
    held = load_model(str(out)).weight_bytes
    assert held == weight_bytes(str(out), None) == bytes_ + weight_bytes(str(base), "bfloat16") - count * 2
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "codebook" and (said["bits"], said["group"]) == (2, 128)


WRONG = [
    ("codebook:bts=4", "codebook has no knob 'bts'. Did you mean bits"),
    ("codebook:bits=5", "bits=5 has no kernel: choose 2 or 3 or 4"),
    ("codebook:group=32", "group=32 has no kernel: choose 64 or 128"),
    ("codebook:learn=-1", "learn=-1 is below 0"),
    ("codebook:reorder=maybe", "reorder='maybe'"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_written_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_codebook(text)


def test_a_form_that_does_not_fit_is_named_before_anything_is_written(tmp_path: Path) -> None:
    assert parse_codebook("int4:group=64") is None and parse_codebook(str(FORM)) == FORM
    save_random(make("LlamaConfig", **{**SIZES, "intermediate_size": 192})(), tmp_path / "base")
    with pytest.raises(UserError, match=r"128 does not divide its 192 inputs; choose group=64"):
        convert(CodebookJob(str(tmp_path / "base"), tmp_path / "out", FORM), silent)
    assert not (tmp_path / "out.parts").exists()
