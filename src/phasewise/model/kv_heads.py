"""Fewer KV heads for a trained model, by the directions that its cached keys and values use (arXiv 2406.07056).

`t` neighbouring heads become one. Their cached values [N, t * D] are read in the `D` directions that carry most of
them: the new head caches v P for an orthonormal P [t * D, D], and old head i reads (v P) P_i^T back, which is fused
into its columns of W_o. Keys are turned by rotary positions between their projection and the scores, and only what
commutes with that turning can be fused: a rotary pair is one complex number, so pair j of the t heads is a vector in
C^t, of which one direction is kept; the new key has its coefficient, and the queries of head i are multiplied by what
the direction has for i. Layers without rotary positions treat keys like values. What comes out is an ordinary
checkpoint: exact where the heads span no more than those directions, else to be trained a little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.alone import TextAlone
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.quantisation import require_unquantised
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import Source
from phasewise.model.weights import Tensors

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "smollm3")
WHY_NOT = {
    "phi3": "its queries, keys and values lie in one tensor",
    "qwen3": "a norm of each head lies between its projections and what is cached",
    "qwen3_moe": "a norm of each head lies between its projections and what is cached",
    "gemma3_text": "a norm of each head lies between its projections and what is cached",
    "olmo2": "its norms of queries and keys run over all heads, the lost ones included",
}


@dataclass(frozen=True)
class Moments:
    """Second moments of one layer's caches: sums of outer products, float64 [new heads, t * D, t * D] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Basis:
    """The directions kept of one layer, float64 [new heads, t, D, D] each: old head i of a group is `_i` times the new
    one, and the new one the sum of the old ones by the transposes."""

    keys: Tensor
    values: Tensor


def check(files: Source, heads: int) -> ModelConfig:
    """The settings of a model whose KV heads can become so many. Raises UserError saying why not."""
    if files.path.is_file():
        raise UserError(f"{files.path}: the numbers of a .gguf file are rounded, and would be rounded again: convert "
                        "the checkpoint that it was made from")  # fmt: skip
    require_unquantised(files.settings())
    config = parse_config(files.settings())
    if config.family not in FAMILIES:
        why = WHY_NOT.get(config.family, "converting this family is not supported")
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{files.path}: the KV heads of a {config.family} cannot be joined: {why}. Choose one "
                               f"of {known}.")  # fmt: skip
    if heads < 1 or config.kv_heads % heads:
        fit = ", ".join(str(n) for n in range(1, config.kv_heads + 1) if config.kv_heads % n == 0)
        raise UserError(f"heads={heads} does not divide the {config.kv_heads} KV heads of {files.path}: choose one of "
                        f"{fit}")  # fmt: skip
    if any(rope.dim != config.head_dim for rope in config.ropes):
        raise UnsupportedModel(f"{files.path}: only a part of each head is rotated, and that cannot be joined yet")
    return config


# ---- what the caches look like
@torch.inference_mode()
def calibrate(model: Model, texts: Sequence[Sequence[int]], heads: int, tell: Callable[[int], object]) -> list[Moments]:
    """The moments of every layer over these texts, each from position 0; `tell` hears how many are done.

    Keys are seen as they are cached, turned: a pair's coefficient with another head's is the same at all angles.
    """
    config = model.config
    size = config.kv_heads // heads * config.head_dim
    sums = [Moments(*(torch.zeros(heads, size, size, dtype=torch.float64) for _ in range(2)))
            for _ in range(config.layers)]  # fmt: skip

    def add(layer: int, k: Tensor, v: Tensor) -> None:
        for rows, total in ((k, sums[layer].keys), (v, sums[layer].values)):
            grouped = rows.reshape(len(rows), heads, size).transpose(0, 1).float()  # [new, N, t * D]
            total += (grouped.transpose(1, 2) @ grouped).double()

    for done, text in enumerate(texts, 1):
        alone = TextAlone(config, model.rotary(torch.arange(len(text))), len(text), add)
        x = model.embed(torch.tensor(text))
        for i in range(config.layers):
            x = model.layer(i, x, alone)
        tell(done)
    return sums


def of_weights(files: Source, config: ModelConfig, heads: int) -> list[Moments]:
    """Moments that the caches would have if inputs had no preferred direction: the control of calibration."""
    tensors, names, found = files.tensors(), layout(config), []
    for i in range(config.layers):
        both = []
        for name, _ in names[f"{i}.qkv"][1:]:
            rows = tensors.read(name).double().view(heads, -1, config.hidden)
            both.append(rows @ rows.transpose(1, 2))
        found.append(Moments(*both))
    return found


