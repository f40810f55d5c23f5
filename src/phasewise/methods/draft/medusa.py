"""Trained heads on the model's last state, each for one later token (Medusa, arXiv 2401.10774): exact under every
verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.last_state import MOST, LastStateDrafter, bound
from phasewise.speculation.heads.medusa import MedusaHeads
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Medusa(Method):
    """A fixed tree of at most `nodes` guesses, made of the pass that judged the ones before: drafting costs a product
    with the output matrix and no pass.

    Which ranks of which heads the tree holds follows from how often each was right on held-out text, as measured in
    training. `heads`: `auto` (phasewise/heads/medusa beside the model, else what ships for it), a folder, or
    random:SEED, which guesses nothing. Folders are those of `phasewise train heads medusa`, of vLLM's MedusaModel, or
    what `phasewise convert heads` makes of Medusa's own files. Left out: Medusa-2, which tunes the model as well, and
    heads over a truncated vocabulary.
    """

    heads: str = AUTO
    nodes: int = 15

    paper: ClassVar[str] = "arXiv 2401.10774"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST:
            raise UserError(f"medusa: nodes={self.nodes} must be from 1 to {MOST}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes)

    def bind(self, host: Host) -> LastStateDrafter:
        return bound(host, MedusaHeads, self.heads, self.nodes)
