"""What engine tests share: stepping with every invariant checked, and methods that misbehave for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phasewise.engine.engine import Engine
from phasewise.engine.invariants import check
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Purpose, uniform
from tests import oracle, tiny
from tests.laws import settings as laws


class Boom(Exception):
    """What the misbehaving methods raise."""


class Faulty:
    """A runtime method that raises in `verbs` whenever a request whose id is in `ids` takes part, `times` times."""

    def __init__(self, inner: Any, verbs: Sequence[str], ids: set[str], times: int = 1 << 30) -> None:
        self._inner, self._verbs, self._ids, self._left = inner, verbs, ids, times

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._verbs:
            return value

        def checked(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)  # after the work is done: side effects and all
            if self._left and self._ids & set(_requests(args)):
                self._left -= 1
                raise Boom(name)
            return result

        return checked


def _requests(value: Any) -> list[str]:
    """The ids of all requests somewhere in the arguments of a call."""
    if isinstance(value, Request):
        return [value.id]
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in _requests(item)]
    for attribute in ("request", "span"):
        if hasattr(value, attribute):
            return _requests(getattr(value, attribute))
    return []


def break_decode(engine: Engine, verbs: Sequence[str], ids: set[str], times: int = 1 << 30) -> None:
    """Let the engine's decode method raise for these requests."""
    decode = Faulty(engine.parts.phases[0].decode, verbs, ids, times)
    for phase in engine.parts.phases:
        object.__setattr__(phase, "decode", decode)


def step_all(engine: Engine, requests: Sequence[Request], each: Callable[[], None] | None = None) -> None:
    """Step until all have left, checking everything after every step; then nothing may be left behind."""
    for _ in range(3000):
        if all(r.left is not None for r in requests):
            break
        engine.step()
        check(engine)
        if each is not None:
            each()
    else:
        raise AssertionError(f"still running: {[r for r in requests if r.left is None]}")
    check(engine)
    engine.forget_prefixes()
    assert engine.idle and engine.kv_bytes == 0


def sampled(n: int = 8, seed: int = 1) -> Params:
    return Params(max_tokens=n, temperature=1.0, seed=seed, ignore_eos=True)


def same(request: Request, full: Sequence[int]) -> bool:
    """Whether the request got the tokens `full` (or the first of them, if it was cancelled), but for what follows a
    draw that hung on the last bits."""
    at = next((i for i, (a, b) in enumerate(zip(request.out, full)) if a != b), None)
    if at is None:
        cancelled = request.left is not None and request.left.how == "cancelled"
        return request.n_out <= len(full) if cancelled else request.n_out == len(full)
    known = [*request.prompt, *full[:at]]
    logits = oracle.logits(tiny.checkpoint(), known)[-1]
    if request.params.greedy:
        best = logits.topk(2).values
        return float(best[0] - best[1]) < 1e-4
    edges = (logits / request.params.temperature).double().softmax(-1).cumsum(-1)
    return float((edges - uniform(request.params.seed, len(known), Purpose.SAMPLE)).abs().min()) < 1e-6


def alone(request: Request) -> list[int]:
    """The tokens the request gets with an engine to itself."""
    return tiny.plain([request.prompt], request.params)[0]


def method_options(*verbs: str) -> list[dict[str, str]]:
    """Options that put every method of these verbs to work."""
    return [laws.options(verb, name) for verb, name in laws.discovered() if verb in verbs]
