"""Goes on from, or edits, KV that an earlier request left; what follows an edit moves, unread (PIE, arXiv 2407.03157).

Promises that only new tokens are computed, once, each against all before it, and the last token again: rows m + 1 for m
new ones, however much follows them. Rows before the first edit stay as they are; the keys of those after it are turned
by as many positions as they have moved, and so have the right place and what they had read before. A request that asks
for nothing is computed plainly and exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.kv.cache import KV
from phasewise.kv.retained import InjectedKV, RetainedKV
from phasewise.methods.decode._common import common
from phasewise.methods.decode._then import Handing, checked, following
from phasewise.model.model import Model
from phasewise.request.drawer import Drawer
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "pie"


@dataclass(frozen=True)
class Pie(Method):
    """A request with `ask={"after": ID}` (in Python, `after=ID`) gives its whole text as the prompt. It takes what its
    prompt has in common with the text of the request ID, from the left: runs of at least `least` tokens. All else is
    computed, from the left as well, and so are the first `repair` tokens after each edit, where what is unread weighs
    most: with enough of them all is dense. `Output.recalled` says how many rows were taken; 0 where that KV is no
    longer kept, or was another recipe's: then the prompt is computed from its tokens. Of several workers, the one that
    has the KV gets the request. Over HTTP: docs/serving.md.

    Rows that moved are approximate, and so are those of packed blocks, and those of an answer whose attend method read
    few rows: prompts with such rows are never shared as prefixes. KV that was edited may be edited again; keys are
    turned again then, and rounded. A request that is preempted starts again from what is left then.
    `then` decodes what follows the prompt. Left out: keys that are turned when they are read, instead of once.
    """

    repair: int = 0
    least: int = 16
    then: Any = part("decode", "autoregressive")

    paper: ClassVar[str] = "arXiv 2407.03157"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        checked(NAME, self.then)
        if self.repair < 0:
            raise UserError(f"pie: repair={self.repair} must be at least 0, a number of tokens")
        if self.least < 1:
            raise UserError(f"pie: least={self.least} must be at least 1, a number of tokens")

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        return replace(then, asks=("after", *then.asks), injects_kv=True, retains_kv=True)

    def bind(self, host: Host) -> Editing:
        lengths = sorted({rope.scheme for rope in host.model.config.ropes if not rope.fixed})
        if lengths:
            raise UserError(f"pie: this model's rope scaling {', '.join(lengths)!r} depends on the length of the text, "
                            "so keys cannot be turned by a distance: choose another decode method")  # fmt: skip
        return Editing(self, host)


class ReusedPiece(NamedTuple):
    """Tokens start .. stop-1 of a prompt, that stood `shift` places earlier in a text; `after` an edit."""

    start: int
    stop: int
    shift: int
    after: bool


class ReusePlan(Drawer):
    """The KV that a request will take from an earlier one, from the left. Nobody can take it away meanwhile."""

    def __init__(self, source: KV | None, pieces: Sequence[ReusedPiece]) -> None:
        self.source, self.pieces = source, pieces

    def fork(self) -> ReusePlan:
        return ReusePlan(None, ())  # siblings fork when the prompt is complete

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
        self.source = None


class Editing(Handing):
    """A request's drawer holds its plan until its prompt is complete."""

    def __init__(self, knobs: Pie, host: Host) -> None:
        super().__init__(host, knobs.then)
        self.knobs, self.model = knobs, host.model

    def check(self, params: Params) -> None:
        super().check(params)
        after = (params.ask or {}).get("after", "")
        if not isinstance(after, str):
            raise UserError(f"after={after!r} must be the id of an earlier request, a text")

    def follows(self, params: Params) -> str | None:
        return (params.ask or {}).get("after")

    # ---- what is taken
    def given(self, request: Request, left: Callable[[str], RetainedKV | None]) -> InjectedKV | None:
        after = self.follows(request.params)
        if after is None:
            return None
        plan = request.state.get(NAME)
        if plan is None:
            plan = request.state[NAME] = self._plan(request, left(after))
            request.recalled = 0
        at = request.computed
        piece = next((piece for piece in plan.pieces if piece.start <= at < piece.stop), None)
        if piece is None:
            if plan.pieces and at >= plan.pieces[-1].stop:
                plan.close()
            return None
        assert plan.source is not None
        request.recalled += piece.stop - at
        rows = [self.moved(*each, piece.shift) for each in _between(plan.source, at - piece.shift, piece)]
        return InjectedKV(rows, not (piece.after or plan.source.approximate))

    def moved(self, layer: int, k: Tensor, v: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, `shift` places later."""
        return turned(self.model, layer, k, shift), v

    def _plan(self, request: Request, left: RetainedKV | None) -> ReusePlan:
        if left is None:
            return ReusePlan(None, ())
        found = pieces(left.tokens, request.prompt, self.knobs.least, self.knobs.repair)
        return ReusePlan(left.kv.fork(), found) if found else ReusePlan(None, ())

    # ---- decode
    def rows(self, request: Request) -> int:
        upto = self._upto(request)
        return super().rows(request) if upto is None else upto - request.computed

    def own(self, request: Request, budget: int, phase: Phase) -> Span | None:
        upto = self._upto(request)
        return None if upto is None else following(request, budget, upto, phase)

    @staticmethod
    def _upto(request: Request) -> int | None:
        """The place where the next rows that need not be computed begin; None: none are to come."""
        plan = request.state.get(NAME) if request.prefilling else None
        return None if plan is None else next((p.start for p in plan.pieces if p.start > request.computed), None)


def turned(model: Model, layer: int, k: Tensor, shift: int) -> Tensor:
    """Keys [H, r, D] that lie `shift` places later."""
    return model.rotate(layer, k, shift) if shift else k


def _between(source: KV, start: int, piece: ReusedPiece) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer, keys and values of the rows from `start` on that a piece takes, as the model made them."""
    for i, layer in enumerate(source.layers):
        (part,) = layer.read()
        yield i, *part.between(start, piece.stop - piece.shift)


def pieces(old: Sequence[int], new: Sequence[int], least: int, repair: int) -> list[ReusedPiece]:
    """Runs of tokens that a prompt has in common with a text, without the prompt's last token and the first `repair`
    tokens after an edit."""
    old, new = list(old), list(new)
    most = min(len(old), len(new))
    head = next((i for i in range(most) if old[i] != new[i]), most)
    tail = next((i for i in range(most - head) if old[-1 - i] != new[-1 - i]), most - head)
    between = common(old[head : len(old) - tail], new[head : len(new) - tail], least)
    runs = [(0, 0, head), *((head + a, head + b, size) for a, b, size in between)]
    runs.append((len(old) - tail, len(new) - tail, tail))
    found: list[ReusedPiece] = []
    after = False
    for at, to, size in runs:
        after = after or (at, to) != (0, 0)
        start, stop = to + (repair if after else 0), min(to + size, len(new) - 1)
        if size >= least and start < stop:
            found.append(ReusedPiece(start, stop, to - at, after))
    return found
