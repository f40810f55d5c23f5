"""Drafting heads for a widened model: those of the original, as wide, which guess the same.

Such a model writes its hidden state several times over and reads it once; behind its final norm zeros take the place of
the repetitions (model/widen.py). So what heads read of it is padded with zeros, and what enters a norm as a repeated
state leaves it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from phasewise.load import files_of, load_model
from phasewise.methods.draft.s2d import S2D, Learned
from phasewise.methods.draft.specdec import SpecDec
from phasewise.model import artefacts
from phasewise.model.fingerprint import fingerprint
from phasewise.model.parse import parse_config
from phasewise.speculation.heads import folder, layouts
from phasewise.speculation.heads.diffuspec_layout import KIND as MASKED_DRAFT
from phasewise.speculation.heads.hidden_transfer import TransferMaps
from phasewise.speculation.heads.layers import LAYER
from phasewise.speculation.heads.masked_mtp import MaskedHeads
from phasewise.speculation.heads.ppd import PromptTokens
from phasewise.train.heads.kinds import KINDS

FACES_TOKENS = ("lm_head", "d2t", "t2d")  # beginnings of tensors whose first dimension is a vocabulary
SAMPLER_END = 5  # the norm behind a sampler's last block
COUNTS = ("target_hidden_size", "decoder_heads")  # settings beside a block's that grow with the width
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class _BlockWidening:
    """How the tensors of a feature drafter become wider, by the last part but one of their names.

    `repeated`: what makes the block's residual, and norms of it, where that is repeated; all else is padded with zeros.
    `padded`: norms of padded rows, whose mean square falls by the factor. `parts`: widths of the model that lie side by
    side in what a matrix reads, by its whole name or that part, one if it is not named; `outputs`: in what it gives, by
    its whole name. Norms of single
    attention heads (`OF_HEADS`) stay as they are.
    """

    repeated: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    parts: Mapping[str, int] | None = None
    outputs: Mapping[str, int] | None = None


OF_HEADS = ("q_norm", "k_norm")
RESIDUAL = ("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm")
TRIGRAM = {"trimlp.0.linear.weight": 3, "trimlp.0.linear.bias": 3}  # widths of the model that the encoder gives
BLOCKS = {
    "chimera": _BlockWidening(
        padded=("input_layernorm", "post_attention_layernorm"), parts={"linear": 3, "1": 3, "0": 2}, outputs=TRIGRAM
    ),
    "clover": _BlockWidening(RESIDUAL, padded=("input_norm",)),  # of tied models, whose output rows are repeated, too
    "dflash": _BlockWidening((*RESIDUAL, "fc", "hidden_norm"), parts={"fc": 3}),
    "eagle1": _BlockWidening(padded=("post_attention_layernorm",), parts={"fc": 2}),
    "eagle3": _BlockWidening((*RESIDUAL, "fc", "hidden_norm"), parts={"fc": 3, "q_proj": 2, "k_proj": 2, "v_proj": 2}),
    "falcon": _BlockWidening(
        padded=("post_attention_layernorm",),
        parts={"lstm.weight_ih_l0": 2},
        outputs={f"lstm.{kind}_{of}h_l{layer}": 4 for kind in ("weight", "bias") for of in "ih" for layer in (0, 1)},
    ),  # of an LSTM gate whose sums are 0, and whose state was, the state stays 0
    "fspad": _BlockWidening(
        padded=("post_attention_layernorm",), parts={"fc": 2}, outputs={"layers.0.mlp.down_proj.weight": 2}
    ),
    "kangaroo": _BlockWidening(("o_proj", "input_layernorm")),
    "mtp": _BlockWidening((*RESIDUAL, "input_proj", "token_layernorm"), ("hidden_layernorm",), {"input_proj": 2}),
}


def widen_heads(source: Path, target: Path, base: str, factor: int) -> None:
    """Write the heads at `source` for the model with fingerprint `base`, `factor` times as wide as theirs."""
    stored = folder.read(source)
    kind = layouts.kind_of(stored)
    config: dict[str, Any] = {**stored.config, folder.OWN: {**stored.own, "base": base}}
    if kind in BLOCKS:
        layer = config[LAYER]
        config[LAYER] = {**layer, **{name: layer[name] * factor for name in SIZES}}
        for name in COUNTS:
            if name in config:
                config[name] *= factor
        tensors = {name: _of_block(name, tensor, BLOCKS[kind], factor) for name, tensor in stored.tensors.items()}
    elif kind == MaskedHeads.kind:
        config["hidden_size"] *= factor
        tensors = {name: _of_masks(name, tensor, stored.tensors, factor) for name, tensor in stored.tensors.items()}
    elif kind == MASKED_DRAFT:
        tensors = stored.tensors  # a model of its own, which reads tokens alone
    else:
        width, others = config["hidden_size"], {TransferMaps.kind: _of_layer, PromptTokens.kind: _of_embeddings}
        config["hidden_size"] = width * factor
        widened = others.get(kind, partial(_of_state, width=width))
        tensors = {name: widened(tensor, factor=factor) for name, tensor in stored.tensors.items()}
    folder.write(target, config, tensors)


def _of_layer(tensor: Tensor, factor: int) -> Tensor:
    """A map from rows between layers, which the model repeats, to such rows: it reads them once, and repeats."""
    return _padded(tensor, 1, 1, factor).repeat(factor, 1)


def _of_embeddings(tensor: Tensor, factor: int) -> Tensor:
    """Rows that enter the first layer [n, width], which the model repeats."""
    return tensor.repeat(1, factor)


def _of_state(tensor: Tensor, width: int, factor: int) -> Tensor:
    """A tensor of heads on the last state: every dimension that is made of whole widths, padded part by part."""
    for dim, size in enumerate(tensor.shape):
        if size % width == 0:
            tensor = _padded(tensor, dim, size // width, factor)
    return tensor


def _of_masks(name: str, tensor: Tensor, every: Mapping[str, Tensor], factor: int) -> Tensor:
    """Masks, which enter the first layer; a sampler; and low-rank weights, of which `a` reads what the model's own
    linear layer reads, and `b` adds to what that writes."""
    above, _, own = name.rpartition(".")
    linear = above.rpartition(".")[2]
    if name == "masks":
        return _of_embeddings(tensor, factor)
    if name.startswith("sampler"):
        return _of_sampler(int(linear), tensor, factor)
    if own == "a":
        return _padded(tensor, 1, 1, factor)
    if linear in ("o", "down"):
        return tensor.repeat(factor, 1)  # the residual
    if linear == "gate_up":
        return _padded(tensor, 0, 2, factor)
    queries = every[f"{above.removesuffix('qkv')}o.a"].shape[1]  # queries, keys and values lie one after the other
    keys = (len(tensor) - queries) // 2
    return torch.cat([_padded(each, 0, 1, factor) for each in tensor.split_with_sizes((queries, keys, keys))])


def _of_sampler(block: int, tensor: Tensor, factor: int) -> Tensor:
    """A sampler repeats its own states, so that its norms stay as they are; the output matrix reads them once."""
    if block == SAMPLER_END:
        return _padded(tensor, 0, 1, factor)
    if tensor.ndim == 2:
        tensor = _padded(tensor, 1, 1 if block else 2, factor)
    return tensor.repeat(factor, *(1,) * (tensor.ndim - 1))


def _of_block(name: str, tensor: Tensor, how: _BlockWidening, factor: int) -> Tensor:
    own = name.split(".")[-2] if "." in name else name
    if own in OF_HEADS:
        return tensor
    if tensor.ndim == 2:
        parts = how.parts or {}
        tensor = _padded(tensor, 1, parts.get(name, parts.get(own, 1)), factor)
    if own in FACES_TOKENS:
        return tensor
    if own in how.repeated:
        return tensor.repeat(factor, *(1,) * (tensor.ndim - 1))
    outputs = (how.outputs or {}).get(name, 1)
    return _padded(tensor * factor**-0.5 if own in how.padded else tensor, 0, outputs, factor)


def _padded(tensor: Tensor, dim: int, parts: int, factor: int) -> Tensor:
    """A dimension of several parts, each followed by zeros."""
    width = tensor.shape[dim] // parts
    split = tensor.reshape(*tensor.shape[:dim], parts, width, *tensor.shape[dim + 1 :])
    wide = split.new_zeros(*split.shape[: dim + 1], factor * width, *split.shape[dim + 2 :])
    wide.narrow(dim + 1, 0, width).copy_(split)
    return wide.flatten(dim, dim + 1)


def widen_acceptance(model: Path, factor: int, draft: str, partner: str) -> None:
    """Give a widened pocket model the acceptance head that ships for pocket and its draft model, for the widened draft
    model of this name and fingerprint. The head reads the state behind the draft model's final norm, where zeros take
    the place of repetitions; so all of it is padded with zeros."""
    pocket, small = load_model("pocket"), load_model("pocket-draft")
    ours = SpecDec().artefact(pocket.config, small.config, artefacts.fingerprint(small))
    stored = artefacts.load(pocket, ours, "auto")
    wide = {name: _of_state(tensor, small.config.hidden, factor) for name, tensor in stored.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in wide.items()}
    made = replace(ours, shapes=shapes, knobs={**ours.knobs, "model": draft}, partner=partner)
    files = files_of(str(model))
    base = fingerprint(parse_config(files.settings()), files.tensors())
    artefacts.save(model / artefacts.FOLDER / made.file, made, wide, base, "padded with zeros")


def widen_exits(model: Path, factor: int) -> None:
    """Give a widened pocket model the drafts with exits that ship for pocket, widened: their layers are the model's
    own, and so are those of low-rank weights on mask rows."""
    pocket, files = load_model("pocket"), files_of(str(model))
    config = parse_config(files.settings())
    base = fingerprint(config, files.tensors())
    for learned in get_args(Learned):
        stored = artefacts.load(pocket, S2D(learned=learned).artefact(pocket.config), "auto")
        wide = {name: _of_masks(name, tensor, stored, factor) for name, tensor in stored.items()}
        made = S2D(learned=learned).artefact(config)
        artefacts.save(model / artefacts.FOLDER / made.file, made, wide, base, "padded with zeros, and repeated")


def widen_all(model: Path, factor: int) -> None:
    """Give a widened pocket model the heads that ship for pocket, widened."""
    files = files_of(str(model))
    base = fingerprint(parse_config(files.settings()), files.tensors())
    pocket = files_of("pocket").folder / "phasewise" / "heads"
    for source in sorted(pocket.glob("*")):
        if source.name in KINDS:
            widen_heads(source, model / "phasewise" / "heads" / source.name, base, factor)
