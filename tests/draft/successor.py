"""A model that says tokens in a fixed order, whatever came before, and heads of each kind that know the order."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file

from phasewise.model.model import Model
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hydra import HydraHeads, HydraShape
from phasewise.speculation.heads.last_state import LastStateHeads
from phasewise.speculation.heads.medusa import MedusaHeads, MedusaShape
from tests import tiny

VOCAB, WIDTH, DEPTH = 24, 48, 3
ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))  # ORDER[x] follows x


@cache
def checkpoint() -> Path:
    """Layers add nothing, so a state is the token's own embedding, and embeddings are orthogonal."""
    path = tiny.write_checkpoint(Path(mkdtemp(prefix="phasewise-successor-")), vocab=VOCAB, hidden=WIDTH, layers=2)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    embeddings = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))).Q[:VOCAB]
    tensors["model.embed_tokens.weight"] = embeddings.contiguous()
    tensors["lm_head.weight"] = torch.empty_like(embeddings).index_copy(0, ORDER, embeddings) * 4
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@cache
def model() -> Model:
    return Model.load(checkpoint())


def said(first: int, n: int) -> list[int]:
    """What follows a token."""
    found = []
    for _ in range(n):
        first = int(ORDER[first])
        found.append(first)
    return found


def heads(kind: str) -> LastStateHeads:
    """Medusa's: each output matrix is the model's, so many steps further on. Hydra's: each reads the last embedding."""
    if kind == "medusa":
        made = MedusaHeads(MedusaShape(WIDTH, VOCAB, DEPTH, own_head=True))
        assert made.lm_heads is not None
        output = model().unembed.dense()
        for each in made.lm_heads:
            output = torch.empty_like(output).index_copy(0, ORDER, output)
            each.load_state_dict({"weight": output})
        return made
    other = HydraHeads(HydraShape(WIDTH, VOCAB, DEPTH))
    for wide in other.wide:
        weight = wide.residual.up.weight  # type: ignore[union-attr]
        with torch.no_grad():
            weight.zero_()
            weight[:, -WIDTH:] = torch.eye(WIDTH)
    return other


def stored(kind: str, out: Path) -> Path:
    made = heads(kind)
    sure = {"accuracy": [[0.9, 0.1]] * DEPTH}  # so that the likeliest tree of DEPTH nodes is a chain
    folder.write(out, made.config() | {folder.OWN: sure}, made.state_dict())
    return out
