"""Low-rank weights added to a checkpoint's own matrices: what rows that run with them must come to."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from phasewise.model import artefacts
from phasewise.model.artefacts import Artefact
from phasewise.model.model import Model

PARTS = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "o": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"), "down": ("mlp.down",),
}  # fmt: skip


def merged(source: Path, folder: Path, wanted: Artefact, seed: int) -> Model:
    """The checkpoint at `source` whose matrices have `random:seed` added to them, written to `folder`."""
    delta = artefacts.random(wanted, str(seed))
    tensors = load_file(source / "model.safetensors")
    for name in {name.rpartition(".")[0] for name in delta}:
        layer, _, linear = name.partition(".")
        names = [f"model.layers.{layer}.{part}_proj.weight" for part in PARTS[linear]]
        change = delta[f"{name}.b"] @ delta[f"{name}.a"]
        for part, more in zip(names, change.split([len(tensors[part]) for part in names])):
            tensors[part] = tensors[part] + more
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors")
    return Model.load(folder)