# ---- directions
def bases(config: ModelConfig, moments: Sequence[Moments]) -> list[Basis]:
    """The directions that carry most of what was seen, per layer."""
    made = []
    for i, seen in enumerate(moments):
        keys = _largest if config.rope_of[i] is None else _largest_pairs
        made.append(Basis(keys(seen.keys, config.head_dim), _largest(seen.values, config.head_dim)))
    return made


def means(config: ModelConfig, heads: int) -> list[Basis]:
    """Heads that are averaged: the control of directions."""
    t, d = config.kv_heads // heads, config.head_dim
    alike = (torch.eye(d, dtype=torch.float64) / math.sqrt(t)).expand(heads, t, d, d)
    return [Basis(alike, alike)] * config.layers


def _largest(moments: Tensor, d: int) -> Tensor:
    """The d leading eigenvectors [new, t * D, D] as blocks [new, t, D, D]."""
    heads, size, _ = moments.shape
    if size == d:  # every direction is kept: none need be turned
        return torch.eye(d, dtype=torch.float64).expand(heads, 1, d, d)
    vectors: Tensor = torch.linalg.eigh(moments).eigenvectors.flip(-1)[..., :d]  # eigenvalues ascend
    blocks: Tensor = vectors.reshape(heads, size // d, d, d)
    return blocks


def _largest_pairs(moments: Tensor, d: int) -> Tensor:
    """The leading complex direction of every rotary pair (numbers j and j + d / 2 of a head), as real blocks."""
    heads, size, _ = moments.shape
    t, half = size // d, d // 2
    if t == 1:
        return torch.eye(d, dtype=torch.float64).expand(heads, 1, d, d)
    split = moments.view(heads, t, 2, half, t, 2, half).diagonal(0, 3, 6)  # [new, t, 2, t, 2, half]
    real = split[:, :, 0, :, 0] + split[:, :, 1, :, 1]  # [new, t, t, half]
    imaginary = split[:, :, 1, :, 0] - split[:, :, 0, :, 1]
    pairs = torch.complex(real, imaginary).permute(0, 3, 1, 2)  # k conj(k), [new, half, t, t]
    vectors = torch.linalg.eigh(pairs).eigenvectors[..., -1]  # [new, half, t]
    largest = vectors.gather(-1, vectors.abs().argmax(-1, keepdim=True))
    vectors = (vectors * largest.conj() / largest.abs()).transpose(1, 2)  # of no phase, so that it is the same anywhere
    blocks = torch.zeros(heads, t, d, d, dtype=torch.float64)
    at = torch.arange(half)
    blocks[..., at, at] = blocks[..., at + half, at + half] = vectors.real
    blocks[..., at, at + half] = -vectors.imag
    blocks[..., at + half, at] = vectors.imag
    return blocks


# ---- weights
def fused(config: ModelConfig, layer: int, basis: Basis, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of a layer's attention in the new heads, in the dtypes they had."""
    heads, t, d, _ = basis.keys.shape
    made: dict[str, Tensor] = {}
    names = layout(config)
    for key in ("qkv", "qkv.bias"):
        for (name, _), kind in zip(names.get(f"{layer}.{key}", ()), "qkv"):
            old = tensors.read(name)
            split = old.double().view(heads, t, -1, d, old[0].numel())  # [new, t, queries of a head or 1, D, in]
            turned = torch.einsum("ntgdi,ntde->ntgei", split, basis.values if kind == "v" else basis.keys)
            new = turned if kind == "q" else turned.sum(1)
            made[name] = new.reshape(-1, *old.shape[1:]).to(old.dtype)
    ((name, _),) = names[f"{layer}.o"]
    old = tensors.read(name)
    split = old.double().view(old.shape[0], heads, t, -1, d)
    made[name] = torch.einsum("hntgd,ntde->hntge", split, basis.values).reshape(old.shape).to(old.dtype)
    return made


def convert(files: Source, heads: int, basis: Sequence[Basis], target: Path) -> int:
    """Write the weights and config.json of the model in `heads` KV heads into `target`; returns the weights' bytes.

    Raises UserError where the model cannot have so few, and for a target that holds something already.
    """
    config = check(files, heads)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty: name another folder, or empty it")
    values = {**files.settings().values, "num_key_value_heads": heads, "head_dim": config.head_dim}
    return write_checkpoint(target, _parts(config, basis, files.tensors()), values)


def _parts(config: ModelConfig, basis: Sequence[Basis], tensors: Tensors) -> Iterator[dict[str, Tensor]]:
    touched: set[str] = set()
    for layer, of_layer in enumerate(basis):
        made = fused(config, layer, of_layer, tensors)
        touched |= made.keys()
        yield made
    for parts in layout(config).values():
        yield {name: tensors.read(name) for name, _ in parts if name not in touched}
