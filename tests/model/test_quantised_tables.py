"""Checkpoints in tables of sixteen values and in MLX's form, made here by their layouts from random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import UnsupportedModel, UserError
from phasewise.load import weight_bytes
from phasewise.model.model import Model
from phasewise.ops import native
from tests.gguf.test_kept_forms import linears
from tests.model.reference import holds_near, run
from tests.model.test_quantised import CONFIG, HIDDEN, LAYERS, SHAPES, VOCAB, save

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                    0.7229568362236023, 1.0])  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, and what its settings say beside its name. `kept`: whether matrices stay as small as they are."""

    layout: str
    kept: bool = False
    size: int = 64  # of a block
    nested: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        if self.layout == "mlx":
            return {"group_size": self.size, "bits": 4, "mode": "affine", **self.said}
        if self.layout in ("nf4", "fp4"):
            return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": self.layout,
                    "bnb_4bit_use_double_quant": self.nested, **self.said}  # fmt: skip
        tall = {"strategy": "tensor_group" if self.layout.startswith("nv") else "group", "group_size": self.size}
        weights = {"num_bits": 4, "type": "float", "symmetric": True, **tall}
        return {"quant_method": "compressed-tensors", "format": self.layout, **self.said,
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


CASES = {
    "mxfp4": Case("mxfp4-pack-quantized", True, 32),
    "nvfp4": Case("nvfp4-pack-quantized", True, size=16),
    "nf4": Case("nf4", True),
    "nf4, nested": Case("nf4", True, nested=True),
    "nf4, blocks across rows": Case("nf4", True, size=4096),
    "nf4, blocks of no kernel": Case("nf4", size=32),
    "fp4": Case("fp4", True),
    "mlx": Case("mlx", True),
    "mlx, short groups": Case("mlx", True, 32),
}


def module(case: Case, name: str, draw: torch.Generator, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix's tensors by their names, and what they stand for, float32 [out, in]."""
    levels = torch.randint(0, 16, (outputs, inputs), generator=draw)
    worth = 1.5 / inputs**0.5

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw) + 0.5

    if case.layout == "mlx":
        shape = (outputs, inputs // case.size)
        scales = (uniform(*shape) * worth / 8 * torch.where(torch.rand(shape, generator=draw) < 0.2, -1, 1)).bfloat16()
        biases = (-8 * scales.float() * uniform(*shape)).bfloat16()
        words = (levels.reshape(outputs, -1, 8) << torch.arange(8) * 4).sum(-1)
        made = {"weight": words.to(torch.uint32), "scales": scales, "biases": biases}
        wide = [each.float().repeat_interleave(case.size, 1) for each in (scales, biases)]
        return {f"{name}.{part}": each for part, each in made.items()}, levels * wide[0] + wide[1]
    if case.layout in ("nf4", "fp4"):
        return blocks_of_64(case, name, draw, levels, worth)
    made = {"weight_packed": (levels[:, ::2] | levels[:, 1::2] << 4).to(torch.uint8)}
    if case.layout.startswith("mx"):
        powers = torch.randint(120, 126, (outputs, inputs // 32), generator=draw)
        made["weight_scale"] = powers.to(torch.uint8)
        scales = 2.0 ** (powers - 127.0)
    else:
        made["weight_scale"] = (uniform(outputs, inputs // 16) * 100).to(torch.float8_e4m3fn)
        made["weight_global_scale"] = torch.tensor([700.0 * inputs**0.5])
        scales = made["weight_scale"].float() / made["weight_global_scale"]
    dense = E2M1[levels] * scales.repeat_interleave(case.size, 1)
    return {f"{name}.{part}": each for part, each in made.items()}, dense


def blocks_of_64(case: Case, name: str, draw: torch.Generator, levels: Tensor, worth: float) \
        -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """As bitsandbytes has them: flat, the first of two levels high, sizes as JSON."""
    flat, table = levels.flatten(), NF4 if case.layout == "nf4" else E2M1 / 6
    count = -(-len(flat) // case.size)
    state: dict[str, Any] = {"quant_type": case.layout, "blocksize": case.size, "dtype": "bfloat16",
                             "shape": list(levels.shape)}  # fmt: skip
    made = {"weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table.clone()}
    if case.nested:
        inner = torch.randint(0, 256, (count,), generator=draw)
        made["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        made["weight.nested_absmax"] = torch.rand(-(-count // 256), generator=draw) * worth / 2
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": worth}
        outer = made["weight.nested_absmax"][torch.arange(count) // 256]
        scales = made["weight.nested_quant_map"][inner] * outer + worth
        made["weight.absmax"] = inner.to(torch.uint8)
    else:
        scales = made["weight.absmax"] = (torch.rand(count, generator=draw) + 0.5) * worth
    said = json.dumps(state).encode()
    made[f"weight.quant_state.bitsandbytes__{case.layout}"] = torch.tensor(list(said), dtype=torch.uint8)
    dense = (table[flat] * scales.repeat_interleave(case.size)[: len(flat)]).reshape(levels.shape)
    return {f"{name}.{part}": each for part, each in made.items()}, dense


def write(case: Case, path: Path) -> dict[str, Tensor]:
    """A quantised checkpoint in `path`, and the same in float32 in `path`/dense. -> the first one's tensors"""
    draw = torch.Generator().manual_seed(5)
    ours: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    matrices = {f"model.layers.{i}.{name}": shape[:2] for i in range(LAYERS) for name, shape in SHAPES.items()}
    if case.layout == "mlx":
        matrices |= {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for name, shape in matrices.items():
        made, dense[f"{name}.weight"] = module(case, name, draw, *shape)
        ours |= made
    plain = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN),
             "model.norm.weight": (HIDDEN,)}  # fmt: skip
    for i in range(LAYERS):
        plain |= {f"model.layers.{i}.{norm}.weight": (HIDDEN,)
                  for norm in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    for name, size in plain.items():
        if name not in dense:
            ours[name] = (torch.rand(size, generator=draw) + (0.5 if len(size) == 1 else -0.5)).bfloat16()
            dense[name] = ours[name].float()
    key = "quantization" if case.layout == "mlx" else "quantization_config"
    save(path, ours, CONFIG | {"torch_dtype": "bfloat16", key: case.settings})
    save(path / "dense", dense, CONFIG)
    return ours


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_what_its_numbers_are(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    size = sum(tensor.nbytes for tensor in write(case, tmp_path).values())
    exact, tokens = Model.load(tmp_path / "dense"), [3 + i * 37 % 90 for i in range(40)]
    for a, b in zip(linears(Model.load(tmp_path, dtype=torch.float32)), linears(exact), strict=True):
        assert torch.equal(a, b) or torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    model = Model.load(tmp_path)
    assert model.dtype == torch.bfloat16 and model.stack is not None
    for a, b in zip(linears(model), linears(exact), strict=True):
        assert torch.allclose(a.float(), b.bfloat16().float(), rtol=2**-7, atol=1e-6)
    # MLX's blocks of 32 repeat what 64 inputs share
    assert not case.kept or model.weight_bytes <= 1.12 * size + 2**12
    assert caplog.text.count("is expanded") == (not case.kept)
    holds_near(run(model, tokens), run(exact, tokens), 0.05)
    if case.kept:
        holds_near(run(Model.load(tmp_path, dtype=torch.int8), tokens), run(exact, tokens), 0.1)
    assert abs(weight_bytes(str(tmp_path), None) - model.weight_bytes) < 2**13


Q = "model.layers.1.self_attn.q_proj"
Tensors = dict[str, Tensor]


def put(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"] = change(tensors[f"{Q}.{part}"]).contiguous()

    return changed


def without(part: str) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        del tensors[f"{Q}.{part}"]

    return changed


def state(**told: Any) -> Callable[[Tensor], Tensor]:
    def changed(raw: Tensor) -> Tensor:
        said = json.dumps({**json.loads(bytes(raw.tolist())), **told}).encode()
        return torch.tensor(list(said), dtype=torch.uint8)

    return changed


STATE = "weight.quant_state.bitsandbytes__nf4"
HOSTILE: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("mxfp4", put("weight_scale", lambda t: t[:, :-1]), r"weight_scale of shape \[128, 3\].*ask for \[128, 4\]"),
    ("mxfp4", put("weight_scale", lambda t: t.float()), "weight_scale of torch.float32, and torch.uint8 is read"),
    ("mxfp4", put("weight_scale", lambda t: t | 255), "weight_scale 255, which stands for no number"),
    ("mxfp4", put("weight_packed", lambda t: t[:, :-8]), "112 inputs, which blocks of 32 do not divide"),
    ("mxfp4", put("weight_packed", lambda t: t.flatten()), r"shape \[8192\], and a matrix is read"),
    ("mxfp4", lambda t: t.update({f"{Q}.weight_shape": torch.tensor([2**40, 2])}), r"shape \[1099511627776, 2\]"),
    ("nvfp4", without("weight_global_scale"), "q_proj has no weight_global_scale"),
    ("nvfp4", put("weight_global_scale", lambda t: t * 0), r"weight_global_scale \[0.0\], and one number above 0"),
    ("nvfp4", put("weight_scale", lambda t: torch.full_like(t.float(), float("nan")).to(t.dtype)), "is not finite"),
    ("nf4", put(STATE, state(shape=[1 << 30, 1 << 30])), "8,192 bytes, and its quant_state asks for 576,460,752"),
    ("nf4", put(STATE, state(shape=[-4, 128])), "must have a shape of two sizes and a blocksize"),
    ("nf4", put(STATE, state(blocksize=0)), "must have a shape of two sizes and a blocksize"),
    ("nf4", put(STATE, state(quant_type="fp4")), "of the type 'fp4', not nf4"),
    ("nf4", put(STATE, lambda t: t[:-9]), "that is no JSON"),
    ("nf4", put("weight.absmax", lambda t: t[:-1]), r"weight.absmax of shape \[255\].*ask for \[256\]"),
    ("nf4", put("weight.absmax", lambda t: t * float("inf")), "weight.absmax that is not finite"),
    ("nf4", put("weight.quant_map", lambda t: t[:-1]), r"weight.quant_map of shape \[15\]"),
    ("nf4, nested", put(STATE, state(nested_offset="far")), "nested_offset 'far', and numbers are read"),
    ("nf4, nested", without("weight.nested_absmax"), "has no weight.nested_absmax"),
    ("mlx", put("scales", lambda t: t[:, :-1]), r"scales of shape \[128, 1\].*ask for \[128, 2\]"),
    ("mlx", without("biases"), "q_proj has no biases"),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(HOSTILE)))
def test_what_lies_is_refused_by_name(which: int, tmp_path: Path) -> None:
    name, change, says = HOSTILE[which]
    tensors = write(CASES[name], tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case("nf4", said={"load_in_4bit": False, "load_in_8bit": True}), "load_in_4bit is False; True is read"),
        (Case("nf4", said={"bnb_4bit_quant_type": "nf3"}), "bnb_4bit_quant_type is 'nf3'; nf4 or fp4 is read"),
        (Case("mlx", said={"bits": 3}), "bits is 3; 4 is read"),
        (Case("mlx", said={"mode": "mxfp4"}), "mode is 'mxfp4'; affine is read"),
        (Case("mlx", said={"lm_head": {"bits": 6, "group_size": 64}}), "lm_head has settings of its own"),
        (Case("mxfp4-pack-quantized", size=16), "group_size is 16; 32 is read"),
        (Case("nvfp4-pack-quantized", said={"quant_method": "mxfp4"}), r"mxfp4 is read in gpt-oss.s own models alone"),
    ],
)
def test_what_is_not_read_is_refused_by_name(case: Case, says: str, tmp_path: Path) -> None:
    key = "quantization" if case.layout == "mlx" else "quantization_config"
    save(tmp_path, {"a": torch.ones(1)}, CONFIG | {key: case.settings})
    with pytest.raises((UnsupportedModel, UserError), match=says):
        Model.load(tmp_path)


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["mlx"]
    tensors = write(case, tmp_path)
    scale = tensors[f"{Q}.scales"].float() * 1e-6
    tensors[f"{Q}.scales"] = scale.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    levels = np.ascontiguousarray(tensors[f"{Q}.weight"].view(torch.int32).numpy()).view(np.uint8)
    first = float(levels[0, 0] & 15) * float(tensors[f"{Q}.scales"][0, 0]) + float(tensors[f"{Q}.biases"][0, 0])
    model = Model.load(tmp_path, dtype=torch.float32)
    assert float(model.layers[1].qkv.dense()[0, 0]) == pytest.approx(first, rel=1e-6)
    Model.load(tmp_path)
    assert "q_proj is expanded (others may be too): float16 does not hold all of its scales and biases" in caplog.text
