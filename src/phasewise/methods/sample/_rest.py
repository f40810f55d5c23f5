"""A runtime of sample methods that hand on to another one (`then`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from phasewise.verbs.sample import Context, Dist, Sample


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The tokens that two masks (`Sample.among`) allow, int32 [V / 32]; None: all."""
    return one & other if one is not None and other is not None else other if one is None else one


class Chained(Sample):
    """It forwards everything to `then`, the runtime of `method`; who inherits from it changes some."""

    def __init__(self, host: Host, method: Any) -> None:
        self.then: Sample = host.bind(method)
        self.then_asks: tuple[str, ...] = method.traits.asks
        self.coupling = self.then.coupling

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return self.then(logits, contexts)

    def check(self, params: Params) -> None:
        if params.ask is not None and not params.ask.keys().isdisjoint(self.then_asks):
            self.then.check(params)

    def greedy(self, contexts: Sequence[Context]) -> bool:
        return self.then.greedy(contexts)

    def among(self, contexts: Sequence[Context]) -> Sequence[Tensor | None]:
        return self.then.among(contexts)

    def ahead(self, contexts: Sequence[Context]) -> None:
        self.then.ahead(contexts)

    def sure(self, request: Request) -> Sequence[int]:
        return self.then.sure(request)

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        self.then.exclude(logits, contexts)
