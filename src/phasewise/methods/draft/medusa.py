"""Trained heads on the model's last state, each for one later token (Medusa, arXiv 2401.10774): exact under every
verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._rank_tree import RankTree
from phasewise.speculation.heads.last_state import LastStateHeads
from phasewise.speculation.heads.medusa import MedusaHeads


@dataclass(frozen=True)
class Medusa(RankTree):
    """A fixed tree of at most `nodes` guesses, made of the pass that judged the ones before: drafting costs a product
    with the output matrix and no pass.

    Which ranks of which heads the tree holds follows from how often each was right on held-out text, as measured in
    training. `heads`: `auto` (phasewise/heads/medusa beside the model, else what ships for it), a folder, or
    random:SEED, which guesses nothing. Folders are those of `phasewise train heads medusa`, of vLLM's MedusaModel, or
    what `phasewise convert heads` makes of Medusa's own files. Left out: Medusa-2, which tunes the model as well, and
    heads over a truncated vocabulary.
    """

    paper: ClassVar[str] = "arXiv 2401.10774"
    kind: ClassVar[type[LastStateHeads]] = MedusaHeads
