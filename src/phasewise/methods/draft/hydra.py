"""Medusa's heads that also read the tokens guessed before their own (Hydra, arXiv 2402.05109): exact under every
verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.last_state import MOST, LastStateDrafter, bound
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Hydra(Method):
    """A fixed tree of at most `nodes` guesses, level by level: each head reads the model's last state and the
    embeddings of the path to its guess, so later guesses fit the earlier ones.

    A level is one product with the output matrix, for all paths of all requests. Which ranks the tree holds follows
    from how often each was right on held-out text, as measured in training. `heads`: `auto` (phasewise/heads/hydra
    beside the model, else what ships for it), a folder, or random:SEED, which guesses nothing. Folders are those of
    `phasewise train heads hydra`, or what `phasewise convert heads` makes of Hydra's own files. Left out: the prefix
    layer of Hydra++.
    """

    heads: str = AUTO
    nodes: int = 15

    paper: ClassVar[str] = "arXiv 2402.05109"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST:
            raise UserError(f"hydra: nodes={self.nodes} must be from 1 to {MOST}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes)

    def bind(self, host: Host) -> LastStateDrafter:
        return bound(host, HydraHeads, self.heads, self.nodes)
