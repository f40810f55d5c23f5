"""What drafters with trained heads on the model's last state share: their knobs, and a fixed tree of their guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.last_state import MOST, LastStateDrafter, LastStateHeads, bound
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class RankTree(Method):
    """A drafter with heads of one kind, after which it is called. Which ranks of which heads are guessed follows from
    how often each was right in training."""

    heads: str = AUTO
    nodes: int = 15

    kind: ClassVar[type[LastStateHeads]]
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST:
            raise UserError(f"{self.kind.kind}: nodes={self.nodes} must be from 1 to {MOST}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes)

    def bind(self, host: Host) -> LastStateDrafter:
        return bound(host, self.kind, self.heads, self.nodes)
