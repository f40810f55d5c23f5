"""PPD's prompt tokens as files: `embeddings` [prompts, hidden], and in the configuration `num_prompts`.

The layout is phasewise's own. The paper's authors store theirs as a module that has to be unpickled.
"""

from __future__ import annotations

from typing import Any

import torch

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.speculation.heads.folder import CONFIG, check, locate, read, seed_of
from phasewise.speculation.heads.last_state import UNMEASURED, accuracy_of
from phasewise.speculation.heads.ppd import PromptTokens

KIND = PromptTokens.kind
PROMPTS = 3  # where nobody says how many


# ---- reading
def prompt_tokens(model: Model, heads: str) -> tuple[PromptTokens, list[list[float]]]:
    """The prompt tokens for a model, float32, and how often each rank of each one's guess is right where the guesses
    before it were. `heads`: auto, a folder, or random:SEED. Raises UserError naming what does not fit, or Untrained."""
    seed = seed_of(heads)
    if seed is not None:
        made = usual_prompts(model).to(model.device)
        random_prompts(made, model, seed)
        return made, [[*UNMEASURED] for _ in range(made.depth)]
    stored = read(locate(model, (KIND,), heads))
    said = stored.config.get("speculators_model_type")
    if said != KIND:
        raise UserError(f"{stored.path} holds heads of kind {said!r}, and --draft {KIND} reads {KIND!r}")
    check(stored, model, KIND)
    count = stored.number("num_prompts")
    if not count:
        raise UserError(f"{stored.path / CONFIG}: num_prompts=0: there must be at least one prompt token")
    made = PromptTokens(model.config.hidden, count, model.config.layers)
    made.load_state_dict(stored.take({name: tuple(value.shape) for name, value in made.state_dict().items()}))
    return made, [[*row] for row in accuracy_of(stored, count)]


# ---- making
def usual_prompts(model: Model, prompts: int = PROMPTS) -> PromptTokens:
    """Untrained prompt tokens for a model."""
    return PromptTokens(model.config.hidden, prompts, model.config.layers)


def random_prompts(made: PromptTokens, model: Model, seed: int) -> None:
    """Give prompt tokens normal values as large as embeddings of the model: nothing learned, but rows that it can
    read."""
    generator = torch.Generator().manual_seed(seed)
    some = model.embed(torch.arange(min(model.config.vocab, 1024), device=model.device)).float()
    with torch.no_grad():
        drawn = torch.randn(made.embeddings.shape, generator=generator)
        made.embeddings.copy_(drawn.to(some.device) * some.std())


# ---- writing
def prompt_settings(made: PromptTokens, model: Model) -> dict[str, Any]:
    """config.json of prompt tokens for a model."""
    return {
        "architectures": ["PromptTokensSpeculator"], "model_type": KIND, "speculators_model_type": KIND,
        "hidden_size": model.config.hidden, "vocab_size": model.config.vocab, "num_prompts": made.depth,
    }  # fmt: skip
