"""Trees of a trained block that goes on with the model's own states (EAGLE, EAGLE-2, EAGLE-3; arXiv 2401.15077)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._feature_tree import FeatureTree


@dataclass(frozen=True)
class Eagle(FeatureTree):
    """Guesses by EAGLE heads: one decoder block that reads the model's state at a token and the next token's embedding,
    and its own output in place of a state where the model has not been yet. EAGLE-3 heads (arXiv 2503.01840) read
    states of three layers and have an output head of their own, EAGLE-1 and 2 the last state and the model's head.
    P-EAGLE heads (arXiv 2602.01469) are EAGLE-3's, trained to guess `depth` tokens in one pass, with masks for those
    not yet guessed; then a later guess does not hang on the one before.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, in EAGLE's own layout or
    in that of vLLM's `speculators`; or `random:SEED`.

    The tree is EAGLE-2's (arXiv 2406.16858). A level is one pass, but for P-EAGLE's heads, where one makes all levels:
    the `width` likeliest nodes of it are followed up, and each offers `width` tokens; a node is as likely as all
    guesses down to it together. Of all that was offered the `nodes` likeliest are proposed, at most `depth` in a row.
    `width=1` is a chain.

    Guesses are chosen, not drawn. Where a request samples, the token that the model would draw by the heads'
    probabilities takes the place of the likeliest. Left out: a budget of nodes measured on the machine
    (`paced:of=(eagle)` sizes its guesses).
    """

    paper: ClassVar[str] = "arXiv 2401.15077"
    name: ClassVar[str] = "eagle"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3", "eagle1", "peagle")
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}
