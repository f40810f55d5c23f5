"""Checkpoints of learned codebooks: what they compute, in every path, what is held, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.load import load_model, weight_bytes
from phasewise.model.codebook import (
    PANEL,
    CodebookForm,
    CodebookLevels,
    packed_levels,
    settings,
    unpacked_levels,
)
from phasewise.model.levels import matrices
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.levels import KINDS
from phasewise.ops.native.weights import PackedWeights, pack_blocks
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 330}
MODELS = {
    "llama": make("LlamaConfig", **SIZES, attention_bias=True, tie_word_embeddings=True),
    "mixtral": make("MixtralConfig", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
FORM = CodebookForm(3, 64)
TOKENS = [3 + i * 37 % 60 for i in range(24)]
FORMS = [CodebookForm(bits, group) for bits in (4, 3, 2) for group in (128, 64)]
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def coded(outputs: int, inputs: int, form: CodebookForm, seed: int = 0) -> CodebookLevels:
    """A matrix about as large as a trained one, whose panels have unlike codebooks."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 1 << form.bits, (outputs, inputs), generator=draw, dtype=torch.uint8)
    books = torch.randn(-(-outputs // PANEL), 1 << form.bits, generator=draw).sort(1).values
    scales = (torch.rand(outputs, inputs // form.group, generator=draw) + 0.5) * inputs**-0.5
    return CodebookLevels(form, levels, books.bfloat16(), scales.half())


def write(name: str, path: Path, form: CodebookForm = FORM) -> Path:
    """A model in codebooks, and beside it `dense`, whose matrices were looked up by hand."""
    save_random(MODELS[name](), path)
    stored = load_file(path / "model.safetensors")
    expanded = dict(stored)
    for number, (each, (outputs, inputs)) in enumerate(matrices(Model.load(path).config).items()):
        made = coded(outputs, inputs, form, number)
        del stored[each]
        stored |= made.tensors(each)
        books = made.codebooks.float()
        rows = [books[o // PANEL][made.levels[o].long()] for o in range(outputs)]
        expanded[each] = torch.stack(rows) * made.scales.float().repeat_interleave(form.group, 1)
    config = json.loads((path / "config.json").read_text())
    (path / "dense").mkdir()
    (path / "dense" / "config.json").write_text(json.dumps(config))
    save_file({each: tensor.float() for each, tensor in expanded.items()}, path / "dense" / "model.safetensors")
    config["quantization_config"] = settings(form)
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored, path / "model.safetensors")
    return path


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_a_stream_of_bits(bits: int) -> None:
    """The first in the lowest bits of the first byte, as one number with that many digits."""
    levels = coded(3, 64, CodebookForm(bits, 64)).levels
    packed = packed_levels(levels, bits)
    for row, raw in zip(levels.tolist(), packed):
        whole = int.from_bytes(bytes(raw.tolist()), "little")
        assert whole == sum(level << (bits * i) for i, level in enumerate(row))
    assert packed.shape == (3, 8 * bits) and torch.equal(unpacked_levels(packed, bits), levels)


@needs_kernels
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_read_what_is_written(form: CodebookForm, tmp_path: Path) -> None:
    """Every value of a matrix whose last panel is not full, packed in slices of rows; its size is what is claimed."""
    made = coded(131, 256, form)
    save_file(made.tensors("m"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings(form)}))
    from phasewise.model.directory import Directory

    tensors = Directory(tmp_path).tensors()
    stored = tensors.blocks("m")
    assert stored is not None and stored.kind == form.kind
    part = pack_blocks(stored.raw, f"{form.kind}/bfloat16", None, stored.done)
    layer = PackedWeights.of([part], None)
    assert torch.equal(layer.dense(), made.values().bfloat16())
    assert torch.equal(tensors.read("m", torch.float32), made.values())
    assert layer.nbytes == stored.raw.nbytes == sum(each.nbytes for each in made.tensors("m").values())
    size = 131 * 256 * (form.bits + 16 / form.group) / 8 + 3 * 2 * (1 << form.bits)
    assert layer.nbytes == size and KINDS[form.kind].codebook == 1 << form.bits
    some = stored.raw[64:131]
    assert some.dtype == np.uint8 and some.shape == (67, stored.raw.shape[1])
    assert np.array_equal(some, stored.raw[:][64:])


@needs_kernels
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_values_looked_up_by_hand(name: str, dtype: str | None, tmp_path: Path) -> None:
    """Exactly in float32, and to rounding where levels stay levels. No dense matrix of a layer is in memory then."""
    want = run(Model.load(write(name, tmp_path) / "dense", dtype=torch.float32), TOKENS)
    assert torch.allclose(run(Model.load(tmp_path, dtype=torch.float32), TOKENS), want, atol=1e-4)
    ours = load_model(str(tmp_path), dtype=torch.int8 if dtype else None)
    holds_near(run(ours, TOKENS), want, 0.1 if dtype else 0.06)
    stored = load_file(tmp_path / "model.safetensors")
    half = sum(t.numel() * (1 if t.dtype == torch.uint8 else 2) for t in stored.values())
    assert dtype or weight_bytes(str(tmp_path), None) == ours.weight_bytes == half
    if name == "llama":
        held = {part for layer in ours.layers for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
                for part in linear.native.forms}  # fmt: skip
        assert held == {f"{FORM.kind}/{dtype or 'bfloat16'}"} and ours.stack is not None


def test_without_kernels_it_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(Model.load(write("llama", tmp_path) / "dense", dtype=torch.float32), TOKENS)
    for where in ("phasewise.ops.native", "phasewise.ops.native.weights", "phasewise.ops.linear"):
        monkeypatch.setattr(f"{where}.library", lambda: None, raising=False)
    holds_near(run(Model.load(tmp_path), TOKENS), want, 0.06)


# ---- what is refused
O = "model.layers.1.self_attn.o_proj.weight"
CODES, SCALES, BOOKS = (f"{O}_{part}" for part in ("codes", "scales", "codebooks"))
LIES: list[tuple[dict[str, Tensor | None], dict[str, Any], str]] = [
    ({SCALES: None}, {}, r"o_proj\.weight of the codebook checkpoint: _scales is missing"),
    ({BOOKS: None}, {}, r"o_proj\.weight of the codebook checkpoint: _codebooks is missing"),
    ({CODES: torch.zeros(128, 47, dtype=torch.uint8)}, {}, r"_codes has rows of 47 bytes, .* groups of 64 levels of 3"),
    ({CODES: torch.zeros(128, 0, dtype=torch.uint8)}, {}, "_codes has rows of 0 bytes"),
    ({CODES: torch.zeros(128, 48, dtype=torch.int8)}, {}, r"_codes is torch\.int8 \[128, 48\], wanted a matrix of"),
    ({CODES: torch.zeros(64, 48, dtype=torch.uint8)}, {}, r"_scales has the shape \[128, 2\], and _codes \[64, 48\]"),
    ({SCALES: torch.zeros(128, 1).half()}, {}, r"_scales has the shape \[128, 1\], .* asks for \[128, 2\]"),
    ({SCALES: torch.zeros(128, 2)}, {}, r"_scales is torch\.float32"),
    ({SCALES: torch.full((128, 2), torch.inf).half()}, {}, "_scales has numbers that are not finite"),
    ({BOOKS: torch.zeros(1, 8).bfloat16()}, {}, r"_codebooks has the shape \[1, 8\], .* asks for \[2, 8\]"),
    ({BOOKS: torch.zeros(2, 16).bfloat16()}, {}, r"_codebooks has the shape \[2, 16\], .* asks for \[2, 8\]"),
    ({BOOKS: torch.full((2, 8), torch.nan).bfloat16()}, {}, "_codebooks has values that are no numbers, or above 65"),
    ({BOOKS: torch.full((2, 8), -1e30).bfloat16()}, {}, "_codebooks has values that are no numbers, or above 65,504"),
    ({}, {"bits": 5}, "bits is 5; 2 or 3 or 4 is read"),
    ({}, {"bits": True}, "bits is True; 2 or 3 or 4 is read"),
    ({}, {"group": "64"}, "group is '64'; 64 or 128 is read"),
    ({}, {"group": 128}, "which are not whole groups|asks for"),
    ({}, {"bits": 4}, "which are not whole groups|asks for"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LIES)))
def test_files_that_lie_are_refused_by_name(number: int, tmp_path: Path) -> None:
    """Before anything is packed. A level out of range cannot be written, as all of its bits are a level's."""
    change, said, says = LIES[number]
    path = write("llama", tmp_path)
    stored = load_file(path / "model.safetensors")
    for name, tensor in change.items():
        stored.pop(name)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= said
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises((WeightsError, UserError), match=says):
        Model.load(tmp_path)


def test_a_checkpoint_without_codes_is_none(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    dense = load_file(path / "dense" / "model.safetensors")
    save_file(dense, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"config.json says that it is quantised, and no tensor is .*\*_codes"):
        Model.load(tmp_path)


def test_it_is_made_once_and_not_while_loading(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="codebook is not made while a model is loaded.*--weights codebook"):
        load_model(str(tmp_path), weights="codebook:bits=3")
