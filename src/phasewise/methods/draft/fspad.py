"""Trees of a block with a token-gated input, and an output each for guess and feature (FSPAD, arXiv 2408.15562)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._feature_tree import FeatureTree


@dataclass(frozen=True)
class FSPAD(FeatureTree):
    """Guesses by FSPAD's heads, which are EAGLE-2's with two changes. The token's embedding gates an MLP over the row
    that embedding and feature are projected to. The block has two outputs: the model's output head reads one, and the
    other takes the place of a state where the model has not been yet.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, with the authors' names
    of tensors or in the manner of vLLM's `speculators`; or `random:SEED`.

    The tree is EAGLE-2's, as `draft.eagle` has it: every level follows up the `width` likeliest nodes with `width`
    guesses each, at most `depth` levels, and the `nodes` likeliest of all are proposed. The paper's is of 59 nodes,
    `depth=5,width=10`. Guesses are chosen, not drawn. Left out: a budget of nodes measured on the machine
    (`paced:of=(fspad)` sizes its guesses).
    """

    paper: ClassVar[str] = "arXiv 2408.15562"
    name: ClassVar[str] = "fspad"
    kinds: ClassVar[tuple[str, ...]] = ("fspad",)
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}
