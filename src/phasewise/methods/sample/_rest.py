"""What comes after a method in a chain of sample methods (`then`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Dist


@dataclass(frozen=True, slots=True)
class Rest:
    """The runtime of the next method, with what is optional in `Sample` as it is where that has none."""

    sample: Any

    @property
    def asks(self) -> tuple[str, ...]:
        return tuple(getattr(self.sample, "asks", ()))

    def check(self, params: Params) -> None:
        if params.ask is not None and not params.ask.keys().isdisjoint(self.asks):
            self.sample.check(params)

    def greedy(self, contexts: Sequence[Context]) -> bool:
        return hasattr(self.sample, "greedy") and bool(self.sample.greedy(contexts))

    def among(self, contexts: Sequence[Context]) -> Sequence[Tensor | None]:
        masks: Sequence[Tensor | None] = self.sample.among(contexts) if hasattr(self.sample, "among") else ()
        return masks

    def ahead(self, contexts: Sequence[Context]) -> None:
        if hasattr(self.sample, "ahead"):
            self.sample.ahead(contexts)

    def sure(self, request: Request) -> Sequence[int]:
        found: Sequence[int] = self.sample.sure(request) if hasattr(self.sample, "sure") else ()
        return found

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        if hasattr(self.sample, "exclude"):
            self.sample.exclude(logits, contexts)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        dist: Dist = self.sample(logits, contexts)
        return dist
