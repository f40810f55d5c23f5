"""One token per step from the last row's logits: the plain way, and the reference of every other method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.request.request import Request
from phasewise.speculation.loop import pending, sure, sure_span, told
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome, draw_outcomes, slice_span
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Autoregressive(Method):
    """Known tokens that are not computed yet go through as slices; the last one's logits give the next token. Tokens
    that are the only ones left (a grammar's) go along with the one before them."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("decode", plain_prompts=True, single_rows=True)

    def bind(self, host: Host) -> _Autoregressive:
        return _Autoregressive(host)


class _Autoregressive(Decode):
    def __init__(self, host: Host) -> None:
        self.host = host

    def rows(self, request: Request) -> int:
        return pending(request) + len(sure(self.host, request))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = []
        for request, budget in zip(requests, budgets):
            follows = sure(self.host, request)[: budget - 1]
            spans.append(sure_span(request, follows, phase) if follows else slice_span(request, budget, phase))
        return told(self.host, spans)

    def reach(self, context: int) -> int:
        return ENDLESS

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        return draw_outcomes(self.host, spans, hidden)
