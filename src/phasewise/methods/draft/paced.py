"""Any drafter's guesses, as many as pay: sized by what rows cost here, by what was right and by who shares the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar

from torch import Tensor

from phasewise.catalog import part
from phasewise.methods.draft._record import Chances, GuessRecord
from phasewise.request.request import Request
from phasewise.speculation.planner import LEVEL, SPIKE, CostLine, DraftPlan, StepCosts, kind, kinds, plan, reached
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, HoldingDrafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "paced"
SHARE = 0.01  # of a step's time that may go into looking for guesses while none pays
PAUSE = 4096  # steps without looking, at most
PRUDENCE = 1.2  # times what a row is known to take: of many guesses those look best that are judged too well
FEELER = 8  # guesses, at most, for a request of which few were right of late ...
PAID = 0.5  # ... as of one that was, seven looks ago
SEEN = 16  # of so many steps without a look, one is timed
MEMORY, ALL = 0.9, 0.95  # what a look leaves of those before it at the same request, and at any
LOOKED = 1.0  # who comes new counts as looked at so often, with what it was worth at others ...
OPTIMISM, MOST_HOPED = 3.0, 4.0  # ... in looks: before much is known of these, and at most
HIDDEN = 2.0  # times what looks take in here: most that they take elsewhere in their step
LEAST, MOST_LEAST = 0.01, 0.3  # how likely guesses must be to be looked at, at least and at most
PROBE = 32  # a second model guesses as far as it may every so many steps: deep guesses are known from trials alone


@dataclass(frozen=True)
class Paced(Method):
    """The guesses of the drafter `of`, cut to those worth their rows.

    What a step takes by its rows is measured as it goes; how likely a guess is, is counted per request and over all, by
    depth and by what its drafter says of it, and guesses that were cut count too, for the text shows whether they were
    right. Of the guesses of all requests in a step those are kept that make the product of the requests' speeds
    largest. What looking for guesses takes is weighed, by request, against the time that they saved: where that is
    less, it is looked at only now and then, and requests that come after many such begin so. The first look at a text
    reads it, and is not held against it. A second model's guesses have a price of their own: it is asked for as many
    as pay.

    Sizes hang on the clock, tokens do not: where guesses might change tokens (drawn ones, or under a lossy verifier)
    they are left as they are.
    """

    of: Any = part("draft", "suffix_decoding:branches=1")

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    @property
    def traits(self) -> Traits:
        of: Traits = self.of.traits
        return replace(of, idles=True)

    def bind(self, host: Host) -> Pacer:
        return Pacer(host.bind(self.of))


@dataclass(slots=True)
class _Paces(GuessRecord):
    """The outcomes of one request's guesses, and the time of its next probe."""

    wakes: int = 0  # the step before which there is no looking
    whole: bool = False  # whether its guesses are left as they are
    read: bool = False  # whether it was looked at before
    looks: float = 0.0  # of late ...
    right: float = 0.0  # ... the guesses they brought that were right ...
    slower: float = 0.0  # ... and what their rows took, in logarithms of a step's time

    def note(self, right: float, slower: float, kept: float) -> None:
        self.looks, self.right, self.slower = (
            kept * self.looks + 1,
            kept * self.right + right,
            kept * self.slower + slower,
        )

    def value(self, n: int, before: float) -> float:
        """Right guesses that a look brings, less those that make up for the rows in a step of `n` requests, if it was
        `before` what is known."""
        looks = self.looks + LOOKED
        return (1 + (self.right + LOOKED * before) / looks) * math.exp(-n * self.slower / looks) - 1


