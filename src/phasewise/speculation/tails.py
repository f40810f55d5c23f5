"""The model's own KV, lent to a drafter: rows behind a request's own, which are gone when the drafter is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from phasewise.request.counters import Counters
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.draft_rows import DraftRows
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend

if TYPE_CHECKING:
    from phasewise.model.thinned import Thinned
    from phasewise.request.request import Request

COUNTED = ("rows", "kv_bytes_read", "kv_bytes_written", "expert_loads")  # as the model's own


class Tails:
    """The KV of self-drafting: rows that the model itself, without some sub-layers, writes below each request's last
    token, on top of the KV that the whole model has left there. Nothing is copied. It is to the model what a companion
    is to a second model.

    Rows are written only while the requests are `lent`, at most as many as the step has reserved (`room`), and are
    never committed: afterwards rows, positions and what methods keep beside them are as before, whoever raised. Layers
    may hold different numbers of such rows, as an attention that does not run writes none. They read all that is in the
    KV, whatever attend and evict methods are in force, and show nobody anything. `model` runs them.
    """

    def __init__(self, name: str, model: Thinned, counters: Counters) -> None:
        self.model, self.counters = model, counters  # the engine's
        # nobody decodes with these
        self.phase = Phase(name, decode=None, attend=_Everything())  # type: ignore[arg-type]
        self._replaying = Phase(name, decode=None, attend=_Before())  # type: ignore[arg-type]
        self.optional: Callable[[Request], bool] = lambda request: False
        self.text: Callable[[Request], Sequence[int]] = lambda request: request.tokens
        self.beyond = 0  # rows behind every prompt that stand for no token
        self._halves = 0  # of a (row, layer) pair that is still to be counted
        self._rows: dict[str, DraftRows] = {}  # by request: its pending token, and the draft below that

    @contextmanager
    def lent(self, requests: Sequence[Request]) -> Iterator[None]:
        """They bring nothing but their last known token next, and no rows of theirs are under way."""
        for request in requests:
            assert request.kv is not None and request.computed == request.known - 1
            assert not any(layer.fresh for layer in request.kv.layers)
        try:
            yield
        finally:
            self._rows.clear()
            for request in requests:
                if request.kv is not None:
                    request.kv.commit(0)

    @staticmethod
    def room(request: Request) -> int:
        """Rows that may be written behind the request's own now; none where layers have lost their KV."""
        assert request.kv is not None
        return request.kv.spare if all(layer.slabs for layer in request.kv.layers) else 0

    # ---- the members of a DraftBackend
    def lag(self, request: Request) -> int:
        return 0

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        raise AssertionError("it never lags behind")

    def reserve(self, request: Request, rows: int) -> bool:
        return rows - request.computed <= self.room(request)

    def root(self, requests: Sequence[Request]) -> Tensor:
        """Rows of the last layer [n, d] after each request's pending token, below which `grow` may go on."""
        return self._run([self._below(request, request.tokens[-1:], [-1]) for request in requests])

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        """Rows of the last layer [all new nodes, d], request by request; each sees its ancestors alone."""
        below = [(each.request, each.tokens, [parent + 1 for parent in each.parents]) for each in levels]
        return self._run([self._below(*each) for each in below])

    def logits(self, x: Tensor) -> Tensor:
        """Logits float32 [n, V] of what `root` or `grow` has given."""
        return self.model.head(x)

    def _below(self, request: Request, tokens: Sequence[int], parents: Sequence[int]) -> Span:
        rows = self._rows.setdefault(request.id, DraftRows())
        first = len(rows)
        sees = rows.add(tokens, parents)
        start = request.computed + self.beyond
        chain = range(start + first, start + first + 1)
        positions = chain if sees is None else [start + depth for depth in rows.depths[first:]]
        assert request.kv is not None
        return Span(request, request.kv, self.phase, tokens, positions, sees, first=first)

    # ---- what would have been said
    def replay(self, request: Request, start: int, stop: int, model: Thinned) -> Tensor:
        """Rows of the last layer [stop - start, d] that `model`, not packed, makes of known tokens, as though the text
        from `start` on had not been computed: they see what came before it, and each other. One pass; the rows are gone
        when it ends."""
        assert request.kv is not None and stop - start <= self.room(request)
        with self.lent([request]):
            tokens, positions = request.tokens[start:stop], range(start + self.beyond, stop + self.beyond)
            span = Span(request, request.kv, self._replaying, tokens, positions, note=positions.start)
            return self._run([span], model)

    def _run(self, spans: Sequence[Span], model: Thinned | None = None) -> Tensor:
        model, own, engine = model or self.model, Counters(), self.counters
        x = forward(model, spans, own).x
        engine.draft_forwards += 1
        engine.draft_depth += model.depth
        engine.head_rows += own.rows
        pairs, self._halves = divmod(self._halves + own.rows * model.route.sublayers, 2)
        engine.row_layers += pairs
        for name in COUNTED:
            engine.count(name, getattr(own, name))
        return x


class _Everything(Attend):
    """Rows read all before them."""

    everything = True

    def plan(self, span: Span) -> AttentionPlan:
        return EVERYTHING


class _Before(Attend):
    """Rows of a replay, whose span's note is where it starts, read nothing of what is there from that position on but
    each other."""

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    @staticmethod
    def attend(reads: Sequence[Read]) -> list[Tensor]:
        return [read.attend(_before(read, read.span.note)) for read in reads]


def _before(read: Read, start: int) -> Tensor:
    """Bool [1 | h, R, N]."""
    seen = read.part.positions < start
    seen[:, read.part.n :] = True
    return seen[:, None].expand(-1, read.q.shape[0], -1)
