"""decode: which rows does a request bring, and what is made of the result?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from phasewise.step.span import Span
from phasewise.verbs.sample import Context, choose, draw

if TYPE_CHECKING:
    from phasewise.request.pool import Pool
    from phasewise.request.request import Request
    from phasewise.request.score import Score
    from phasewise.step.phase import Hidden, Phase
    from phasewise.verbs.host import Host


@dataclass(slots=True)
class Outcome:
    """What became of a span: its rows to keep in the KV (the first `keep`, or a path), and the tokens to emit."""

    keep: int | list[int]
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    scores: Mapping[int, Score] = field(default_factory=dict)  # by position; the engine's, where a request asks
    pool: Pool | None = None  # likewise
    origin: str = ""  # of all its tokens, where they were neither guessed nor drawn one after another (`ORIGINS`) ...
    odds: Sequence[float] = ()  # ... and the probability that each then had
    again: int = 0  # of the rows that are there once these are kept, none of the prompt, the last to compute once more

    @property
    def kept(self) -> int:
        return self.keep if isinstance(self.keep, int) else len(self.keep)


class Decode(Protocol):
    """decode: which rows does a request bring, and what is made of the result?

    Optional:
        unit: int  -- rows of a block, where rows see later rows of their own block: prefixes are shared in whole blocks
        singly: bool  -- of a runtime that brings one row at a time, once a prompt is computed, if it is given no more:
            what `skip` methods with rows that run late need
        given(request: Request, left: Callable[[str], Left | None]) -> Given | None  -- of a runtime: asked while a
            prompt is not complete, before its first row and after each step: finished keys and values of the tokens
            that come next, never of the last, or in the place of rows that are there. `left` finds KV that a request
            has left, by its id; with such a method requests that finish leave theirs (kv/left.py). Methods that look at
            a prompt's rows, or drop some, are refused beside it, but for those that say `recalls`
        leaves: bool  -- of such a runtime, False: it takes nothing from other requests, and they leave it nothing
        sparing: bool  -- of such a runtime, True: most rows of every prompt are never computed, and requests that ask
            about them (`prompt_logprobs`, `pooling`) are refused
        follows(params: Params) -> str | None  -- of a runtime with `given`: the id of the request whose KV it will look
            for, so that a placement may start it where that finished
        adds: int  -- of a method: rows that it adds to every prompt and that stand for no token; answers say how many
        margin: int  -- rows beyond those of its text that a request may bring to a step, where these may be more than
            MARGIN: who could not find room for them in the KV budget is refused at once
        plain_prompts: bool  -- of a method that computes prompts as plain causal slices: recipes that differ in such a
            decode method alone share cached prefixes
        brings: tuple  -- of attend, evict and skip those that it has runtimes of its own for: its runtime's
            `bring(verb, chosen)` gives them (engine/binding.py)
        scattered: bool  -- of a runtime, True: it draws tokens before those in front of them are known, and requests
            that ask for log-probabilities, or something of the sample method (`asks`), are refused. All others draw
            them one after another, each after a row of its own, of the last rows kept: there scores are read off
        composes: tuple  -- of these, the verbs for which it takes what the user chose as `chosen`
    """

    def rows(self, request: Request) -> int:
        """Rows the request would like to bring to the next step (at least 1)."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        """One span per request, of at most its budget of rows (a method with a smallest unit may exceed it by one)."""
        ...

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        """One outcome per span. Pure as to the engine: it changes neither KV nor the request's tokens."""
        ...


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
    """Whether known tokens other than the last are still to be computed (a prompt, or a replay after preemption)."""
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
            if hasattr(host.sample, "exclude"):  # before anything is judged by what is likely
                host.sample.exclude(logits, contexts)
            chosen = draw(host.sample(shape(logits, done), contexts), contexts)
        host.counters.head_rows += len(done)
        for tokens, token in zip(drawn, chosen):
            tokens.append(token)
    return outcomes
