"""Fingerprints the weights of a base model, for whatever was trained for it."""

from __future__ import annotations

import hashlib
import json

import torch

from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.weights import Tensors

SAMPLES = 8  # numbers of each tensor that enter a fingerprint
FACTS = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "intermediate", "eps", "tied")


def fingerprint(config: ModelConfig, tensors: Tensors) -> str:
    """16 hexadecimal digits: of the model's sizes, and of each tensor in its files name, shape and a few values.

    The values are those of the files, as float32: neither the dtype the model was loaded in nor a copy of the files in
    a wider dtype changes it. Training that touches every matrix does; a change of a few numbers may not.
    """
    digest = hashlib.sha256(json.dumps({fact: getattr(config, fact) for fact in FACTS}).encode())
    for name, shape in sorted(part for parts in layout(config).values() for part in parts):
        values = tensors.read(name).reshape(-1)
        places = torch.arange(SAMPLES) * (values.numel() - 1) // (SAMPLES - 1)
        digest.update(f"{name} {list(shape)}".encode())
        digest.update(values[places].float().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]
