"""Chains that end when one of their guesses is too likely to be rejected, and what says how likely that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phasewise.methods.draft._acceptance_head import AcceptanceHead
from phasewise.request.drawer import Drawer
from phasewise.request.request import Request
from phasewise.speculation.branching import branch
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft, Drawn

DRAWN: Drawn = "without_replacement"
RECORD = "specdec record"
BINS, PRIOR = 8, 8.0  # classes of q in a request's record, and trials that q itself counts for in each


@dataclass(frozen=True)
class StopRule:
    """When a chain is long enough. With independent chances of acceptance the best threshold is
    1 - (tokens per second) * (seconds of a draft pass) / (mean chance); it follows from one step of looking ahead,
    as the chance that all guesses are accepted only falls."""

    threshold: float
    least: int
    most: int

    def __call__(self, guesses: int, accepted: float) -> bool:
        """True if no more is guessed after so many `guesses`. `accepted`: the chance that all of them are accepted that
        were weighed so far."""
        if guesses < self.least:
            return False
        return guesses >= self.most or (self.threshold < 1 and 1 - accepted >= self.threshold)


Weigh = Callable[[DraftBuilder, NodeRequest, int], float]
"""The chance to multiply by once a token was drawn after the node that is asked for."""


@dataclass(frozen=True)
class StoppedChain:
    """A chain that a rule ends."""

    rule: StopRule
    weigh: Weigh
    drawn: Drawn = DRAWN

    @property
    def levels(self) -> int:
        return self.rule.most

    def nodes(self, levels: int) -> int:
        return levels

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        (one,) = asked
        (token, *_), rows = branch(one.q, 1, "point" if tree.point else DRAWN, tree.us(one.node), tree.coupling)
        added = tree.add(one.node, token, None if rows is None else rows[0])
        accepted = tree.notes["accepted"] = tree.notes.get("accepted", 1.0) * self.weigh(tree, one, token)
        return [added] if tree.left and not self.rule(added + 1, accepted) else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(DRAWN)


# ---- chances of acceptance
def top(tree: DraftBuilder, asked: NodeRequest, token: int) -> float:
    return float(asked.q.max())


def own(tree: DraftBuilder, asked: NodeRequest, token: int) -> float:
    return float(asked.q[token])


def by_state(head: AcceptanceHead) -> Weigh:
    """The chance of the node that is asked for. Behind the request's last token, which is no guess, there is none."""

    def weigh(tree: DraftBuilder, asked: NodeRequest, token: int) -> float:
        if asked.node < 0:
            return 1.0
        assert tree.rows is not None
        return head(tree.rows)

    return weigh


def calibrated(tree: DraftBuilder, asked: NodeRequest, token: int) -> float:
    seen = record(tree.request)
    if asked.node < 0:
        seen.last = []
    seen.last.append(float(asked.q[token]))
    return seen.chance(seen.last[-1])


@dataclass(slots=True)
class AcceptanceRecord(Drawer):
    """How often a request's guesses were accepted, in classes of their probability q. `last`: q of the guesses in its
    last chain."""

    tried: list[int] = field(default_factory=lambda: [0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)
    last: list[float] = field(default_factory=list)

    def chance(self, q: float) -> float:
        """q at first, and the more guesses of its class were judged, the more their share of accepted ones."""
        at = _bin(q)
        return (self.right[at] + PRIOR * q) / (self.tried[at] + PRIOR)

    def judged(self, guesses: int, accepted: int) -> None:
        """Learns from a verdict on the first `guesses` of the last chain. None was judged behind the first that was
        rejected."""
        for i, q in enumerate(self.last[: min(guesses, accepted + 1)]):
            self.tried[_bin(q)] += 1
            self.right[_bin(q)] += i < accepted


def _bin(q: float) -> int:
    return min(BINS - 1, int(q * BINS))


def record(request: Request) -> AcceptanceRecord:
    found: AcceptanceRecord | None = request.state.get(RECORD)
    if found is None:
        found = request.state[RECORD] = AcceptanceRecord()
    return found
