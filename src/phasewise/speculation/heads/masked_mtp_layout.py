"""Masked multi-token prediction as files: `masks` [masks, hidden], `low_rank.<layer>.<linear>.a` and `.b`, and the
`sampler`'s blocks. The configuration has `num_masks` and `lora_rank`.

The layout is phasewise's own; the paper's authors have published none (arXiv 2507.11851).
"""

from __future__ import annotations

from typing import Any

import torch

from phasewise.errors import UserError
from phasewise.model.lowrank import shapes
from phasewise.model.model import Model
from phasewise.speculation.heads.folder import CONFIG, check, locate, read, seed_of
from phasewise.speculation.heads.masked_mtp import MaskedHeads

KIND = MaskedHeads.kind
MASKS, RANK = 3, 8  # where nobody says how many


# ---- reading
def masked_heads(model: Model, heads: str) -> MaskedHeads:
    """The masks, low-rank weights and sampler for a model, float32. `heads`: auto, a folder, or random:SEED. Raises
    UserError naming what does not fit, or Untrained."""
    seed = seed_of(heads)
    if seed is not None:
        made = usual_masked(model).to(model.device)
        random_masked(made, model, seed)
        return made
    stored = read(locate(model, (KIND,), heads))
    said = stored.config.get("speculators_model_type")
    if said != KIND:
        raise UserError(f"{stored.path} holds heads of kind {said!r}, and --draft {KIND} reads {KIND!r}")
    check(stored, model, KIND)
    count, rank = stored.number("num_masks"), stored.number("lora_rank")
    if not count or not rank:
        raise UserError(f"{stored.path / CONFIG}: num_masks={count} and lora_rank={rank}: neither may be 0")
    made = usual_masked(model, count, rank)
    made.load_state_dict(stored.take({name: tuple(value.shape) for name, value in made.state_dict().items()}))
    return made.to(model.device)


# ---- making
def usual_masked(model: Model, masks: int = MASKS, rank: int = RANK) -> MaskedHeads:
    """Untrained ones for a model, with low-rank weights beside all linear layers of all its layers but experts."""
    config = model.config
    return MaskedHeads(config.hidden, masks, config.layers, shapes(config, range(config.layers), rank))


def random_masked(made: MaskedHeads, model: Model, seed: int) -> None:
    """Give masks normal values as large as embeddings of the model, and matrices normal ones of variance 1 / columns:
    nothing learned, but every part at work."""
    generator = torch.Generator().manual_seed(seed)
    some = model.embed(torch.arange(min(model.config.vocab, 1024), device=model.device)).float()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim < 2:
                continue
            drawn = torch.randn(parameter.shape, generator=generator).to(some.device)
            parameter.copy_(drawn * (some.std() if name == "masks" else parameter.shape[-1] ** -0.5))


# ---- writing
def masked_settings(made: MaskedHeads, model: Model) -> dict[str, Any]:
    """config.json of masks, low-rank weights and sampler for a model."""
    return {
        "architectures": ["MaskedMTPSpeculator"], "model_type": KIND, "speculators_model_type": KIND,
        "hidden_size": model.config.hidden, "vocab_size": model.config.vocab, "num_masks": made.depth,
        "lora_rank": made.rank,
    }  # fmt: skip
