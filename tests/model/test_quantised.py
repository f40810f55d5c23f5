"""Checkpoints that others have quantised, made here by the definitions of their layouts from random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import UnsupportedModel, UserError, WeightsError
from phasewise.load import weight_bytes
from phasewise.model.model import Model
from phasewise.ops import native
from tests.gguf.test_kept_forms import linears
from tests.model.reference import holds_near, run

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 128, 256, 4, 2, 100, 2
WIDE = HIDDEN * KV_HEADS // HEADS
# (out, in), and which of a layer's matrices have the same inputs
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, 0), "self_attn.k_proj": (WIDE, HIDDEN, 0),
    "self_attn.v_proj": (WIDE, HIDDEN, 0), "self_attn.o_proj": (HIDDEN, HIDDEN, 1),
    "mlp.gate_proj": (INNER, HIDDEN, 2), "mlp.up_proj": (INNER, HIDDEN, 2), "mlp.down_proj": (HIDDEN, INNER, 3),
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, and what its settings say. `zeros`: from which they are drawn, or None for none but the middle."""

    method: str
    group: int = 32
    zeros: tuple[int, int] | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    scales: torch.dtype = torch.float16
    shuffled: bool = False
    biases: str = ""  # "real", or "zeros" as many files have them where the model has none

    @property
    def floats(self) -> bool:
        return self.method in ("fp8", "float-quantized")

    @property
    def settings(self) -> dict[str, Any]:
        if self.method == "fp8":
            return {"quant_method": "fp8", "weight_block_size": [self.group] * 2, **self.said}
        if self.method in ("gptq", "awq"):
            own = {"quant_method": self.method, "bits": 4, "group_size": self.group, "desc_act": self.shuffled}
        else:
            bits, kind = 4 if self.method == "pack-quantized" else 8, "float" if self.floats else "int"
            weights = {"num_bits": bits, "type": kind, "symmetric": self.zeros is None, "strategy": "group",
                       "group_size": self.group}  # fmt: skip
            if self.group < 1:
                weights |= {"strategy": "channel" if self.group else "tensor", "group_size": None}
            groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
            own = {"quant_method": "compressed-tensors", "format": self.method, "config_groups": groups}
        return own | dict(self.said)


CASES = {
    "gptq": Case("gptq", zeros=(1, 16)),
    "gptq, symmetric, one group": Case("gptq", -1, biases="zeros"),
    "gptq, a group that is cut": Case("gptq", 96, zeros=(1, 16)),
    "gptq v2": Case("gptq", 64, zeros=(0, 16), said={"checkpoint_format": "gptq_v2"}),
    "gptq v1 with zeros of 0": Case("gptq", 64, zeros=(0, 16)),
    "gptq, inputs by activation": Case("gptq", zeros=(1, 16), shuffled=True),
    "awq": Case("awq", 64, zeros=(0, 16), said={"version": "GEMM", "zero_point": True}, biases="real"),
    "packed": Case("pack-quantized", 128, scales=torch.bfloat16),
    "packed, with zeros": Case("pack-quantized", 32, zeros=(0, 16), scales=torch.bfloat16),
    "packed, a scale an output": Case("pack-quantized", -1),
    "eight bits": Case("int-quantized", -1, scales=torch.bfloat16),
    "fp8": Case("float-quantized", -1, scales=torch.bfloat16),
    "fp8 with one scale": Case("float-quantized", 0),
    "fp8 in blocks": Case("fp8", 96, scales=torch.float32),
}


def words(levels: NDArray[np.int64]) -> Tensor:
    """Levels [..., 8 n] of 4 bits -> int32 [..., n], the first in the lowest bits."""
    parts = levels.reshape(*levels.shape[:-1], -1, 8) << np.arange(8) * 4
    return torch.from_numpy(parts.sum(-1).astype(np.uint32).view(np.int32))


