"""Checkpoints in few bits with low-rank pairs beside them: what they compute, in every path, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.gguf.blocks import LowRankPair
from phasewise.load import BESIDE, load_model, weight_bytes, weight_forms
from phasewise.model.lq import LQForm, LQLayer, settings
from phasewise.model.lq_kinds import decode, encode
from phasewise.model.model import Model
from phasewise.ops import native
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random
from tests.ops.test_native_tuned import STEPS, Runner, far
from tests.watched import passes

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 330}
MODELS = {
    "llama": make("LlamaConfig", **SIZES, attention_bias=True, tie_word_embeddings=True),
    "gemma2": make("Gemma2Config", **SIZES, head_dim=32, query_pre_attn_scalar=32),
    "mixtral": make("MixtralConfig", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
KINDS = {"qkv": "IQ4_NL", "o": "INT4_64", "gate_up": "INT4_32_ZEROS", "down": "Q5_0"}
RANK = 6
TOKENS = [3 + i * 37 % 60 for i in range(24)]
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def write(name: str, path: Path) -> Path:
    """A model whose pairs weigh about as much as its matrices, and beside it `dense`, with both summed by hand."""
    save_random(MODELS[name](), path)
    base = Model.load(path, dtype=torch.float32)
    stored, draw = load_file(path / "model.safetensors"), torch.Generator().manual_seed(4)
    summed, said = dict(stored), {}
    from phasewise.model.layout import layout  # the names that a layer's parts have

    for key, parts in layout(base.config).items():
        kind = KINDS.get(key.rpartition(".")[2])
        if kind is None:
            continue
        weight = torch.cat([stored.pop(part).float() for part, _ in parts])
        outputs, inputs = weight.shape
        pair = None
        if key.count(".") == 1:
            pair = LowRankPair((torch.randn(RANK, inputs, generator=draw) * inputs**-0.5).bfloat16(),
                               (torch.randn(outputs, RANK, generator=draw) * RANK**-0.5).bfloat16())  # fmt: skip
        layer = LQLayer(key, kind, [(part, shape[0]) for part, shape in parts], encode(weight, kind).raw, pair)
        stored |= {each: tensor.contiguous() for each, tensor in layer.tensors().items()}
        said[key] = (kind, [part for part, _ in parts])
        whole = decode(layer.raw.numpy(), kind)
        whole = whole if pair is None else whole + pair.up.float() @ pair.down.float()
        for (part, _), piece in zip(parts, torch.split(whole, [shape[0] for _, shape in parts])):
            summed[part] = piece.contiguous()
    config = json.loads((path / "config.json").read_text())
    (path / "dense").mkdir()
    (path / "dense" / "config.json").write_text(json.dumps(config))
    save_file({each: tensor.float() for each, tensor in summed.items()}, path / "dense" / "model.safetensors")
    config["quantization_config"] = settings(LQForm(RANK, 8.0), said)
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored, path / "model.safetensors")
    return path


@needs_kernels
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_levels_and_pairs(name: str, dtype: str | None, tmp_path: Path) -> None:
    """Those of a float model with both summed by hand, exactly in float32, and to rounding where levels stay levels."""
    want = run(Model.load(write(name, tmp_path) / "dense", dtype=torch.float32), TOKENS)
    assert torch.allclose(run(Model.load(tmp_path, dtype=torch.float32), TOKENS), want, atol=1e-4)
    ours = load_model(str(tmp_path), dtype=torch.int8 if dtype else None)
    holds_near(run(ours, TOKENS), want, 0.1 if dtype else 0.06)
    without = load_model(str(tmp_path))
    for layer in without.layers:
        assert layer.qkv.beside is not None
        layer.qkv = layer.qkv.beside.base
    assert float((run(without, TOKENS) - want).norm()) > 0.2 * float(want.norm()), "pairs matter here"


@needs_kernels
def test_what_is_held_are_blocks_and_pairs(tmp_path: Path) -> None:
    model = Model.load(write("llama", tmp_path))
    held = {part for layer in model.layers for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            for part in linear.beside.base.native.forms}  # fmt: skip
    assert held == {f"{kind}/bfloat16" for kind in KINDS.values()} and model.stack is not None
    stored = load_file(tmp_path / "model.safetensors")
    bytes_ = sum(t.numel() * (1 if t.dtype == torch.uint8 else 2) for t in stored.values())
    pairs = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("lq."))
    assert weight_forms(str(tmp_path), None)[BESIDE].nbytes == pairs > 0
    assert model.weight_bytes == weight_bytes(str(tmp_path), None) == bytes_


# ---- native steps
@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_native_steps_are_as_near_to_float32_as_the_open_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and single rows together, of which some run with adapters as well."""
    half, full = (
        Model.load(write(name, tmp_path / str(dtype)), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    layers = range(half.config.layers - 1)  # and one without adapters
    runners = [Runner(half, True, layers), Runner(half, False, layers), Runner(full, False, layers)]
    made = passes(monkeypatch)
    for rows in STEPS:
        ours, opened, wanted = (runner.step(rows) for runner in runners)
        for r, exact in wanted.items():
            assert far(ours[r], exact) < 1.5 * far(opened[r], exact) + 2e-3
    assert all(each.whole for each in made)


@needs_kernels
def test_rows_depend_on_no_mates_and_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: in company or alone, and where a step is cut into calls."""
    model = Model.load(write("llama", tmp_path))
    together, alone, cut = (Runner(model, True, range(model.config.layers)) for _ in range(3))
    for rows in STEPS:
        both, made = together.step(rows), passes(monkeypatch)
        single = {r: alone.step({r: tokens})[r] for r, tokens in rows.items()}
        with monkeypatch.context() as patch:
            patch.setattr("phasewise.step.fused.MOST", 66)
            pieces = cut.step(rows)
        assert all(each.whole for each in made)
        for r in rows:
            assert torch.equal(both[r], single[r]) and torch.equal(both[r], pieces[r])


@needs_kernels
def test_one_product_is_what_a_native_step_computes(tmp_path: Path) -> None:
    """W x is rounded to bfloat16 before the pair's product is added, whatever the number of rows."""
    linear = Model.load(write("llama", tmp_path)).layers[0].mlp.down
    assert linear.beside is not None
    x = torch.randn(70, linear.inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    add = torch.randn(70, linear.outputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = linear(x, add)
    assert all(torch.equal(linear(x[i : i + 1], add[i : i + 1])[0], whole[i]) for i in (0, 33, 69))
    meant = x.float() @ linear.beside.base.dense().float().T + add.float()
    low = (x.float() @ linear.beside.down.dense().float().T).bfloat16()
    meant = meant.bfloat16().float() + low.float() @ linear.beside.up.dense().float().T
    assert float((whole.float() - meant).norm() / meant.norm()) < 4e-3
    assert torch.allclose(linear.rows(torch.tensor([3])).float(), linear.dense()[3:4].float(), rtol=2e-2, atol=1e-2)


# ---- what is refused
def spoil(path: Path, change: dict[str, Tensor | None], said: Any = None) -> None:
    stored = load_file(path / "model.safetensors")
    for name, tensor in change.items():
        stored.pop(name)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors")
    if said is not None:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["layers"]["1.o"] = said
        (path / "config.json").write_text(json.dumps(config))


O_BLOCKS, O_DOWN, O_UP = "model.layers.1.self_attn.o_proj.weight_blocks", "lq.1.o.down", "lq.1.o.up"
LIES: list[tuple[dict[str, Tensor | None], Any, str]] = [
    ({O_UP: None}, None, r"layer 1\.o of the lq checkpoint: lq\.1\.o\.up is missing"),
    ({O_UP: torch.zeros(128, RANK + 1).bfloat16()}, None, r"down \[6, 128\] and up \[128, 7\] do not fit a matrix of"),
    ({O_DOWN: torch.zeros(RANK, 64).bfloat16()}, None, r"wanted \[r, 128\] and \[128, r\]"),
    ({O_DOWN: torch.zeros(RANK, 128)}, None, r"lq\.1\.o\.down is torch.float32 \[6, 128\], wanted a matrix of"),
    ({O_DOWN: torch.full((RANK, 128), torch.nan).bfloat16()}, None, r"lq\.1\.o\.down has numbers that are not finite"),
    ({O_BLOCKS: torch.full((128, 68), 255, dtype=torch.uint8)}, None, "has scales that are not finite"),
    ({O_BLOCKS: torch.zeros(128, 67, dtype=torch.uint8)}, None, "rows of 67 bytes, .* not whole blocks of INT4_64"),
    ({O_BLOCKS: torch.zeros(128, 34, dtype=torch.uint8)}, None, "do not fit a matrix of"),
    ({}, {"kind": "INT3", "parts": []}, r"layers: 1\.o: its kind is 'INT3'"),
    ({}, {"kind": "Q5_0", "parts": "all"}, r"layers: 1\.o: its parts must be names of matrices, got 'all'"),
    ({}, {"kind": "INT4_64", "parts": ["model.layers.9.o"]}, r"model\.layers\.9\.o_blocks is missing"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LIES)))
def test_files_that_lie_are_refused_by_name(number: int, tmp_path: Path) -> None:
    change, said, says = LIES[number]
    spoil(write("llama", tmp_path), change, said)
    with pytest.raises((WeightsError, UserError), match=says):
        Model.load(tmp_path)


def test_it_is_made_once_and_not_while_loading(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"lq is not made while a model is loaded.*convert weights MODEL OUT --weights lq"
    ):
        load_model(str(tmp_path), weights="lq:rank=4")
