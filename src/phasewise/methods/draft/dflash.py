"""A small model that fills a block of masks in one pass, over the model's own states (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._feature_tree import FeatureTree


@dataclass(frozen=True)
class DFlash(FeatureTree):
    """A chain of `depth` guesses in one pass of a few layers. The last token and `depth` masks enter. They see one
    another, later ones too, and states of several of the model's layers, which every layer of the heads keeps as keys
    and values. What comes out at a mask foretells the token in its place. With `width` > 1 the guesses are EAGLE-2's
    tree, as `draft.eagle` has it, which takes no further pass: a guess does not hang on the ones before it.

    `heads`: `auto`, which is those that lie beside the model (phasewise/heads/dflash) or are shipped for it; a folder,
    in DFlash's own layout or in that of vLLM's `speculators`; or `random:SEED`. `depth` is at most what they were
    trained for, which is best. Guesses are chosen, not drawn. Left out: layers with a sliding window, and guesses at
    the last token's own row (`sample_from_anchor`).
    """

    depth: int = 7
    width: int = 1

    paper: ClassVar[str] = "arXiv 2602.06036"
    name: ClassVar[str] = "dflash"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}