class Pacer(HoldingDrafter):
    """Remembers a `_Paces` per request; costs of steps and acceptance of kinds of guesses are shared by all."""

    def __init__(self, of: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(of)
        self.of, self.clock = of, clock
        self.costs, self.chances = StepCosts(), Chances()
        self.sized: Callable[[Request], bool] = lambda request: False
        self._look = 0.0  # seconds that looking takes, a request ...
        self._once = 0.0  # ... and, in the step under way, at those that were not looked at before
        self._all = _Paces()  # of all requests: what looks were worth
        self._pause = 1  # steps between two looks at who is paused
        self._asked: list[tuple[Request, _Paces]] = []  # who was looked at in the step under way, and may be paused
        self._plain: dict[int, float] = {}  # seconds of a step without looks, by its requests
        self._looks = False  # whether there were looks in the step that was timed last
        self._odd = False  # whether the last look took far longer than those before
        self._node = 0.0  # seconds that a second model takes for a node
        self._number = 0  # of the step under way
        self._together = 1  # requests of the one before it
        self._last = 0.0  # when the one before it had its verdict, if a clock was read then: that takes time
        self._drafting: float | None = None  # seconds of it that were spent here, if any

    def sized_by(self, sized: Callable[[Request], bool]) -> None:
        super().sized_by(sized)
        self.sized = sized

    def size(self, request: Request) -> int:
        paces = self._of(request)
        if paces.wakes > self._number:
            return 0
        size = self.of.size(request)
        return size if paces.whole or paces.right > PAID else min(size, FEELER)  # rows that are asked for take room

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        began, n = self.clock(), len(requests)
        free = [self.sized(request) for request in requests]
        if not any(free):
            return self._ask(requests, budgets)
        line = self._line(n) or CostLine(1.0, 1.0)  # unknown: a step without guesses will show
        # a guess is worth its row if it makes tokens in a larger share than it costs
        self.of.at_least(min(MOST_LEAST, max(LEAST, 0.5 * n * line.row / line.base)))
        line = CostLine(line.base, PRUDENCE * line.row)
        drafts = (self._cut if self.companion is None else self._bounded)(requests, budgets, free, line)
        self._drafting = self.clock() - began
        return drafts

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """A step is timed from verdict to verdict, but for what passed in here."""
        drafting, last, self._number = self._drafting, self._last, self._number + 1
        now = self._last = self.clock() if drafting is not None or self._timely(self._number) else 0.0
        self._drafting, self._together = None, len(spans)
        if last and now and (drafting is not None or not self._number % SEEN):
            rows = 0
            for span in spans:
                rows += span.rows
                if span.note is None and (span.rows > 1 or span.request.prefilling):
                    break
            else:
                self._timed(now - last, drafting or 0.0, len(spans), rows)
        if drafting is None:
            self._looks = False
        if self._asked:
            self._weigh(spans, outcomes)
        self.of.learn(spans, hidden, outcomes, tops)

    def _timely(self, number: int) -> bool:
        """True if a step without probes is timed, or the next one may be."""
        return number % SEEN in (0, SEEN - 1) or (number + 1) % self._pause == 0

    def _ask(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return self.of.draft(requests, budgets)

    def _new(self, request: Request) -> _Paces:
        """Probes a new request at once, unless probes of others gained little of late."""
        paces = request.state[NAME] = _Paces()
        paces.whole = not self.sized(request)
        n, price = self._together, self._price(self._together)
        if not paces.whole and self._all.value(n, OPTIMISM * price) < price:
            paces.wakes = self._next()
        return paces

    def _of(self, request: Request) -> _Paces:
        paces: _Paces = request.state.get(NAME) or self._new(request)
        return paces

    def _price(self, n: int) -> float:
        """The number of guesses that must be right for a probe of one of `n` requests to pay: all of them wait for
        it."""
        line = self._line(n)
        return 0.0 if line is None else (1 + self._look / line.base) ** n - 1

    def _next(self) -> int:
        """The next step with a look at who is paused: at all of them at once, for that takes less."""
        return self._number - self._number % self._pause + self._pause if self._pause > 1 else 0

    def _line(self, n: int) -> CostLine | None:
        """The seconds of a step of `n` requests, and of a row more. Plain steps measure it best, where there were
        some."""
        line, plain = self.costs.near(n), self._plain.get(n)
        return line if line is None or plain is None else CostLine(plain, line.row)

    def _timed(self, seconds: float, drafting: float, n: int, rows: int) -> None:
        """A step of `n` requests took so many seconds, `drafting` of them in here. What it took beyond a plain step of
        so many `rows` is the price of looking and of guessing: code that runs now and then is slow, and slows down what
        runs after it."""
        line, looks, took = self._line(n), len(self._asked), seconds - drafting
        before, self._looks = self._looks, drafting > 0
        if line is None or before == self._looks:
            self.costs.note(n, rows, took, follows=before)
        elif rows > n:
            self.costs.compare(n, rows, took)
        if rows == n and not drafting:
            plain = self._plain.get(n, took)
            self._plain[n] = LEVEL * plain + (1 - LEVEL) * min(took, SPIKE * plain)
        if not looks or line is None:
            return
        own, hidden = drafting - self._once, took - line.base - line.row * (rows - n)
        each, most = own + max(0.0, min(hidden, HIDDEN * own)), SPIKE * looks * (self._look or SHARE * line.base)
        self._odd = each > most and not self._odd  # machines pause: not twice in a row
        self._look = LEVEL * self._look + (1 - LEVEL) * (most if self._odd else each) / looks
        pause = max(1, round(n * self._look / (SHARE * line.base)))
        unit = 1 << max(0, pause.bit_length() - 3)
        self._pause = min(PAUSE, math.ceil(pause / unit) * unit)

    def _weigh(self, spans: Sequence[Span], outcomes: Sequence[Outcome]) -> None:
        """After a step with looks: what they were worth, and who shall be looked at in the next steps."""
        asked, self._asked, self._once, n = self._asked, [], 0.0, len(spans)
        line, price = self._line(n) or CostLine(1.0, 1.0), self._price(n)
        drafted = {id(span.request): (span.rows - 1, len(outcome.tokens) - 1)
                   for span, outcome in zip(spans, outcomes) if span.note is not None}  # fmt: skip
        rows = sum(more for more, _ in drafted.values())
        slower = math.log1p(line.row * rows / line.base) / rows if rows else 0.0  # each of n by a row, in logarithms
        prior = min(self._all.value(n, OPTIMISM * price), MOST_HOPED * price)
        for request, paces in asked:
            more, right = drafted.get(id(request), (0, 0))
            self._all.note(right, slower * more, ALL)
            paces.note(right, slower * more, MEMORY)
            if paces.value(n, prior) < price:
                paces.wakes = self._next()

    def _cut(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: CostLine
    ) -> list[Draft | None]:
        """Guesses that cost nothing to make: all are made, and those kept that pay."""
        n, began = len(requests), self.clock()
        drafts: list[Draft | None] = [None] * n
        asked = {i: self._of(requests[i]) for i, budget in enumerate(budgets) if budget}
        known = [i for i, paces in asked.items() if paces.read]
        if len(known) < len(asked):  # all that there is of a text is read at the first look: that is paid once
            fresh = [i for i, paces in asked.items() if not paces.read]
            self._fill(drafts, requests, budgets, fresh)
            self._once = self.clock() - began
        if known:
            self._fill(drafts, requests, budgets, known)
        likely, orders = [list[float]()] * n, dict[int, Sequence[int]]()
        price = math.expm1(n * math.log1p(line.row / (line.base + line.row * sum(budgets))))  # of the cheapest guess
        for i, paces in asked.items():
            draft = drafts[i]
            paces.settle(requests[i].tokens, self.chances)
            if draft is not None and draft.tokens and free[i] and not draft.ask:  # rows that ask go with their guesses
                orders[i], likely[i] = self._judge(requests[i], draft, paces, price)
        best = plan(likely, line) if orders else DraftPlan([0] * n, 0.0)
        for i, order in orders.items():
            drafts[i] = _kept(drafts[i], order, best.sizes[i])
        for paces in asked.values():
            paces.read = True
        self._asked = [(requests[i], paces) for i, paces in asked.items() if free[i]]
        return drafts

    def _fill(
        self, drafts: list[Draft | None], requests: Sequence[Request], budgets: Sequence[int], some: Sequence[int]
    ) -> None:
        """Ask for the guesses of some requests."""
        for i, draft in zip(some, self._ask([requests[i] for i in some], [budgets[i] for i in some])):
            drafts[i] = None if draft is None else draft.cut(budgets[i])

    def _judge(self, request: Request, draft: Draft, paces: _Paces, price: float) -> tuple[Sequence[int], list[float]]:
        """A draft's nodes, likeliest first, and how likely each is accepted; parents come before their children. No
        likelihoods where not even the first of a chain is worth the price."""
        chain = draft.parents == list(range(-1, len(draft.tokens) - 1))
        head = draft.cut(1) if chain else draft
        which = kinds(head, self.of.sort(request))
        chances = {each: paces.chance(each, self.chances) for each in set(which)}
        if chain and chances[which[0]] >= price:
            head, which = draft, kinds(draft, self.of.sort(request))
            chances = {each: paces.chance(each, self.chances) for each in set(which)}
        paces.watch(head, which, request.known)
        if not chain:
            found = reached(draft.parents, [chances[each] for each in which])
            order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
            return order, [found[node] for node in order]
        return range(len(which)), list(accumulate(map(chances.__getitem__, which), mul)) if head is draft else []

    def _bounded(
        self, requests: Sequence[Request], budgets: Sequence[int], free: Sequence[bool], line: CostLine
    ) -> list[Draft | None]:
        """Guesses of a second model: as many are made as pay, were each below the one before."""
        likely = list[list[float]]()
        for request, budget, sized in zip(requests, budgets, free):
            paces = self._of(request)
            paces.settle(request.tokens, self.chances)
            steps = [paces.chance(kind(0, depth), self.chances) for depth in range(budget)] if sized else []
            likely.append(reached(range(-1, len(steps) - 1), steps))
        best = plan(likely, CostLine(line.base, line.row + self._node))
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
                self._of(request).watch(draft, kinds(draft, 0), request.known)
        looked = zip(requests, budgets, free)
        self._asked = [(request, self._of(request)) for request, budget, sized in looked if budget and sized]
        return drafts


def _kept(draft: Draft | None, order: Sequence[int], size: int) -> Draft | None:
    """The first `size` nodes of the order."""
    if draft is None or not size:
        return None
    return draft.cut(size) if isinstance(order, range) else draft.only(sorted(order[:size]))
