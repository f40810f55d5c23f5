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
from phasewise.methods.draft._desk import Desk, Guessed, Order
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
    are drawn by the request's own rules with the target's own random numbers (arXiv 2408.07978). With `judged=equal`
    they are then compared, as chosen ones are: with `--sample standard:coupling=gumbel` more of them are right. With
    `judged=drawn` each comes with the probabilities that it was drawn from, so that the verifier may accept it by
    rejection sampling, as in the paper. The first new guess then takes part in drawing the token that follows a draft.
    That accepts more, tokens follow the target's distribution and are no longer those of plain decoding, and a
    process sends four bytes per token of the vocabulary with each guess. `where=process` gives the draft
    model `threads` of its own: leave the cores for them (`OMP_NUM_THREADS`), or target and draft wait for each other's.
    `where=inline` takes turns with the target, for the same tokens and counters. A process that dies is replaced, and
    after three in a row nothing is guessed any more, with a warning. The draft model's KV lies in its process, and
    `--kv-bytes` does not count it: a row for every token of the requests that are decoding. The first request waits for
    the process to load. Left out: a `k` that is measured.
    """

    model: str = "pocket-draft"
    k: int = 4
    where: Literal["process", "inline"] = "process"
    threads: int = 1  # of the process
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind; judged=drawn: all
    judged: Literal["equal", "drawn"] = "equal"

    paper: ClassVar[str] = "arXiv 2408.11850"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"where": "inline", "k": 3}

    def __post_init__(self) -> None:
        for knob, least in (("k", 2), ("threads", 1), ("chunk", 1)):
            if getattr(self, knob) < least:
                raise UserError(f"pearl: {knob}={getattr(self, knob)} must be at least {least}")
        if self.judged not in ("equal", "drawn"):
            raise UserError(f"pearl: judged={self.judged} must be equal or drawn")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=self.tells, late=self.tells, max_nodes=self.k - 1)

    @property
    def tells(self) -> bool:
        """True if guesses come with what they were drawn from."""
        return self.judged == "drawn"

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
            return Inline(Desk(second, sample, self.tells))
        dtype = str(second.dtype).removeprefix("torch.")
        return Process(Furniture(str(second.files.path), dtype, str(second.device), sample, self.threads, self.tells))


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
    stream: Guessed = field(default_factory=Guessed)
    proposed: int = 0  # of the stream, in this round
    heard: Guessed | None = None  # what has come to go on with the stream, if it was asked for before the round's end

    def hear(self) -> Guessed:
        """Returns the guesses that go on with the stream; waits for them."""
        if self.heard is None:
            self.heard = self.seat.hear(self.key)
        return self.heard

    def follow(self, tokens: Sequence[int]) -> None:
        """The request has these tokens now: a new round begins."""
        new, expected = list(tokens[self.known :]), self.stream.then(self.hear())
        self.stream = expected.part(len(new)) if expected.tokens[: len(new)] == new else Guessed()
        self.known, self.heard = len(tokens), None

    def order(self, request: Request, knobs: PEARL, context: int) -> Order | None:
        """The work of the draft model while the stream's beginning is verified; a long prompt is read in pieces
        first."""
        if request.known >= context:
            return None  # of the draft model, which may be the shorter
        whole = knobs.tells and not request.params.greedy  # which guesses are made may not hang on the number of steps
        if request.known - self.read > knobs.chunk and not whole:
            self.read += knobs.chunk
            return Order(self.key, self.about, request.tokens[: self.read], 0)
        ahead = len(self.stream.tokens)
        n = min(knobs.k, 2 * knobs.k - 1 - ahead, headroom(request) - ahead, context - request.known - ahead)
        if n < 1:
            return None
        self.read = request.known + ahead
        return Order(self.key, self.about, request.tokens + self.stream.tokens, n)

    def fork(self) -> _Line:
        return _Line(self.seat)  # it begins with a pre-verify

    def close(self) -> None:
        if self.about:
            self.seat.forget(self.key)


class _Pearl(Drafter):
    """Lines for requests, and one seat for them all."""

    def __init__(self, knobs: PEARL, host: Host, seat: Seat, context: int) -> None:
        self.knobs, self.host, self.seat, self.context = knobs, host, seat, context
        self._keys, self._passes = count(), seat.passes

    def size(self, request: Request) -> int:
        return min(self.knobs.k - 1, headroom(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        lines = [self._line(request) for request in requests]
        for request, line in zip(requests, lines):
            line.follow(request.tokens)
        self._count()
        sizes = [min(self.size(request), budget) for request, budget in zip(requests, budgets)]
        orders = [line.order(request, self.knobs, self.context) for request, line in zip(requests, lines)]
        self.seat.post([order for order in orders if order is not None])  # worked on while the target runs
        for line, size in zip(lines, sizes):
            line.proposed = min(max(0, size), len(line.stream.tokens))
        return [_chain(line.stream.part(0, line.proposed)) if line.proposed else None for line in lines]

    def draws(self, request: Request) -> bool:
        return self.knobs.tells and not request.params.greedy

    def late(self, request: Request) -> Draft | None:
        line: _Line | None = request.state.get(NAME)
        if line is None or not line.about or line.known != request.known:
            return None  # it was not asked in this step
        next_one = line.stream.then(line.hear()).part(line.proposed, line.proposed + 1)
        self._count()
        return _chain(next_one) if next_one.tokens and next_one.q is not None else None

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass  # the tokens say which guesses were right

    def close(self) -> None:
        self.seat.close()

    def _count(self) -> None:
        """Add the draft model's passes that were heard of since the last time."""
        self.host.counters.draft_forwards += self.seat.passes - self._passes
        self._passes = self.seat.passes

    def _line(self, request: Request) -> _Line:
        line: _Line | None = request.state.get(NAME)
        if line is None:
            line = request.state[NAME] = _Line(self.seat)
        if not line.about:
            line.key, line.about = next(self._keys), request.header() | {"tokens": []}
        return line


def _chain(guesses: Guessed) -> Draft:
    if guesses.q is None:
        return Draft.chain(guesses.tokens)
    return Draft.chain(guesses.tokens, "without_replacement", guesses.q)
