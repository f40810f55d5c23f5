"""PPD's prompt tokens as a tiny file, and what a model says after them, written a second time in plain torch.

Nothing of phasewise is imported here but the target's oracle, which imports nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import oracle, tiny
from tests.speculation.eagle_files import matrices, save


def tiny_prompts(path: Path, *, d: int = 48, prompts: int = 3, seed: int = 1, **more: Any) -> Path:
    """Random ones for the tiny model, in the layout in which prompt tokens are written here."""
    config = {"speculators_model_type": "ppd", "hidden_size": d, "vocab_size": tiny.VOCAB, "num_prompts": prompts}
    return save(path, config | more, matrices(seed, embeddings=(prompts, d)))


class PlainPrompts:
    """The prompt tokens of a folder behind texts of a target, without a cache: every row is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self.embeddings = load_file(folder / "model.safetensors")["embeddings"].float()

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> Tensor:
        """What the target says after the prompt tokens behind a text, [prompts, V]. They are its next rows."""
        rows = torch.cat((oracle.states(self.target, text)[0], self.embeddings))
        out = oracle.onward(self.target, rows, 0)[-1][len(text) :]
        return oracle.unembedded(self.target, oracle.last(self.target, out))
