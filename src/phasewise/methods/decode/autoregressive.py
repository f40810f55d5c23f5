"""One token per step from the last row's logits: the plain way, and the reference of every other method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.request.request import Request
from phasewise.speculation.loop import pending, slices, told
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome, draw_outcomes
from phasewise.verbs.host import ENDLESS, Host


@dataclass(frozen=True)
class Autoregressive:
    """Known tokens that are not computed yet go through as slices; the last one's logits give the next token."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    plain_prompts: ClassVar[bool] = True

    def bind(self, host: Host) -> _Autoregressive:
        return _Autoregressive(host)


class _Autoregressive:
    rows = staticmethod(pending)

    def __init__(self, host: Host) -> None:
        self.host = host

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        return told(self.host, slices(requests, budgets, phase))

    def reach(self, context: int) -> int:
        return ENDLESS

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        return draw_outcomes(self.host, spans, hidden)
