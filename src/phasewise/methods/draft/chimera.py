"""Trees of a layer that reads true states and the last three tokens (Chimera, arXiv 2402.15758)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._feature_tree import FeatureTree
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.surrogates import SurrogateDrafter, surrogate_drafter
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class Chimera(FeatureTree):
    """Guesses by Chimera's heads. A residual MLP makes one row, a trigram, of the embeddings of the last three tokens.
    A decoder layer reads the model's true states and that row; what comes out stands for the state that the model has
    not computed yet. A head for each depth reads it beside the last true state. Deeper guesses read such stand-ins in
    place of states that are missing, and the trigram of the newest guess.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, with the authors' names
    of tensors or in the manner of vLLM's `speculators`; or `random:SEED`. `table`: the last so many trigrams are
    remembered, by their tokens; 0: each is computed. Guesses beyond the number of heads are the last head's.

    The tree is EAGLE-2's, as `draft.eagle` has it, of one pass a level, where the authors verify each candidate as a
    sequence of its own. Guesses are chosen, not drawn. Left out: a budget of nodes measured on the machine
    (`paced:of=(chimera)` sizes its guesses).
    """

    depth: int = 4
    table: int = 512

    paper: ClassVar[str] = "arXiv 2402.15758"
    name: ClassVar[str] = "chimera"
    kinds: ClassVar[tuple[str, ...]] = ("chimera",)
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table < 0:
            raise UserError(f"chimera: table={self.table} must be at least 0")

    def bind(self, host: Host) -> SurrogateDrafter:
        heads, key = feature_heads(host.model, self.kinds, self.heads)
        return surrogate_drafter(
            host, self.name, FeatureModel(heads, host.model, key), self.shape, self.chunk, self.table
        )
