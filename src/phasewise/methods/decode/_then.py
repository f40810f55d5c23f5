"""Lets decode methods for prompts alone leave every token after the prompt to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.kv.retained import InjectedKV, RetainedKV
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method

FIX = "choose one for what follows the prompt, such as autoregressive or speculative"


def checked(name: str, then: Any) -> None:
    """Raise UserError unless the method `name` can leave what follows the prompt to the method `then`."""
    if not isinstance(then, Method):
        raise UserError(f"{name}: then={then!r} must be an object, such as Autoregressive()")
    traits = then.traits
    if catalog.THEN in catalog.parts_of(type(then)) or traits.added_rows or traits.brings:
        raise UserError(f"{name}: then={_named(then)} acts on prompts as well: {FIX}")
    if traits.injects_kv:
        raise UserError(f"{name}: then={_named(then)} takes rows of prompts from elsewhere as well: {FIX}")
    if not traits.plain_prompts:
        raise UserError(f"{name}: then={_named(then)} computes prompts in a way of its own: {FIX}")
    if traits.unordered or traits.block > 1:
        raise UserError(f"{name}: then={_named(then)} does not draw one token after another: {FIX}")


def _named(then: Any) -> str:
    try:
        return catalog.name_of("decode", then)
    except UserError:
        return type(then).__name__


def following(request: Request, budget: int, stop: int, phase: Phase) -> Span:
    """The tokens of a prompt that come next, before position `stop`: at most `budget` of them, or all of them where a
    method needs what is computed in one piece."""
    assert request.kv is not None
    start = request.computed
    end = stop if phase.whole else min(start + budget, stop)
    return Span(request, request.kv, phase, request.tokens[start:end], range(start, end))


class Handing(Decode):
    """A runtime that has `then`, the runtime of `method`, decode. It forwards all that it does not do otherwise."""

    def __init__(self, host: Host, method: Any) -> None:
        self.then: Decode = host.bind(method)
        self.then_asks: tuple[str, ...] = method.traits.asks
        self.drawer, self.beside = self.then.drawer, self.then.beside
        self.token_rows = self.then.token_rows

    def check(self, params: Params) -> None:
        if not set(params.ask or ()).isdisjoint(self.then_asks):
            self.then.check(params)

    def reach(self, context: int) -> int:
        return self.then.reach(context)

    def given(self, request: Request, left: Callable[[str], RetainedKV | None]) -> InjectedKV | None:
        return self.then.given(request, left)

    def follows(self, params: Params) -> str | None:
        return self.then.follows(params)

    def bring(self, verb: str, chosen: Any) -> Any:
        return self.then.bring(verb, chosen)

    def displace(self, rows: int) -> None:
        self.then.displace(rows)

    def close(self) -> None:
        self.then.close()

    def own(self, request: Request, budget: int, phase: Phase) -> Span | None:
        """The span of a request whose rows `then` is not to propose."""
        return None

    def rows(self, request: Request) -> int:
        return self.then.rows(request)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = [self.own(request, budget, phase) for request, budget in zip(requests, budgets)]
        rest = [i for i, span in enumerate(spans) if span is None]
        if rest:  # all at once: second models guess for all of them in one pass
            for i, span in zip(rest, self.then.propose([requests[i] for i in rest], [budgets[i] for i in rest], phase)):
                spans[i] = span
        return [span for span in spans if span is not None]

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        return self.then.accept(spans, hidden)
