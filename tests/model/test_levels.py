"""Matrices in few bits: the nearest levels by brute force, blocks as kernels read them, models that are rounded as they
are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.load import load_model, weight_bytes
from phasewise.model.compressed import packed, unpacked
from phasewise.model.levels import Levels, rounded_to_nearest
from phasewise.model.mlp import MLP
from phasewise.model.model import Layer, Model
from phasewise.model.weights_form import WeightsForm, loaded_form, parse_form
from phasewise.ops import native
from phasewise.ops.native.weights import PackedWeights, pack_blocks
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random
from tests.tiny import write_checkpoint

FORMS = [WeightsForm("int4", 32), WeightsForm("int4", 64, True), WeightsForm("int4", 128), WeightsForm("int4", 96),
         WeightsForm("int8", 64)]  # fmt: skip
TOKENS = [3 + i * 37 % 60 for i in range(24)]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 330}
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def weight(outputs: int = 70, inputs: int = 384) -> Tensor:
    """Groups of unlike sizes, one of zeros, and one whose numbers are all above 0."""
    drawn = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    drawn *= torch.logspace(-7, 1, outputs)[:, None]
    drawn[5] = 0
    drawn[6] = drawn[6].abs() + 0.5
    return drawn


def in_groups(found: Levels, x: Tensor) -> Tensor:
    return x.reshape(*found.scales.shape, found.form.group)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_other_level_is_nearer(form: WeightsForm) -> None:
    w = weight()
    found = rounded_to_nearest(w, form)
    every = torch.arange(1 << form.bits)
    zeros = torch.full_like(found.scales, form.middle, dtype=torch.float32) if found.zeros is None else found.zeros
    grid = (every - zeros.double()[..., None]) * found.scales.double()[..., None]  # [out, groups, levels]
    wide, off = in_groups(found, w.double()), in_groups(found, (w - found.values()).double().abs())
    best = torch.stack([(wide - grid[..., i : i + 1]).abs() for i in range(len(every))]).amin(0)
    assert bool((off <= best * (1 + 1e-5) + 1e-12).all())
    large = found.scales > 2.0**-14  # below, float16 has fewer bits
    worst = (off.amax(-1) / found.scales.double())[large]
    most = 15 if form.zeros else form.middle
    assert bool((worst <= 0.5 + most * 2.0**-8).all()), "extremes are levels, but for how scales are rounded"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_are_exact_wherever_they_are_stored(form: WeightsForm) -> None:
    found = rounded_to_nearest(weight(), form)
    scales = found.scales.float()
    assert torch.equal(found.scales.bfloat16().float(), scales) and bool((scales >= 0).all())
    if found.zeros is not None:
        minima = scales * found.zeros.float()
        assert torch.equal(minima.half().float(), minima)


@needs_kernels
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_are_what_kernels_read(form: WeightsForm) -> None:
    found = rounded_to_nearest(weight(), form)
    layer = PackedWeights.of([pack_blocks(found.blocks(), f"{form.kind}/bfloat16")], None)
    assert torch.equal(layer.dense(), found.values().bfloat16())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_words_come_back(form: WeightsForm) -> None:
    found = rounded_to_nearest(weight(), form)
    again = unpacked("w", packed("w", found), form)
    assert torch.equal(again.levels, found.levels) and torch.equal(again.scales, found.scales)
    assert (again.zeros is None) == (found.zeros is None) == (not form.zeros)
    assert again.zeros is None or torch.equal(again.zeros, found.zeros)


def test_words_are_as_the_layout_says() -> None:
    found = rounded_to_nearest(weight(16, 64), WeightsForm("int4", 32, True))
    made = packed("w", found)
    assert found.zeros is not None
    for o, i in ((0, 0), (3, 9), (15, 63)):
        assert int(made["w_packed"][o, i // 8]) >> i % 8 * 4 & 15 == int(found.levels[o, i])
        assert int(made["w_zero_point"][o // 8, i // 32]) >> o % 8 * 4 & 15 == int(found.zeros[o, i // 32])
    assert made["w_shape"].tolist() == [16, 64] and made["w_scale"].dtype == torch.bfloat16


WRONG = [
    ("int3", "no form of weights is called 'int3'. Did you mean .*Valid: int4, int8"),
    ("int4:group=48", "group=48 is no multiple of 32"),
    ("int4:group=0", "group=0 is no multiple"),
    ("int4:group=many", "group='many' is not a valid int"),
    ("int4:size=64", "int4 has no knob 'size'. .*Valid: act_order, calibrate, group, zeros"),
    ("int4:calibrate=gptk", "calibrate='gptk': choose one of rtn, gptq, awq"),
    ("int4:zeros=perhaps", "zeros='perhaps' is not a truth value"),
    ("int8:zeros=true", "zeros are for int4"),
    ("int4:act_order=true", "act_order is GPTQ's"),
    ("int4:calibrate=awq,act_order=true", "act_order is GPTQ's"),
    ("int4:group=64,group=32", "another knob"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_written_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_form(text)


def test_what_is_written_is_meant() -> None:
    form, how = parse_form("int4:group=128,zeros=true,calibrate=gptq,act_order=yes")
    assert (form, how.calibrate, how.act_order) == (WeightsForm("int4", 128, True), "gptq", True)
    assert parse_form("int4")[0] == WeightsForm("int4", 64) and loaded_form(None) is None
    assert all(parse_form(str(each))[0] == each for each in FORMS)
    with pytest.raises(UserError, match="phasewise convert weights MODEL OUT --weights int4:calibrate=gptq"):
        loaded_form("int4:calibrate=gptq")


# ---- models
def rounded_linears(model: Model) -> list[Tensor]:
    """The linear layers of all layers, but for routers."""
    found = []
    for layer in model.layers:
        mlps = [layer.mlp] if isinstance(layer.mlp, MLP) else list(layer.mlp.experts)
        found += [layer.qkv.dense(), layer.o.dense()]
        found += [linear.dense() for mlp in mlps for linear in (mlp.gate_up, mlp.down)]
    return found


MODELS = {
    "llama": make("LlamaConfig", **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mixtral": make("MixtralConfig", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "phi3": make("Phi3Config", **SIZES),
    "gemma3": make("Gemma3TextConfig", **SIZES, head_dim=16, sliding_window=5, query_pre_attn_scalar=20),
}


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_rounded_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    """Levels stay levels; float32 has exactly their numbers; all else is as it was."""
    save_random(MODELS[name](), tmp_path)
    form = WeightsForm("int4", 32, zeros=name == "phi3")
    plain = Model.load(tmp_path, dtype=torch.float32)
    exact = Model.load(tmp_path, dtype=torch.float32, form=form)
    for a, b in zip(rounded_linears(exact), rounded_linears(plain), strict=True):
        assert torch.equal(a, rounded_to_nearest(b, form).values())
    model = load_model(str(tmp_path), weights=str(form))
    assert model.dtype == torch.bfloat16 and model.stack is not None
    for a, b in zip(rounded_linears(model), rounded_linears(exact), strict=True):
        assert torch.equal(a, b.bfloat16())
    native_parts = [linear.native for layer in model.layers for linear in linears_of(layer)]
    assert {part for each in native_parts if each for part in each.forms} == {f"{form.kind}/bfloat16"}
    assert torch.equal(model.embed(torch.tensor(TOKENS)), plain.embed(torch.tensor(TOKENS)).bfloat16())
    assert abs(weight_bytes(str(tmp_path), None, str(form)) - model.weight_bytes) < 2**12
    holds_near(run(model, TOKENS), run(exact, TOKENS), 0.06)


def linears_of(layer: Layer) -> list[Any]:
    mlps = [layer.mlp] if isinstance(layer.mlp, MLP) else list(layer.mlp.experts)
    return [layer.qkv, layer.o, *(linear for mlp in mlps for linear in (mlp.gate_up, mlp.down))]


def test_groups_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, hidden=64)
    with pytest.raises(UserError, match=r"int4:group=128 does not fit .*q_proj.weight: 128 does not divide its 64 "
                                        "inputs; choose group=32 or 64"):  # fmt: skip
        load_model(str(tmp_path), weights="int4:group=128")
    write_checkpoint(tmp_path / "odd", layers=1, hidden=48)
    with pytest.raises(UserError, match="no group does: its matrices stay as they are"):
        load_model(str(tmp_path / "odd"), weights="int4")


def test_numbers_that_are_not_finite_are_refused() -> None:
    spoilt = weight()[:4, :64]
    spoilt[2, 7] = float("nan")
    with pytest.raises(UserError, match=r"layers\.3\.o_proj has numbers that are not finite"):
        rounded_to_nearest(spoilt, WeightsForm(), "layers.3.o_proj")


PROBE = """
import sys
from pathlib import Path
from phasewise.load import load_model

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

load_model(sys.argv[1], weights="int4:group=64")  # a first one leaves what any does
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
model = load_model(sys.argv[2], weights="int4:group=64")
print(status("VmRSS") - before, status("VmHWM") - status("VmRSS"), model.weight_bytes)
"""


@needs_kernels
@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_model_is_never_dense_while_it_is_rounded(tmp_path: Path) -> None:
    """Of a checkpoint of 240 MB in float32: what stays, and what loading takes beyond that."""
    small = write_checkpoint(tmp_path / "small", layers=1, hidden=64)
    large = write_checkpoint(tmp_path / "large", layers=6, hidden=1024, vocab=64)
    done = subprocess.run([sys.executable, "-c", PROBE, small, large], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stays, beyond, told = map(int, done.stdout.split())
    assert 28e6 < told < 34e6 and stays <= told + 20e6, f"{stays:,} bytes for {told:,}"
    assert beyond <= 40e6, f"{beyond:,} bytes at most beside what stays"
