"""Any drafter's guesses, as many as pay: sized by what rows cost here, by what was right and by who shares the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phasewise.catalog import part
from phasewise.request.request import Request
from phasewise.speculation.planner import SPIKE, Chances, Costs, Line, Record, kind, kinds, plan, reached, sort_of
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host

NAME = "paced"
SHARE = 0.01  # of the time that may go into looking for guesses while none pays
PAUSE = 4096  # steps without looking, at most
MEMORY = 0.9  # what a step leaves of the balance before it
LEAST, MOST_LEAST = 0.01, 0.3  # how likely guesses must be to be looked at, at least and at most
PROBE = 32  # a second model guesses as far as it may every so many steps: deep guesses are known from trials alone


@dataclass(frozen=True)
class Paced:
    """The guesses of the drafter `of`, cut to those worth their rows.

    What a step takes by its rows is measured as it goes; how likely a guess is, is counted per request and over all, by
    depth and by what its drafter says of it, and guesses that were cut count too, for the text shows whether they were
    right. Of the guesses of all requests in a step those are kept that make the product of the requests' speeds
    largest. While none pays, it looks only now and then. A second model's guesses have a price of their own: it is
    asked for as many as pay.

    Sizes hang on the clock, tokens do not: where guesses might change tokens (drawn ones, or under a lossy verifier)
    they are left as they are.
    """

    of: Any = part("draft", "suffix_decoding:branches=1")

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def bind(self, host: Host) -> Pacer:
        return Pacer(host.bind(self.of))


class Pacer:
    """What it remembers of a request is a `Record`, of steps and kinds of guesses what all requests share."""

    def __init__(self, of: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.of, self.clock = of, clock
        self.costs, self.chances = Costs(), Chances()
        self.sized: Callable[[Request], bool] = lambda request: False
        self.companion = getattr(of, "companion", None)
        self.top: int = getattr(of, "top", 0)
        self.shared: bool = getattr(of, "shared", False)
        self._pause = 0  # steps to come without looking
        self._balance = 0.0  # seconds gained by late steps, less those spent on looking
        self._looking = 0.0  # seconds that looking takes
        self._odd = False  # whether the last look took far longer than those before
        self._node = 0.0  # seconds that a second model takes for a node
        self._step: tuple[int, float] | None = None  # requests of the step under way, and when it began
        self._number = 0

    @property
    def largest(self) -> int:
        return int(getattr(self.of, "largest", 0))

    def reach(self, context: int) -> int:
        say = getattr(self.of, "reach", None)
        return context if say is None else int(say(context))

    def draws(self, request: Request) -> bool:
        say = getattr(self.of, "draws", None)
        return say is None or bool(say(request))

    def size(self, request: Request) -> int:
        return 0 if self._pause and self.sized(request) else int(self.of.size(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        began = self.clock()
        free = [self.sized(request) for request in requests]
        if not any(free):
            return self._ask(requests, budgets)
        drafts: list[Draft | None] = [None] * len(requests)
        if self._pause:
            self._pause -= 1
            asked = [i for i, sized in enumerate(free) if not sized]
            if asked:
                own = self._ask([requests[i] for i in asked], [budgets[i] for i in asked])
                for i, draft in zip(asked, own):
                    drafts[i] = draft
        else:
            line = self.costs.near(len(requests)) or Line(1.0, 1.0)  # unknown: a step without guesses will show
            copies = self.companion is None
            if hasattr(self.of, "least"):  # a guess is worth its row if it makes tokens in a larger share than it costs
                self.of.least = min(MOST_LEAST, max(LEAST, 0.5 * len(requests) * line.row / line.base))
            drafts, gain = (self._cut if copies else self._bounded)(requests, budgets, free, line)
            self._weigh(self.clock() - began, gain, line)
        self._step = len(requests), self.clock()
        return drafts

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], *tops: Tensor) -> None:
        if self._step is not None:
            n, began = self._step
            self._step = None
            if len(spans) == n and all(span.note is not None or span.rows == 1 for span in spans):
                self.costs.note(n, sum(span.rows for span in spans), self.clock() - began)
        self.of.learn(spans, hidden, outcomes, *tops)

    def close(self) -> None:
        if hasattr(self.of, "close"):
            self.of.close()

    def _ask(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = self.of.draft(requests, budgets)
        return drafts

    def _weigh(self, spent: float, gain: float, line: Line) -> None:
        """After a step with guesses worth `gain`: whether it pays to look in the next steps."""
        most = SPIKE * (self._looking or SHARE * line.base)
        self._odd = spent > most and not self._odd  # a long prompt is read once, and pauses happen: not twice in a row
        spent = most if self._odd else spent
        self._looking = spent if not self._looking else MEMORY * self._looking + (1 - MEMORY) * spent
        self._balance = MEMORY * self._balance + gain * line.base - spent
        if self._balance < 0 and line.row:
            self._pause = min(PAUSE, math.ceil(self._looking / (SHARE * line.base)) - 1)

    def _cut(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: Line
    ) -> tuple[list[Draft | None], float]:
        """Guesses that cost nothing to make: all are made, and those kept that pay. -> guesses, the gain"""
        likely, orders = list[list[float]](), list[list[int]]()
        drafts = [
            None if draft is None else draft.cut(budget) for draft, budget in zip(self._ask(requests, budgets), budgets)
        ]
        for request, draft, sized in zip(requests, drafts, free):
            record = _record(request)
            record.settle(request.tokens, self.chances)
            if draft is None or not draft.tokens or draft.ask or not sized:  # rows that ask go with their guesses
                likely.append([])
                orders.append([])
                continue
            which = kinds(draft, sort_of(self.of, request))
            record.watch(draft, which, request.known)
            found = reached(draft.parents, [record.chance(each, self.chances) for each in which])
            order = sorted(range(len(found)), key=lambda node: -found[node])  # a parent comes before its children
            likely.append([found[node] for node in order])
            orders.append(order)
        best = plan(likely, line)
        for i, (size, order) in enumerate(zip(best.sizes, orders)):
            if free[i] and drafts[i] is not None:
                if not order:
                    continue
                drafts[i] = drafts[i].only(sorted(order[:size])) if size else None  # type: ignore[union-attr]
        return drafts, best.gain

    def _bounded(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: Line
    ) -> tuple[list[Draft | None], float]:
        """Guesses of a second model: as many are made as pay, were each below the one before."""
        self._number += 1
        likely = list[list[float]]()
        for request, budget, sized in zip(requests, budgets, free):
            record = _record(request)
            record.settle(request.tokens, self.chances)
            steps = [record.chance(kind(0, depth), self.chances) for depth in range(budget)] if sized else []
            likely.append(reached(range(-1, len(steps) - 1), steps))
        best = plan(likely, Line(line.base, line.row + self._node))
        probe = not any(best.sizes) or self._number % PROBE == 0
        bounds = [b if probe or not sized else size for b, size, sized in zip(budgets, best.sizes, free)]
        began = self.clock()
        drafts = self._ask(requests, bounds)
        made = sum(len(draft.tokens) for draft in drafts if draft is not None)
        if made:
            each = (self.clock() - began) / made
            self._node = each if not self._node else MEMORY * self._node + (1 - MEMORY) * each
        for request, draft in zip(requests, drafts):
            if draft is not None:
                _record(request).watch(draft, kinds(draft, 0), request.known)
        return drafts, best.gain + (self._node * made / line.base if any(best.sizes) else 0.0)


def _record(request: Request) -> Record:
    record: Record | None = request.state.get(NAME)
    if record is None:
        record = request.state[NAME] = Record()
    return record
