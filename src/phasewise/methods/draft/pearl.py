"""A draft model that guesses while the target verifies (PEARL, arXiv 2408.11850), in a process of its own: exact under
every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, Literal

from torch import Tensor

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.draft._desk import Desk, Order
from phasewise.methods.draft._seat import Furniture, Inline, Process, Seat
from phasewise.model.model import Model
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "pearl"


@dataclass(frozen=True)
class PEARL(Method):
    """A round is one pass of the target and, at the same time, `k` of the draft model. After a rejection the target
    has the pending token alone, and its verdict on the first of the `k` guesses is the token it says next
    (pre-verify). Once that is right, every round verifies the k - 1 guesses that are left while the draft model goes
    on below them; the token that follows them is compared with the first of the new guesses (post-verify). So a run
    of right guesses goes on over many rounds, `k` tokens each. `k` is best about the number of draft passes that one
    of the target takes.

    What is guessed hangs on a request's tokens and rounds, never on time: the engine waits for the draft model. Guesses
    are drawn by the request's own rules with the target's own random numbers (arXiv 2408.07978), and are then compared,
    as chosen ones are: with `--sample standard:coupling=gumbel` more of them are right. `where=process` gives the draft
    model `threads` of its own: leave the cores for them (`OMP_NUM_THREADS`), or target and draft wait for each other's.
    `where=inline` takes turns with the target, for the same tokens and counters. A process that dies is replaced, and
    after three in a row nothing is guessed any more, with a warning. The draft model's KV lies in its process, and
    `--kv-bytes` does not count it: a row for every token of the requests that are decoding. The first request waits for
    the process to load. Left out: probabilities sent along for rejection sampling, and a `k` that is measured.
    """

    model: str = "pocket-draft"
    k: int = 4
    where: Literal["process", "inline"] = "process"
    threads: int = 1  # of the process
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2408.11850"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"where": "inline", "k": 3}

    def __post_init__(self) -> None:
        for knob, least in (("k", 2), ("threads", 1), ("chunk", 1)):
            if getattr(self, knob) < least:
                raise UserError(f"pearl: {knob}={getattr(self, knob)} must be at least {least}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.k - 1)

    def bind(self, host: Host) -> _Pearl:
        second = host.load(self.model)
        ours, theirs = second.config.vocab, host.model.config.vocab
        if ours != theirs:
            raise UserError(
                f"pearl: {self.model!r} has {ours:,} tokens in its vocabulary, the model has {theirs:,}: "
                f"give one made for the same tokenizer"
            )
        return _Pearl(self, host, self._seat(second, _sampling(host.sample)), second.config.max_positions)

    def _seat(self, second: Model, sample: str) -> Seat:
        if self.where == "inline":
            return Inline(Desk(second, sample))
        dtype = str(second.dtype).removeprefix("torch.")
        return Process(Furniture(str(second.files.path), dtype, str(second.device), sample, self.threads))


def _sampling(sample: Any) -> str:
    """The text of the engine's sample method, which travels. Of one without a text the guesses of plain rules are
    taken: they only have to be good."""
    try:
        return catalog.spell("sample", sample)
    except UserError:
        return f"standard:coupling={sample.coupling}"


@dataclass(slots=True)
class _Line(Drawer):
    """Expectations of one request. `stream`: the guesses that follow its first `known` tokens, none of which has
    been found wrong; without any, the next round is a pre-verify."""

    seat: Seat
    key: int = -1
    about: dict[str, Any] = field(default_factory=dict)
    known: int = 0
    read: int = 0  # tokens that the draft model has been told of
    stream: list[int] = field(default_factory=list)

    def follow(self, tokens: Sequence[int], guesses: Sequence[int]) -> None:
        """The request has these tokens now, and these guesses have come to go on with the stream."""
        new, expected = list(tokens[self.known :]), self.stream + list(guesses)
        self.stream = expected[len(new) :] if expected[: len(new)] == new else []
        self.known = len(tokens)

    def order(self, request: Request, knobs: PEARL, context: int) -> Order | None:
        """The work of the draft model while the stream's beginning is verified; a long prompt is read in pieces
        first."""
        if request.known >= context:
            return None  # of the draft model, which may be the shorter
        if request.known - self.read > knobs.chunk:
            self.read += knobs.chunk
            return Order(self.key, self.about, request.tokens[: self.read], 0)
        ahead = len(self.stream)
        n = min(knobs.k, 2 * knobs.k - 1 - ahead, headroom(request) - ahead, context - request.known - ahead)
        if n < 1:
            return None
        self.read = request.known + ahead
        return Order(self.key, self.about, request.tokens + self.stream, n)

    def fork(self) -> _Line:
        return _Line(self.seat)  # it begins with a pre-verify

    def close(self) -> None:
        if self.about:
            self.seat.forget(self.key)


class _Pearl(Drafter):
    """Lines for requests, and one seat for them all."""

    def __init__(self, knobs: PEARL, host: Host, seat: Seat, context: int) -> None:
        self.knobs, self.host, self.seat, self.context = knobs, host, seat, context
        self._keys = count()

    def size(self, request: Request) -> int:
        return min(self.knobs.k - 1, headroom(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        lines, passes = [self._line(request) for request in requests], self.seat.passes
        for request, line in zip(requests, lines):
            line.follow(request.tokens, self.seat.hear(line.key))
        self.host.counters.draft_forwards += self.seat.passes - passes
        sizes = [min(self.size(request), budget) for request, budget in zip(requests, budgets)]
        orders = [line.order(request, self.knobs, self.context) for request, line in zip(requests, lines)]
        self.seat.post([order for order in orders if order is not None])  # worked on while the target runs
        return [Draft.chain(line.stream[:size]) if size > 0 else None for line, size in zip(lines, sizes)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass  # the tokens say which guesses were right

    def close(self) -> None:
        self.seat.close()

    def _line(self, request: Request) -> _Line:
        line: _Line | None = request.state.get(NAME)
        if line is None:
            line = request.state[NAME] = _Line(self.seat)
        if not line.about:
            line.key, line.about = next(self._keys), request.header() | {"tokens": []}
        return line
