"""The row that the last query needs least leaves (TOVA, arXiv 2401.06104).

Promises dense attention's results until `keep` rows are there, and fewer than `keep` + `lot` rows afterwards. What has
left is gone, however much a later query would want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods._amounts import check_amount
from phasewise.methods.evict._allot import Layers, Spread
from phasewise.methods.evict._running import KeptBudget, Running, Way, check_lot, share
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Tova(Method):
    """When a prompt is complete, the `keep` rows that its last row attends to most stay, in a layer the same for all
    heads (weights are averaged over them); after every further row the least of them leaves. The newest row is a
    candidate like any other: nothing is protected for being recent.

    `keep` up to 1 is a share of the prompt, above 1 a number of rows; with layers "pyramid" it is a mean, and early
    layers keep more. Keys are read twice but where native steps find a token's weights on their way (docs/methods.md,
    `weigh`). `lot` rows are dropped together, which changes no token. Left out: heads of different rows, which is the
    method's own choice.
    """

    keep: float = 512
    lot: int = 32
    layers: Layers = "uniform"
    beta: float = 20.0

    paper: ClassVar[str] = "arXiv 2401.06104"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": float(1 << 30)}
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True)
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"keep": 256})
    tight: ClassVar[dict[str, object]] = {"keep": 9.0, "lot": 4}

    def __post_init__(self) -> None:
        if not self.keep > 0:
            raise UserError(
                f"tova: keep={self.keep} must be above 0: a share of the prompt up to 1, or a number of rows"
            )
        check_amount("tova", "keep", self.keep)
        check_lot("tova", self.lot)
        self.spread.check("tova")

    @property
    def spread(self) -> Spread:
        return Spread(self.layers, "uniform", self.beta)

    def bind(self, host: Host) -> Running:
        way = Way("tova", sums=False, together=True, lot=self.lot, spread=self.spread)
        return Running(way, host.model.config, self._budget)

    def _budget(self, prompt: int) -> KeptBudget:
        return KeptBudget(max(1, share(self.keep, prompt)), 0)
