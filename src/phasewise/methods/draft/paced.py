"""Any drafter's guesses, as many as pay: sized by what rows cost here, by what was right and by who shares the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar

from torch import Tensor

from phasewise.catalog import part
from phasewise.request.request import Request
from phasewise.speculation.planner import SPIKE, Chances, Costs, Line, Plan, Record, kind, kinds, plan, reached, sort_of
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host

NAME = "paced"
SHARE = 0.01  # of a step's time that may go into looking for guesses while none pays
PAUSE = 4096  # steps without looking, at most
SEEN = 4  # of so many steps without a look, one is timed
MEMORY = 0.9  # what a look leaves of the balance before it
FADES = 0.9  # what a new request leaves of what looking is taken to cost, so that it is tried again
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


@dataclass(slots=True)
class _Paces(Record):
    """What became of one request's guesses, and when it will be looked at again."""

    fresh: bool = True  # it was not looked at yet
    balance: float = 0.0  # seconds that guesses of late were worth, less those spent on looking
    wakes: int = 0  # the step before which there is no looking


class Pacer:
    """What it remembers of a request is a `_Paces`, of steps and kinds of guesses what all requests share."""

    def __init__(self, of: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.of, self.clock = of, clock
        self.costs, self.chances = Costs(), Chances()
        self.sized: Callable[[Request], bool] = lambda request: False
        self.draws: Callable[[Request], bool] = getattr(of, "draws", lambda request: True)
        self.companion = getattr(of, "companion", None)
        self.top: int = getattr(of, "top", 0)
        self.shared: bool = getattr(of, "shared", False)
        self._look = 0.0  # seconds that looking takes, a request
        self._odd = False  # whether the last look took far longer than those before
        self._node = 0.0  # seconds that a second model takes for a node
        self._number = 0  # of the step under way
        self._last = 0.0  # when the one before it had its verdict
        self._drafting: float | None = None  # seconds of it that were spent here, if any

    @property
    def largest(self) -> int:
        return int(getattr(self.of, "largest", 0))

    def reach(self, context: int) -> int:
        say = getattr(self.of, "reach", None)
        return context if say is None else int(say(context))

    def size(self, request: Request) -> int:
        paces: _Paces | None = request.state.get(NAME)
        return int(self.of.size(request)) if paces is None or paces.wakes <= self._number else 0

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        began, n = self.clock(), len(requests)
        free = [self.sized(request) for request in requests]
        if not any(free):
            return self._ask(requests, budgets)
        line = self.costs.near(n) or Line(1.0, 1.0)  # unknown: a step without guesses will show
        if hasattr(self.of, "least"):  # a guess is worth its row if it makes tokens in a larger share than it costs
            self.of.least = min(MOST_LEAST, max(LEAST, 0.5 * n * line.row / line.base))
        drafts = (self._cut if self.companion is None else self._bounded)(requests, budgets, free, line)
        self._drafting = self.clock() - began
        return drafts

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], *tops: Tensor) -> None:
        """A step is timed from verdict to verdict, but for what passed in here."""
        now, drafting, last = self.clock(), self._drafting, self._last
        self._number, self._last, self._drafting = self._number + 1, now, None
        if drafting is not None or not self._number % SEEN:
            rows = 0
            for span in spans:
                rows += span.rows
                if span.note is None and span.rows > 1:
                    break
            else:
                self.costs.note(len(spans), rows, now - last - (drafting or 0.0))
        self.of.learn(spans, hidden, outcomes, *tops)

    def close(self) -> None:
        if hasattr(self.of, "close"):
            self.of.close()

    def _ask(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = self.of.draft(requests, budgets)
        return drafts

    def _looked(self, spent: float, looks: int, line: Line) -> None:
        """So many looks took `spent` seconds."""
        each, most = spent / looks, SPIKE * (self._look or SHARE * line.base)
        self._odd = each > most and not self._odd  # machines pause, prompts are read: not twice in a row
        each = most if self._odd else each
        kept = MEMORY if each > self._look else 1 - MEMORY  # what was disturbed is soon forgotten
        self._look = kept * self._look + (1 - kept) * each

    def _weigh(self, paces: _Paces, worth: float, n: int, line: Line) -> None:
        """After a look at one of the `n` requests of a step, which found guesses that save `worth` seconds: whether it
        pays to look in the next steps."""
        paces.balance = MEMORY * paces.balance + worth - self._look
        every = math.ceil(n * self._look / (SHARE * line.base)) if line.row else 0
        if paces.balance < 0 and every > 1:  # requests that pause look in the same steps: all at once takes less
            every = min(PAUSE, 1 << (every - 1).bit_length())
            paces.wakes = self._number - self._number % every + every

    def _cut(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: Line
    ) -> list[Draft | None]:
        """Guesses that cost nothing to make: all are made, and those kept that pay."""
        n, began = len(requests), self.clock()
        drafts: list[Draft | None] = [None] * n
        asked = {i: _paces(requests[i]) for i, budget in enumerate(budgets) if budget}
        known = [i for i, paces in asked.items() if not paces.fresh]
        if len(known) < len(asked):  # what was there of a text is read at the first look: that is paid once
            self._fill(drafts, requests, budgets, [i for i, paces in asked.items() if paces.fresh])
            began, self._look = self.clock(), FADES * self._look
        if known:
            self._fill(drafts, requests, budgets, known)
        likely, orders = [list[float]()] * n, dict[int, Sequence[int]]()
        for i, paces in asked.items():
            draft, paces.fresh = drafts[i], False
            paces.settle(requests[i].tokens, self.chances)
            if draft is not None and draft.tokens and free[i] and not draft.ask:  # rows that ask go with their guesses
                orders[i], likely[i] = self._judge(requests[i], draft, paces)
        best = plan(likely, line) if orders else Plan([0] * n, 0.0)
        for i, order in orders.items():
            drafts[i] = _kept(drafts[i], order, best.sizes[i])
        if known:
            self._looked(self.clock() - began, len(asked), line)
        rows = sum(best.sizes)
        slower = math.log1p(line.row * rows / line.base) / rows if rows else 0.0  # each of n by a row, in logarithms
        for i, paces in asked.items():
            if free[i]:
                size = best.sizes[i]
                gain = math.log1p(sum(likely[i][:size])) / n - slower * size if size else 0.0
                self._weigh(paces, gain * line.base, n, line)
        return drafts

    def _fill(
        self, drafts: list[Draft | None], requests: Sequence[Request], budgets: Sequence[int], some: Sequence[int]
    ) -> None:
        """Ask for the guesses of some requests."""
        for i, draft in zip(some, self._ask([requests[i] for i in some], [budgets[i] for i in some])):
            drafts[i] = None if draft is None else draft.cut(budgets[i])

    def _judge(self, request: Request, draft: Draft, paces: _Paces) -> tuple[Sequence[int], list[float]]:
        """A draft's nodes, likeliest first, and how likely each is accepted; parents come before their children."""
        which = kinds(draft, sort_of(self.of, request))
        chances = {each: paces.chance(each, self.chances) for each in set(which)}
        paces.watch(draft, which, request.known)
        if draft.parents == list(range(-1, len(which) - 1)):
            return range(len(which)), list(accumulate(map(chances.__getitem__, which), mul))
        found = reached(draft.parents, [chances[each] for each in which])
        order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
        return order, [found[node] for node in order]

    def _bounded(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: Line
    ) -> list[Draft | None]:
        """Guesses of a second model: as many are made as pay, were each below the one before."""
        start, likely = self.clock(), list[list[float]]()
        for request, budget, sized in zip(requests, budgets, free):
            paces = _paces(request)
            paces.settle(request.tokens, self.chances)
            steps = [paces.chance(kind(0, depth), self.chances) for depth in range(budget)] if sized else []
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
                _paces(request).watch(draft, kinds(draft, 0), request.known)
        looked = [request for request, budget, sized in zip(requests, budgets, free) if budget and sized]
        if looked:
            self._looked(self.clock() - start, len(looked), line)
            worth = best.gain * line.base + (self._node * made if any(best.sizes) else 0.0)
            for request in looked:
                self._weigh(_paces(request), worth / len(looked), len(requests), line)
        return drafts


def _kept(draft: Draft | None, order: Sequence[int], size: int) -> Draft | None:
    """The first `size` nodes of the order."""
    if draft is None or not size:
        return None
    return draft.cut(size) if isinstance(order, range) else draft.only(sorted(order[:size]))


def _paces(request: Request) -> _Paces:
    paces: _Paces | None = request.state.get(NAME)
    if paces is None:
        paces = request.state[NAME] = _Paces()
    return paces