def interleaved(levels: NDArray[np.int64]) -> Tensor:
    return words(levels.reshape(*levels.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(levels.shape))


def module(case: Case, draw: np.random.Generator, outputs: int, inputs: int, order: NDArray[np.int64]) \
        -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """A matrix's tensors by the ends of their names, and what they stand for, float32 [out, in]."""
    if case.floats:
        return floats(case, draw, outputs, inputs)
    size = inputs if case.group == -1 else case.group
    groups, middle = -(-inputs // size), 128 if case.method == "int-quantized" else 8
    group_of = order // size
    levels = draw.integers(0, 2 * middle, (outputs, inputs))
    zeros = np.full((outputs, groups), middle) if case.zeros is None else draw.integers(*case.zeros, (outputs, groups))
    drawn = draw.uniform(0.5, 2, (outputs, groups)) * 1.5 / inputs**0.5 / middle
    scales = torch.from_numpy(drawn).to(case.scales)
    numbers = (levels - zeros[:, group_of]) * scales.double().numpy()[:, group_of]
    dense = torch.from_numpy(numbers).float()
    if case.method == "gptq":
        stored = words(zeros.T)
        stored = stored if case.said else stored - 0x11111111  # of whole words, as GPTQModel writes them
        made = {"qweight": words(levels.T[None].reshape(-1, 8, outputs).swapaxes(1, 2))[..., 0],
                "qzeros": stored, "scales": scales.T, "g_idx": torch.from_numpy(group_of).int()}  # fmt: skip
    elif case.method == "awq":
        made = {"qweight": interleaved(levels.T), "qzeros": interleaved(zeros.T), "scales": scales.T}
    elif case.method == "int-quantized":
        made = {"weight": torch.from_numpy((levels - 128).astype(np.int8)), "weight_scale": scales}
    else:
        made = {"weight_packed": words(levels), "weight_scale": scales, "weight_shape": torch.tensor([outputs, inputs])}
        if case.zeros is not None:
            made["weight_zero_point"] = words(zeros.T).T
    return {name: tensor.contiguous() for name, tensor in made.items()}, dense


def floats(case: Case, draw: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same in fp8: a scale an output, one for all, or one a block."""
    stored = torch.from_numpy(draw.standard_normal((outputs, inputs)) * 20).to(torch.float8_e4m3fn)
    blocks = {-1: (outputs, 1), 0: (1,)}.get(case.group, (-(-outputs // 96), -(-inputs // 96)))
    scales = torch.from_numpy(draw.uniform(0.5, 2, blocks) / 20 / inputs**0.5).to(case.scales)
    wide = scales.float().repeat_interleave(96, 0).repeat_interleave(96, 1) if case.method == "fp8" else scales.float()
    name = "weight_scale_inv" if case.method == "fp8" else "weight_scale"
    cut = wide[:outputs, :inputs] if wide.ndim == 2 else wide
    return {"weight": stored, name: scales}, stored.float() * cut


def write(case: Case, path: Path) -> dict[str, Tensor]:
    """A quantised checkpoint in `path`, and the same in float32 in `path`/dense. -> the first one's tensors"""
    draw = np.random.default_rng(5)
    ours: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}

    def plain(name: str, numbers: NDArray[np.float64], *, ours_alone: bool = False) -> None:
        ours[name] = torch.from_numpy(numbers).half()
        if not ours_alone:
            dense[name] = ours[name].float()

    for name in ("model.embed_tokens", "lm_head"):
        plain(f"{name}.weight", draw.standard_normal((VOCAB, HIDDEN)) * (1 if name == "model.embed_tokens" else 0.2))
    plain("model.norm.weight", draw.uniform(0.5, 1.5, HIDDEN))
    for i in range(LAYERS):
        root = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain(f"{root}.{norm}.weight", draw.uniform(0.5, 1.5, HIDDEN))
        orders = [draw.permutation(size) if case.shuffled else np.arange(size) for size in (HIDDEN,) * 3 + (INNER,)]
        for name, (outputs, inputs, which) in SHAPES.items():
            made, dense[f"{root}.{name}.weight"] = module(case, draw, outputs, inputs, orders[which])
            ours |= {f"{root}.{name}.{part}": tensor for part, tensor in made.items()}
            if case.biases:
                size = 0.5 if case.biases == "real" else 0.0
                plain(f"{root}.{name}.bias", draw.standard_normal(outputs) * size, ours_alone=not size)
    config = CONFIG | {"attention_bias": case.biases == "real", "mlp_bias": case.biases == "real"}
    save(path, ours, config | {"torch_dtype": "float16", "quantization_config": case.settings})
    save(path / "dense", dense, config)
    return ours


def save(path: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_what_its_numbers_are(name: str, tmp_path: Path) -> None:
    """Logits differ by what activations are rounded; what stays in memory is as large as the file's tensors."""
    case = CASES[name]
    size = sum(tensor.nbytes for tensor in write(case, tmp_path).values())
    exact, tokens = Model.load(tmp_path / "dense"), [3 + i * 37 % 90 for i in range(40)]
    want = run(exact, tokens)
    for a, b in zip(linears(Model.load(tmp_path, dtype=torch.float32)), linears(exact)):
        assert torch.equal(a, b)
    for dtype, worst in ((None, 0.04), (torch.int8, 0.06)):
        model = Model.load(tmp_path, dtype=dtype)
        most = 1.04 if not case.floats else 33 / 32 if case.group == -1 else 36 / 32  # a scale of four bytes for each
        assert model.dtype == torch.bfloat16 and model.weight_bytes <= most * size + 2**12
        assert (model.stack is None) == case.shuffled  # such inputs are gathered between native calls
        for a, b in list(zip(linears(model), linears(exact)))[0 if dtype is None else 2 :]:
            assert torch.equal(a, b.bfloat16())
        holds_near(run(model, tokens), want, worst)
    assert abs(weight_bytes(str(tmp_path), None) - Model.load(tmp_path).weight_bytes) < 2**13


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


def order(value: int) -> Callable[[Tensor], Tensor]:
    return lambda groups: torch.cat((groups[:-1], torch.tensor([value], dtype=groups.dtype)))


HOSTILE: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("gptq", put("qzeros", lambda t: t[:, :-1]), r"q_proj has qzeros of shape \[4, 15\].* ask for \[4, 16\]"),
    ("gptq", put("scales", lambda t: t[:-1]), r"q_proj has scales of shape \[3, 128\].* ask for \[4, 128\]"),
    ("gptq", put("qweight", lambda t: t[:-1]), r"q_proj has g_idx of shape \[128\], not \[120\]"),
    ("gptq", put("qweight", lambda t: t.float()), r"q_proj has qweight of torch.float32, and torch.int32 is read"),
    ("gptq", put("qweight", lambda t: t.flatten()), r"q_proj has qweight of shape \[2048\], and a matrix is read"),
    ("gptq", put("g_idx", order(4)), "q_proj has groups 0 to 4 in g_idx, and there are 4, counted from 0"),
    ("gptq", put("g_idx", order(-1)), "q_proj has groups -1 to 3 in g_idx"),
    ("gptq", put("g_idx", order(0)), r"q_proj has groups of 31 to 33 inputs.*multiple of 32 inputs can be read"),
    ("gptq", put("g_idx", lambda t: t.flip(0)), r"q_proj\.weight and .*k_proj.* unlike orders .*float32 expands"),
    ("gptq", without("qzeros"), "q_proj has no qzeros"),
    ("gptq", without("qweight"), "q_proj has no qweight"),
    ("gptq", without("scales"), r"missing: .*q_proj\.weight"),
    ("gptq", lambda tensors: tensors.update({f"{Q}.weight": torch.ones(4, 4)}), "has both qweight and weight"),
    ("gptq", lambda tensors: tensors.update({f"{Q}.bias": torch.ones(128)}), r"left over .*q_proj\.bias"),
    ("awq", put("qweight", lambda t: t[:, :-1]), r"q_proj has scales of shape \[2, 128\].* ask for \[2, 120\]"),
    ("packed", put("weight_shape", lambda t: t * 2**40), r"q_proj has weight_shape \[140737488355328, .*\[128, 128\]"),
    ("packed", put("weight_packed", lambda t: t[:, :-1]), r"q_proj has weight_shape \[128, 128\].*\[128, 120\]"),
    ("packed, with zeros", put("weight_zero_point", lambda t: t[:-1]), r"weight_zero_point of shape \[15, 4\]"),
    ("fp8 in blocks", put("weight", lambda t: t[:-32]), r"weight_scale_inv of shape \[2, 2\].* ask for \[1, 2\]"),
    ("fp8", put("weight", lambda t: t.view(torch.int8)), r"q_proj has weight of torch.int8, and torch.float8_e4m3fn"),
    ("eight bits", put("weight_scale", lambda t: t[:-1]), r"weight_scale of shape \[127, 1\].*\[128, 1\]"),
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
        (Case("gptq", said={"bits": 3}), "bits is 3; 4 is read"),
        (Case("gptq", said={"bits": True}), "bits is True"),
        (Case("gptq", said={"checkpoint_format": "marlin"}), "checkpoint_format is 'marlin'; gptq or gptq_v2 is read"),
        (Case("gptq", said={"dynamic": {"+:.*down.*": {"bits": 8}}}), "dynamic gives .*down.* settings of its own"),
        (Case("gptq", said={"group_size": 0}), "group_size must be a positive whole number or -1, got 0"),
        (Case("gptq", said={"group_size": "32"}), "group_size must be a positive whole number or -1, got '32'"),
        (Case("awq", said={"version": "gemv"}), "version is 'gemv'; gemm is read"),
        (Case("nvfp4-pack-quantized"), "type is 'int'; float is read"),
        (Case("marlin-24"), "format is 'marlin-24'; pack-quantized or int-quantized or float-quantized or nvfp4-pack"),
        (Case("pack-quantized", said={"config_groups": {"a": 7}}), "config_groups: a must be an object with weights"),
        (Case("pack-quantized", said={"config_groups": {}}), "config_groups says nothing"),
        (Case("fp8", said={"weight_block_size": [128]}), r"a block must be two positive whole numbers, got \[128\]"),
        (Case("bitsandbytes"), "format is 'bitsandbytes'"),
        (Case("gptq", said={"quant_method": "hqq"}), r"the checkpoint is quantised \(hqq\)\. What can be read: gptq"),
    ],
)
def test_what_is_not_read_is_refused_by_name(case: Case, says: str, tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1)}, CONFIG | {"quantization_config": case.settings})
    with pytest.raises((UnsupportedModel, UserError), match=says):
        Model.load(tmp_path)


def test_groups_of_16_are_refused_and_unquantised_ones_too(tmp_path: Path) -> None:
    write(Case("gptq", 16), tmp_path)
    with pytest.raises(WeightsError, match=r"down_proj has groups of 16 to 16 inputs, of 256 in all.*32 inputs"):
        Model.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save(tmp_path / "dense", {"a": torch.ones(1)}, config)
    with pytest.raises(WeightsError, match=r"config\.json says that it is quantised, and no tensor is"):
        Model.load(tmp_path / "dense")


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a matrix is expanded, and the log says so once."""
    write(Case("pack-quantized", scales=torch.float32), tmp_path)
    model, exact = Model.load(tmp_path), Model.load(tmp_path / "dense")
    assert caplog.text.count("float16 does not hold all of its scales") == 1
    for a, b in zip(linears(model), linears(exact)):
        assert torch.equal(a, b.bfloat16())
