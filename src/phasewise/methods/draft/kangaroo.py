"""The model's first layers and a small adapter draft, the other layers verify (Kangaroo, arXiv 2404.18911)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.speculation.early_exit import ExitDrafter, exit_drafter
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import pick
from phasewise.verbs.traits import Traits

MOST = 63  # guesses: with the pending token 64 rows


@dataclass(frozen=True)
class Kangaroo(Method):
    """A chain of at most `depth` guesses. A guess leaves the model after its first layers, whose number the heads name:
    one attention layer, a norm and the model's own output head make the next guess of what they leave. The chain ends
    behind the first guess whose probability is below `stop`; that guess is kept, for it costs the first layers alone.

    The first layers run every guess once, on the request's own KV. The verdict begins at the layer behind them, with
    the rows they left: s guesses take s + 1 rows through all layers, as any s guesses do that are verified, and beside
    them one layer of attention a guess.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder; or `random:SEED`, behind
    a sixteenth of the layers. Guesses are chosen, not drawn: where a request samples, the token that the model would
    draw by the adapter's probabilities. Verifiers under which tokens depend on the size of a guess are refused, as are
    methods that choose among the rows or layers of a decode step. Where a schedule splits the depth of decode steps it
    is refused, too; those here split that of prompts. Left out: trees, as in the paper; heads in the layout of the
    authors' own checkpoints, which are pickled.
    """

    heads: str = AUTO
    depth: int = 6
    stop: float = 0.6
    chunk: int = 512  # prompt tokens the adapter reads per step while it lags behind

    paper: ClassVar[str] = "arXiv 2404.18911"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"depth": 4, "stop": 0.05}

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MOST:
            raise UserError(f"kangaroo: depth={self.depth} must be from 1 to {MOST}")
        if not 0 <= self.stop <= 1:
            raise UserError(f"kangaroo: stop={self.stop} must be from 0 to 1")
        if self.chunk < 1:
            raise UserError(f"kangaroo: chunk={self.chunk} must be at least 1")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.depth, begins_rows=True)

    def bind(self, host: Host) -> ExitDrafter:
        heads, key = feature_heads(host.model, ("kangaroo",), self.heads)
        assert isinstance(heads, ExitAdapter)
        return self.with_heads(host, heads, key)

    def with_heads(self, host: Host, heads: ExitAdapter, key: str) -> ExitDrafter:
        """Its runtime with this adapter, whose weights `key` names."""
        model, shape = FeatureModel(heads, host.model, key), _ConfidentChain(self.depth, self.stop)
        return exit_drafter(host, "kangaroo", model, heads.exit, shape, self.chunk)


@dataclass(frozen=True)
class _ConfidentChain:
    """A chain that ends behind the first guess whose probability is below `stop`."""

    levels: int
    stop: float
    drawn: Drawn = "point"

    def nodes(self, levels: int) -> int:
        return levels

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        ((node, q),) = asked
        token = int(q.argmax()) if tree.request.params.greedy else pick(q, tree.us(node)(0), tree.coupling)
        guess = tree.add(node, token)
        return [guess] if tree.left and float(q[token]) >= self.stop else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn)
