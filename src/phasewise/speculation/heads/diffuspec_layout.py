"""A masked draft model as a folder of heads: a small decoder with a mask token, and trigrams of what its target writes.

`config.json` keeps the decoder's settings in `transformer_layer_config`, as vLLM's `speculators` keep those of layers.
`vocab_size` is the target's, `mask_token_id` the token of a mask, and `num_guesses` how many tokens a pass foretells.
The decoder's vocabulary is the target's and, behind it, tokens of its own, such as the mask. model.safetensors has the
decoder's tensors by the names of a checkpoint, and `trigrams` int32 [n, 4] (speculation/trigrams.py). The layout is
phasewise's own: `speculators` knows no such drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.model.weights import Weights
from phasewise.ops.native.weights import DenseRows
from phasewise.speculation.heads.fitting import mask_of, same_base
from phasewise.speculation.heads.folder import CONFIG, WEIGHTS, StoredHeads, locate, read, seed_of, train_command
from phasewise.speculation.heads.layers import LAYER
from phasewise.speculation.trigrams import SmoothedTrigrams

KIND, TRIGRAMS = "diffuspec", "trigrams"
MOST = 63  # guesses of a pass: with the last token 64 rows
RANDOM_GUESSES, RANDOM_TRIGRAMS = 8, 256


@dataclass(frozen=True, eq=False)
class MaskedDraft:
    """A draft model that fills `guesses` places in one pass. What it says of tokens from number `vocab` on, such as the
    `mask`, is no guess. `trigrams`: None where the folder has none."""

    model: Model
    vocab: int
    mask: int
    guesses: int
    trigrams: SmoothedTrigrams | None


# ---- reading
def masked_draft(model: Model, heads: str) -> MaskedDraft:
    """The masked draft model for a target, in its dtype. `heads`: auto, a folder, or random:SEED. Raises UserError
    naming what does not fit, or Untrained."""
    seed = seed_of(heads)
    if seed is not None:
        return _random(model, seed)
    stored = read(locate(model, (KIND,), heads))
    said = stored.config.get("speculators_model_type")
    if said != KIND:
        raise UserError(f"{stored.path} holds heads of kind {said!r}, and --draft {KIND} reads {KIND!r}")
    vocab, path = model.config.vocab, stored.path / CONFIG
    if stored.number("vocab_size") != vocab:
        raise UserError(f"{stored.path}: this draft is for a model with vocab_size={stored.config['vocab_size']}, the "
                        f"one in {model.files.path} has {vocab}. Train one for it: "
                        f"{train_command(KIND, str(model.files.path))}")  # fmt: skip
    same_base(stored, model, KIND)
    guesses = stored.number("num_guesses")
    if not 1 <= guesses <= MOST:
        raise UserError(f"{path}: num_guesses={guesses} must be from 1 to {MOST}")
    config = _config(stored, vocab)
    tensors = dict(stored.tensors)
    trigrams = _trigrams(stored, tensors.pop(TRIGRAMS, None), vocab)
    made = _decoder(model, config, tensors, stored.path)
    return MaskedDraft(made, vocab, mask_of(stored, config, stored.config), guesses, trigrams)


def _config(stored: StoredHeads, vocab: int) -> ModelConfig:
    """The decoder's architecture. Raises UserError for one that is not supported, or that has too few tokens."""
    path, settings = stored.path / CONFIG, stored.config.get(LAYER)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: {LAYER} must be an object, got {settings!r}")
    config = parse_config(RawConfig(settings, path))
    if config.vocab < vocab:
        raise UserError(f"{path}: the draft's own vocab_size={config.vocab} must be at least the model's, {vocab}")
    return config


def _trigrams(stored: StoredHeads, table: Tensor | None, vocab: int) -> SmoothedTrigrams | None:
    """Raises UserError for a table that is none of trigrams over the target's vocabulary."""
    if table is None:
        return None
    if table.is_floating_point() or table.ndim != 2 or table.shape[1] != 4:
        raise UserError(f"{stored.path / WEIGHTS}: {TRIGRAMS} is {table.dtype} {list(table.shape)}, wanted whole "
                        "numbers [n, 4]: three tokens and their count")  # fmt: skip
    ids, counts = table[:, :3], table[:, 3]
    if len(table) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab and int(counts.min()) >= 1):
        raise UserError(f"{stored.path / WEIGHTS}: {TRIGRAMS} must have tokens from 0 to {vocab - 1} and counts from 1 "
                        f"on; it has {int(ids.min())} to {int(ids.max())}, and {int(counts.min())}")  # fmt: skip
    return SmoothedTrigrams(table, vocab)


def _decoder(target: Model, config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path) -> Model:
    weights = Weights(TensorsInMemory(tensors, folder), layout(config), target.dtype, target.device)
    return Model(config, weights, target.files)


class TensorsInMemory:
    """Tensors that were read as a checkpoint (`model.weights.Tensors`); `folder` names it in errors."""

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        self.tensors, self.directory = tensors, folder
        self.where = dict.fromkeys(tensors, folder / WEIGHTS)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.tensors[name]

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.tensors[name]

    def blocks(self, name: str) -> None:
        """None: they do not lie in blocks."""

    def let_go(self, tensor: Tensor) -> None:
        """Does nothing: they stay in memory."""


# ---- making
def _random(model: Model, seed: int) -> MaskedDraft:
    """Two layers, 64 wide, of normal weights of variance 1 / columns, and a few trigrams: nothing learned, but at
    work."""
    vocab, made = model.config.vocab, torch.Generator().manual_seed(seed)
    settings = layer_settings_of(vocab + 1, model.config.max_positions, 64, 2, 1)
    config = parse_config(RawConfig(settings))
    tensors = dict[str, Tensor]()
    for parts in layout(config).values():
        for name, shape in parts:
            drawn = torch.randn(shape, generator=made) * shape[-1] ** -0.5
            tensors[name] = drawn if len(shape) > 1 else torch.ones(shape)
    words = sorted({*map(tuple, torch.randint(vocab, (RANDOM_TRIGRAMS, 3), generator=made).tolist())})
    table = torch.tensor([(*each, 1) for each in words], dtype=torch.int32)
    decoder = _decoder(model, config, tensors, Path(f"random:{seed}"))
    return MaskedDraft(decoder, vocab, vocab, RANDOM_GUESSES, SmoothedTrigrams(table, vocab))


def layer_settings_of(vocab: int, context: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    """A small Llama with tied embeddings, one head for keys, and heads of `width` / `heads`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 1,
        "intermediate_size": width * 8 // 3 // 8 * 8, "head_dim": width // heads, "max_position_embeddings": context,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True,
    }  # fmt: skip


# ---- writing
def draft_settings(layer: Mapping[str, Any], model: Model, mask: int, guesses: int) -> dict[str, Any]:
    """config.json of a masked draft for a model. `layer`: the decoder's own settings, as a checkpoint has them."""
    return {
        "architectures": ["MaskedDraftSpeculator"], "model_type": KIND, "speculators_model_type": KIND,
        "vocab_size": model.config.vocab, "mask_token_id": mask, "num_guesses": guesses, LAYER: dict(layer),
    }  # fmt: skip
