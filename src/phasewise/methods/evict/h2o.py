"""Rows that have got the most attention so far stay, and the most recent ones (H2O, arXiv 2306.14048).

Promises dense attention's results until `heavy` + `recent` rows are there, and fewer than `lot` more afterwards, per KV
head. What has left is gone: a later question may find its rows missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods._amounts import check_amount
from phasewise.methods.evict._allot import Heads, Layers, Spread
from phasewise.methods.evict._running import KeptBudget, Running, Way, check_lot, share
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class H2O(Method):
    """A row's score is the sum of the weights that all queries have given it, over the query heads of a KV head. When a
    prompt is complete, the `heavy` best of the older rows stay, and the last `recent` ones; after every further row the
    lowest of the older ones leaves.

    Both up to 1 are shares of the prompt, above 1 numbers of rows. Rows that have been there for long have had more
    queries; `mean` divides a score by how many could have seen the row. Budgets are means: with layers "pyramid" early
    layers keep more heavy rows, with heads "ada" the heads of a layer compete for them when the prompt is complete, and
    then keep what they got. A prompt's scores are a second product of all its queries and keys, and later rows read
    keys twice but where native steps find a token's weights on their way (docs/methods.md, `weigh`). A prompt's rows
    are of use to nobody else, as all its queries must be seen. `lot` rows are dropped together, which changes no token.
    """

    heavy: float = 0.1
    recent: float = 0.1
    mean: bool = False
    lot: int = 32
    layers: Layers = "uniform"
    heads: Heads = "uniform"
    beta: float = 20.0
    least: float = 0.2

    paper: ClassVar[str] = "arXiv 2306.14048"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"heavy": float(1 << 30)}
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True, shares_prefix=False)
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"heavy": 0.25, "recent": 0.25}, {})
    tight: ClassVar[dict[str, object]] = {"heavy": 5.0, "recent": 4.0, "lot": 4}

    def __post_init__(self) -> None:
        if self.heavy < 0 or self.recent < 0 or not self.heavy + self.recent > 0:
            raise UserError(
                f"h2o: heavy={self.heavy} and recent={self.recent} must be at least 0, and one of them above: shares "
                "of the prompt up to 1, or numbers of rows"
            )
        check_amount("h2o", "heavy", self.heavy)
        check_amount("h2o", "recent", self.recent)
        check_lot("h2o", self.lot)
        self.spread.check("h2o")

    @property
    def spread(self) -> Spread:
        return Spread(self.layers, self.heads, self.beta, self.least)

    def bind(self, host: Host) -> Running:
        way = Way("h2o", mean=self.mean, lot=self.lot, spread=self.spread)
        return Running(way, host.model.config, self._budget)

    def _budget(self, prompt: int) -> KeptBudget:
        recent = share(self.recent, prompt)
        return KeptBudget(max(1, share(self.heavy, prompt) + recent), recent)
