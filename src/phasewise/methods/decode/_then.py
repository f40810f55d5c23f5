"""What decode methods for prompts alone leave to another one: every token after the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.host import Host

FIX = "choose one for what follows the prompt, such as autoregressive or speculative"


def checked(name: str, then: Any) -> None:
    """Raise UserError unless the method `name` can leave what follows the prompt to the method `then`."""
    if not is_dataclass(then) or isinstance(then, type):
        raise UserError(f"{name}: then={then!r} must be an object, such as Autoregressive()")
    if catalog.THEN in catalog.parts_of(type(then)) or any(getattr(then, say, 0) for say in ("adds", "brings")):
        raise UserError(f"{name}: then={_named(then)} acts on prompts as well: {FIX}")
    if not getattr(then, "plain_prompts", False):
        raise UserError(f"{name}: then={_named(then)} computes prompts in a way of its own: {FIX}")


def bound(host: Host, name: str, then: Any) -> Any:
    """The runtime of `then`. Raises UserError where it does more than draw one token after another."""
    runtime = host.bind(then)
    if hasattr(runtime, "given"):
        raise UserError(f"{name}: then={_named(then)} takes rows of prompts from elsewhere as well: {FIX}")
    if getattr(runtime, "scattered", False) or getattr(runtime, "unit", 1) > 1:
        raise UserError(f"{name}: then={_named(then)} does not draw one token after another: {FIX}")
    return runtime


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


class Handing:
    """A runtime that has `then` decode, and says of itself what that one says, wherever nothing else is said."""

    def __init__(self, then: Any) -> None:
        self.then = then

    @property
    def singly(self) -> bool:
        return bool(getattr(self.then, "singly", False))

    @property
    def margin(self) -> int:
        return int(getattr(self.then, "margin", 0))

    @property
    def asks(self) -> tuple[str, ...]:
        return tuple(getattr(self.then, "asks", ()))

    def check(self, params: Params) -> None:
        if self.then_asked(params):
            self.then.check(params)

    def then_asked(self, params: Params) -> bool:
        """Whether a request asks for something that `then` takes."""
        return not set(params.ask or ()).isdisjoint(getattr(self.then, "asks", ()))

    def reach(self, context: int) -> int:
        return int(self.then.reach(context)) if hasattr(self.then, "reach") else context

    def close(self) -> None:
        if hasattr(self.then, "close"):
            self.then.close()

    def own(self, request: Request, budget: int, phase: Phase) -> Span | None:
        """The span of a request whose rows `then` is not to propose."""
        return None

    def rows(self, request: Request) -> int:
        return int(self.then.rows(request))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = [self.own(request, budget, phase) for request, budget in zip(requests, budgets)]
        rest = [i for i, span in enumerate(spans) if span is None]
        if rest:  # all at once: second models guess for all of them in one pass
            for i, span in zip(rest, self.then.propose([requests[i] for i in rest], [budgets[i] for i in rest], phase)):
                spans[i] = span
        return [span for span in spans if span is not None]

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        outcomes: list[Outcome] = self.then.accept(spans, hidden)
        return outcomes
