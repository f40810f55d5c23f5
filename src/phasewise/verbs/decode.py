"""decode: which rows does a request bring, and what is made of the result?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.step.span import Span
from phasewise.verbs.sample import Context, choose, draw
from phasewise.verbs.slot import SlotRuntime

if TYPE_CHECKING:
    from phasewise.kv.retained import InjectedKV, RetainedKV
    from phasewise.request.params import Params
    from phasewise.request.pool import Pool
    from phasewise.request.request import Request
    from phasewise.request.score import Score
    from phasewise.step.phase import Hidden, Phase
    from phasewise.verbs.host import Host


@dataclass(slots=True)
class Outcome:
    """The outcome of a span: its rows to keep in the KV (the first `keep`, or a path), and the tokens to emit."""

    keep: int | list[int]
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    scores: Mapping[int, Score] = field(default_factory=dict)  # by position; the engine's, where a request asks
    pool: Pool | None = None  # likewise
    origin: str = ""  # of all its tokens, where they were neither guessed nor drawn one after another (`ORIGINS`) ...
    odds: Sequence[float] = ()  # ... and the probability that each then had
    joined: bool = False  # its tokens are a group, which is to enter the model as one row
    said_by: Tensor | None = None  # rows [n, d] for the head that its last n tokens were drawn from, where none is kept
    again: int = 0  # of the rows that are there once these are kept, none of the prompt, the last to compute once more

    @property
    def kept(self) -> int:
        return self.keep if isinstance(self.keep, int) else len(self.keep)


class Decode(SlotRuntime, ABC):
    """decode: which rows does a request bring, and what is made of the result?

    Runtimes inherit from this class: what they leave out is as it is here. One that hands on to another one, or holds
    one, forwards all of it.
    """

    @abstractmethod
    def rows(self, request: Request) -> int:
        """Rows the request would like to bring to the next step (at least 1)."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        """One span per request, of at most its budget of rows (a method with a smallest unit may exceed it by one)."""

    @abstractmethod
    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        """One outcome per span. Pure as to the engine: it changes neither KV nor the request's tokens."""

    def check(self, params: Params) -> None:
        """Raise UserError, naming it, where something in `Params.ask` that the method takes cannot be honoured. Called
        before a request with such a name is admitted, from any thread."""

    def given(self, request: Request, left: Callable[[str], RetainedKV | None]) -> InjectedKV | None:
        """Finished keys and values of the tokens that come next, never of the last, or in the place of rows that are
        there. Asked, with `Traits.injects_kv`, while a prompt is not complete: before its first row and after each
        step. `left` finds the KV that a request has left, by its id (kv/retained.py)."""
        return None

    def follows(self, params: Params) -> str | None:
        """The id of the request whose KV `given` will look for: a placement may start it where that finished."""
        return None

    def bring(self, verb: str, chosen: Any) -> Any:
        """The runtime for a slot of `Traits.brings`; `chosen` is the user's, where the method composes with it."""
        raise NotImplementedError(f"{type(self).__name__} brings no {verb}")

    def displace(self, rows: int) -> None:
        """Told that tokens after the prompt stand so many positions further on, as rows before them stand for none."""

    def close(self) -> None:
        """Told when the engine is closed."""


def slice_span(request: Request, rows: int, phase: Phase) -> Span:
    """The next known tokens that are not computed yet, at most `rows` of them and never across the prompt's end; a
    prompt of which a method needs the `whole` to its end."""
    assert request.kv is not None
    start = request.computed
    if request.prefilling:
        end = request.prompt_len if phase.whole else min(start + rows, request.prompt_len)
    else:
        end = min(start + rows, request.known)
    return Span(request, request.kv, phase, request.tokens[start:end], range(start, end))


def catching_up(request: Request) -> bool:
    """True if known tokens other than the last are still to be computed (a prompt, or a replay after preemption)."""
    return request.prefilling or request.known - request.computed > 1


def draw_outcomes(
    host: Host, spans: Sequence[Span], hidden: Hidden, shape: Callable[[Tensor, list[Span]], Tensor] | None = None
) -> list[Outcome]:
    """Plain decoding: a token for every span that reaches its request's last known token.

    `shape`, if given, replaces the logits [n, V] of those spans (two-model methods).
    """
    outcomes: list[Outcome] = []
    done: list[Span] = []
    drawn: list[list[int]] = []  # where their tokens go
    for span in spans:
        outcomes.append(outcome := Outcome(span.rows, [*span.sure], len(span.sure), len(span.sure)))
        if span.reaches_end:
            done.append(span)
            drawn.append(outcome.tokens)
    if done:
        x = hidden.rows([span.start + span.rows - 1 for span in done])
        contexts = [Context(span.request, span.sure) for span in done]
        if shape is None:
            chosen = choose(host.sample, host.model, x, contexts)
        else:
            logits = host.model.head(x)
            host.sample.exclude(logits, contexts)  # before anything is judged by what is likely
            chosen = draw(host.sample(shape(logits, done), contexts), contexts)
        host.counters.head_rows += len(done)
        for tokens, token in zip(drawn, chosen):
            tokens.append(token)
    return outcomes
