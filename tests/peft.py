"""LoRA adapters as PEFT saves them, written by hand, and what a checkpoint becomes with one merged in."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write(
    folder: Path, base: Path, *, seed: int = 0, rank: int = 4, targets: Collection[str] = ALL,
    ranks: Mapping[str, int] | None = None, size: float = 0.5, **settings: Any,
) -> Path:  # fmt: skip
    """An adapter for the checkpoint in `base`, of random values, in `folder`. `ranks`: of layers by their ends."""
    gen, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or weight.ndim != 2:
            continue
        r = next((own for end, own in (ranks or {}).items() if module.endswith(end)), rank)
        out, inputs = weight.shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(r, inputs, generator=gen) * inputs**-0.5
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, r, generator=gen) * size
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none"}
    return save(folder, tensors, {**said, **settings})


def save(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint in `base` whose matrices are W + scale B A, written to `folder`."""
    said, weights = json.loads((adapter / "adapter_config.json").read_text()), load_file(base / "model.safetensors")
    halves = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in halves if "lora_A" in name]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        a, b = halves[name].double(), halves[name.replace("lora_A", "lora_B")].double()
        patterns = said.get("alpha_pattern", {}).items()
        alpha = next((v for key, v in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), said["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if said.get("use_rslora") else len(a))
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + scale * b @ a).float()
    shutil.copytree(base, folder)
    save_file(weights, folder / "model.safetensors")
    return folder
