"""A draft model that is often right and often wrong: the tiny target with noise in its weights."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import tiny


@cache
def relative(noise: float = 0.03) -> Path:
    """The directory of its checkpoint; made once per test process."""
    path = Path(tempfile.mkdtemp(prefix="phasewise-tiny-"))
    shutil.copy(tiny.checkpoint() / "config.json", path)
    gen = torch.Generator().manual_seed(0)
    tensors = load_file(tiny.checkpoint() / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensors[name] = tensor + torch.randn(tensor.shape, generator=gen) * tensor.std() * noise
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
