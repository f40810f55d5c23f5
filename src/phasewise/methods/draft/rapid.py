"""The model itself, or another one, guesses from what matters of a long prompt (RAPID, arXiv 2502.20330): drafting
reads a few pieces, however long the prompt; as exact as its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from phasewise.errors import UserError
from phasewise.methods.draft._pieces import Scorer, bm25, nearest, shortened
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.speculation.branching import branch
from phasewise.speculation.tree_drafter import SELF, DraftBuilder, NodeRequest, TreeDrafter, tree_drafter
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.model.model import Model

NAME, DRAWER = "rapid", "rapid text"
DRAWN: Drawn = "without_replacement"


@dataclass(frozen=True)
class Rapid(Method):
    """A chain of at most `k` tokens by a model (`self`: the engine's own, its weights shared) that reads at most
    `context` tokens of the prompt and what was generated since: the prompt's first `piece` tokens, its last `query`,
    and of its pieces between those nearest to these last ones, in the prompt's order.

    scorer=bm25 counts rare tokens in common, `embedding` compares means of the model's own token embeddings. A chain
    ends after a guess that the drafter itself gives less than `confidence`. A prompt of up to `context` tokens is read
    whole. Worth its passes where reading a long prompt's KV is most of a pass; `--verify transfer` gives the guesses a
    say. Left out: a trained embedding model, its floor of similarity, and KV shared with the target.
    """

    model: str = SELF
    k: int = 6
    context: int = 512
    piece: int = 32
    query: int = 16
    scorer: Literal["bm25", "embedding"] = "bm25"
    confidence: float = 0.1
    chunk: int = 512  # tokens of its text the drafter computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2502.20330"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"k": 3, "context": 24, "piece": 4, "query": 8}

    def __post_init__(self) -> None:
        for knob in ("k", "piece", "query", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"rapid: {knob}={getattr(self, knob)} must be at least 1")
        if self.context < self.query + self.piece:
            raise UserError(
                f"rapid: context={self.context} must have room for query={self.query} and a piece={self.piece}: "
                f"at least {self.query + self.piece}"
            )
        if not 0 <= self.confidence <= 1:
            raise UserError(f"rapid: confidence={self.confidence} must be from 0 to 1")
        if self.scorer not in ("bm25", "embedding"):
            raise UserError(f"rapid: scorer={self.scorer} must be bm25 or embedding")

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.k)

    def bind(self, host: Host) -> TreeDrafter:
        made = tree_drafter(host, NAME, self.model, _Chain(self.k, self.confidence), self.chunk)
        reader = made.companion.model
        if self.model != SELF and self.context >= reader.config.max_positions:
            raise UserError(
                f"rapid: context={self.context}, but that of {self.model!r} is {reader.config.max_positions}: lower it"
            )
        made.companion.text = partial(self._text, self.scores(reader))
        return made

    def scores(self, reader: Model) -> Scorer:
        """Scores by which pieces are ranked."""
        return bm25 if self.scorer == "bm25" else partial(nearest, reader.embed)

    def _text(self, scorer: Scorer, request: Request) -> list[int]:
        """The text that the drafter reads of a request: pieces of its prompt, then what was generated."""
        short: _Short | None = request.state.get(DRAWER)
        if short is None:
            pieces = shortened(request.prompt, self.context, self.piece, self.query, scorer)
            short = request.state[DRAWER] = _Short(pieces, len(pieces))
        short.tokens += request.tokens[request.prompt_len - short.pieces + len(short.tokens) :]
        return short.tokens


@dataclass(slots=True)
class _Short(Drawer):
    tokens: list[int]
    pieces: int  # how many of them stand for the prompt

    def fork(self) -> _Short:
        return _Short(list(self.tokens), self.pieces)


@dataclass(frozen=True)
class _Chain:
    """A chain in which the next guess is made only if those before it are likely."""

    levels: int
    confidence: float
    drawn: Drawn = DRAWN

    def nodes(self, levels: int) -> int:
        return levels

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        ((node, q),) = asked
        (token, *_), rows = branch(q, 1, "point" if tree.point else DRAWN, tree.us(node), tree.coupling)
        added = tree.add(node, token, None if rows is None else rows[0])
        return [added] if tree.left and float(q[token]) >= self.confidence else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(DRAWN)
