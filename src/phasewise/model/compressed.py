"""Checkpoints in compressed-tensors' `pack-quantized` layout, written: what vLLM and transformers read.

A matrix X [out, in] in levels of `bits` is four tensors; words are int32 of 32 / bits levels, the first in the lowest
bits. Levels count from 0, as this layout stores signed ones.

    X_packed int32 [out, in * bits / 32]          along inputs
    X_scale bfloat16 [out, groups]
    X_shape int64 [2]                             [out, in]
    X_zero_point int32 [out * bits / 32, groups]  along outputs; only where groups have zeros of their own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.levels import Levels, matrices
from phasewise.model.quantisation import MLX
from phasewise.model.raw import RawConfig
from phasewise.model.weights import DTYPES, Tensors
from phasewise.model.weights_form import WeightsForm

PACKED, SCALE, SHAPE, ZERO = "_packed", "_scale", "_shape", "_zero_point"  # after the name of a weight
LEFT_OUT = ("dtype", "transformers_weights", MLX)  # of the settings
ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3",
                 "qwen3_moe": "Qwen3Moe", "phi3": "Phi3", "olmo2": "Olmo2", "smollm3": "SmolLM3", "gemma2": "Gemma2",
                 "gemma3_text": "Gemma3"}  # fmt: skip


def packed(name: str, levels: Levels) -> dict[str, Tensor]:
    """The tensors that stand for the matrix called `name`."""
    made = {
        f"{name}{PACKED}": _words(levels.levels, levels.form.bits),
        f"{name}{SCALE}": levels.scales.bfloat16(),
        f"{name}{SHAPE}": torch.tensor(levels.levels.shape),
    }
    if levels.zeros is not None:
        turned = levels.zeros.T
        padding = -turned.shape[1] % (32 // levels.form.bits)
        made[f"{name}{ZERO}"] = _words(torch.nn.functional.pad(turned, (0, padding)), levels.form.bits).T.contiguous()
    return made


def unpacked(name: str, tensors: Mapping[str, Tensor], form: WeightsForm) -> Levels:
    """The inverse of `packed`."""
    levels, zeros = _levels(tensors[f"{name}{PACKED}"], form.bits), None
    if form.zeros:
        zeros = _levels(tensors[f"{name}{ZERO}"].T.contiguous(), form.bits).T[: len(levels)].contiguous()
    return Levels(form, levels, tensors[f"{name}{SCALE}"].half(), zeros)


def _words(levels: Tensor, bits: int) -> Tensor:
    """uint8 [.., n] of whole words -> int32 [.., n * bits / 32]."""
    pairs = levels.contiguous().numpy()
    if bits == 4:
        pairs = pairs[..., ::2] | pairs[..., 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(pairs).view(np.int32))


def _levels(words: Tensor, bits: int) -> Tensor:
    raw = words.numpy().view(np.uint8)
    if bits == 4:
        raw = np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)
    return torch.from_numpy(raw.copy())


def settings(raw: RawConfig, config: ModelConfig, form: WeightsForm) -> dict[str, Any]:
    """config.json of the checkpoint: that of the model with these settings, and how its linear layers are rounded."""
    weights = {
        "num_bits": form.bits, "type": "int", "symmetric": not form.zeros, "strategy": "group",
        "group_size": form.group, "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    routers = [f"re:.*\\.{spec.prefix}\\.gate$" for spec in {spec for spec in config.moe if spec is not None}]
    told = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "pack-quantized"}}, "ignore": ["lm_head", *sorted(routers)],
        "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip
    known = {"architectures": [f"{ARCHITECTURES[config.family]}ForCausalLM"]} if config.family in ARCHITECTURES else {}
    values = {name: value for name, value in raw.values.items() if name not in LEFT_OUT}
    return {**known, **values, "torch_dtype": "bfloat16", "tie_word_embeddings": config.tied,
            "quantization_config": told}  # fmt: skip


def others(config: ModelConfig, tensors: Tensors, changed: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What stays as it is, in bfloat16, one tensor of the decoder after the other: embeddings, norms, biases, routers
    and a head of its own; those `changed` instead of the checkpoint's."""
    taken = matrices(config)
    for parts in layout(config).values():
        names = [name for name, _ in parts if name not in taken]
        if not names:
            continue
        found = {name: changed[name] if name in changed else tensors.read(name, torch.bfloat16) for name in names}
        yield {name: tensor.bfloat16() if tensor.dtype in DTYPES else tensor for name, tensor in found.items()}
        for tensor in found.values():
            tensors.let_go(tensor)
