"""draft: what might come next?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.step.phase import Hidden
from phasewise.step.span import Span, depths
from phasewise.verbs.decode import Outcome

if TYPE_CHECKING:
    from phasewise.kv.drawers import Room
    from phasewise.kv.format import KVShape
    from phasewise.kv.token_rows import TokenRows
    from phasewise.model.lowrank import Delta
    from phasewise.request.request import Request
    from phasewise.speculation.first_layers import FirstLayers
    from phasewise.speculation.tree_drafter import DraftBackend

Drawn = Literal["point", "iid", "without_replacement", "top_plus_one"]


@dataclass(slots=True)
class Draft:
    """A tree of guesses below the pending token. `parents[i] < i`, -1 = child of the pending token; children of a node
    stand in the order they were drawn.

    `q` float32 [nodes, V]: row i is the distribution node i was really drawn from; without replacement, earlier
    siblings are taken out of it and the rest is renormalised. A zero row marks a deterministic node among drawn ones.
    None: every node is deterministic ("point"), or q is unknown; then only matching the target's own draw is exact.
    `thoughts`: by path, what the drafter held likely to follow it, float32 [V], drawn from or not; after the pending
    token alone unless more is wanted (`Drafter.think`).
    The last `ask` nodes are no guesses: what the model says there is for the drafter, never judged and never kept.
    `given` [ask, d]: the rows with which these enter the first layer, in place of embedded tokens. `tuned`: low-rank
    weights that they run with, and no other row of the step does.
    `likely`: how likely the drafter takes each node to be right where its parent is; None: it does not say. Whoever
    counts what was right counts equal ones together (speculation/planner.py).
    """

    tokens: list[int]
    parents: list[int]
    drawn: Drawn = "point"
    q: Tensor | None = None
    thoughts: Mapping[tuple[int, ...], Tensor] | None = None
    ask: int = 0
    likely: list[float] | None = None
    given: Tensor | None = None
    tuned: Delta | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], drawn: Drawn = "point", q: Tensor | None = None) -> Draft:
        """A draft in which each node is the only child of the one before."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), drawn, q)

    @classmethod
    def trie(cls, paths: Sequence[Sequence[int]]) -> Draft:
        """Deterministic guesses whose common beginnings are shared; nodes of earlier paths come first."""
        tree = cls([], [])
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            node = -1
            for token in path:
                if (node, token) not in nodes:
                    nodes[node, token] = tree.add(node, token)
                node = nodes[node, token]
        return tree

    def add(self, parent: int, token: int) -> int:
        """Adds a node as the last child of `parent` (-1: of the pending token). Returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def children(self, node: int) -> list[int]:
        """Children of a node in draw order; -1 = of the pending token."""
        at = node
        return [at := self.parents.index(node, at + 1) for _ in range(self.parents.count(node))]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the first node down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(tokens[::-1])

    def longest(self, tokens: Sequence[int]) -> list[int]:
        """The nodes, from the first down, whose tokens are the longest beginning of `tokens` in the tree."""
        ends, node = [-1], -1
        for token in tokens:
            ends = [i for i, parent in enumerate(self.parents) if parent in ends and self.tokens[i] == token]
            if not ends:
                break
            node = ends[0]
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def paths(self, nodes: int) -> list[tuple[int, ...]]:
        """`path` of each of the first `nodes` nodes."""
        found: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens[:nodes], self.parents):
            found.append((token,) if parent < 0 else (*found[parent], token))
        return found

    def cut(self, nodes: int) -> Draft:
        """The first `nodes` nodes (parents come before children, so this is a tree again)."""
        if nodes >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:nodes]
        ask = max(0, self.ask - (len(self.tokens) - nodes))
        likely = None if self.likely is None else self.likely[:nodes]
        given = None if self.given is None else self.given[:ask]
        tokens, parents = self.tokens[:nodes], self.parents[:nodes]
        return Draft(tokens, parents, self.drawn, q, self.thoughts, ask, likely, given, self.tuned)

    def prune(self, levels: int) -> Draft:
        """The nodes at most `levels` tokens after the pending one."""
        if len(self.tokens) <= levels:
            return self
        return self.only([node for node, depth in enumerate(depths(self.parents)) if depth < levels])

    def only(self, kept: Sequence[int]) -> Draft:
        """These nodes, in ascending order; the parent of each must be among them."""
        new = {-1: -1} | {node: i for i, node in enumerate(kept)}
        q = None if self.q is None else self.q[kept]
        tokens, parents = [self.tokens[n] for n in kept], [new[self.parents[n]] for n in kept]
        first = len(self.tokens) - self.ask
        asking = [node - first for node in kept if node >= first]
        likely = None if self.likely is None else [self.likely[n] for n in kept]
        given = None if self.given is None else self.given[asking]
        return Draft(tokens, parents, self.drawn, q, self.thoughts, len(asking), likely, given, self.tuned)

    def asking(self, node: int) -> range:
        """The nodes that ask below a guess (-1: below the pending token), each the child of the one before."""
        total, first = len(self.tokens), len(self.tokens) - self.ask
        start = stop = next((i for i in range(first, total) if self.parents[i] == node), total)
        while stop < total and self.parents[stop] == (node if stop == start else stop - 1):
            stop += 1
        return range(start, stop)


class Drafter(ABC):
    """draft: what might come next?

    A guess says how it was drawn (`Draft`). A drafter that keeps a second model in step asks the host for a companion;
    one that guesses with the model itself, on the requests' own KV, writes `Tails` (speculation/tails.py), or begins
    the guesses' own rows (speculation/first_layers.py), and then has `Traits.begins_rows`. Drafters inherit from this
    class: what they leave out is as it is here. One that holds others is a `HoldingDrafter`.
    """

    companion: DraftBackend | None = None  # its second model, or what stands for one
    first_layers: FirstLayers | None = None  # those of the model that run its guesses before they are judged
    drawer: Callable[[int, KVShape, Room], int] | None = None  # see SlotRuntime, as is `token_rows`
    token_rows: Sequence[TokenRows] = ()

    @abstractmethod
    def size(self, request: Request) -> int:
        """The most nodes it may propose next (a bound on the rows a step needs); see `headroom`."""

    @abstractmethod
    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        """At most `budget` nodes per request; more are cut, as are levels beyond `headroom`. None or empty = no guess.

        Deterministic given the request and the budget.
        """

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """Told what became of every span (prompt slices, plain rows, drafts), before the tokens are emitted.

        `tops`, for drafters with `Traits.candidates`: the likeliest tokens after every judged row, ids int64 [rows,
        candidates], best first: all guesses of each draft and the last row of a plain one (`judged`), span by span;
        after these, the nodes that ask.
        """

    def draws(self, request: Request) -> bool:
        """Returns True if guesses for this request may be drawn, with a `q`. Drafters with `Traits.drawn` are asked."""
        return True

    def late(self, request: Request) -> Draft | None:
        """A guess for the token after the last node of its draft, or after the pending token if it had none; one node.

        Asked by verifiers of drawn guesses once the pass is over, of drafters with `Traits.late` whose drafts are
        chains. The model has no row behind this guess, so that nothing is judged there.
        """
        return None

    def reach(self, context: int) -> int:
        """Positions that a text may have, where the model's context is `context`."""
        return context

    def sort(self, request: Request) -> int:
        """Returns a class of its last guess for the request, a small number from 0 on. Guesses of one class are counted
        together, to learn how often they are right (speculation/planner.py)."""
        return 0

    def think(self) -> bool:
        """Let its drafts have `thoughts` after all that it asked, from now on. Returns whether it can."""
        return False

    def sized_by(self, sized: Callable[[Request], bool]) -> None:
        """Told by the loop, once, how to find out whether load may size the guesses for a request."""

    def at_least(self, chance: float) -> None:
        """Told that guesses less likely to be accepted than `chance` are not wanted."""

    def close(self) -> None:
        """Told when the engine is closed."""


class HoldingDrafter(Drafter):
    """A drafter made of others. What only one can answer is the first one's answer, all are told what anyone is told,
    and bounds are those of all of them. Raises UserError for a later one that begins the guesses' own rows."""

    def __init__(self, *parts: Drafter) -> None:
        self.parts, first = parts, parts[0]
        for other in parts[1:]:
            if other.first_layers is not None:
                name = type(other).__module__.rpartition(".")[2]
                raise UserError(f"{name} begins to compute its guesses, which of several drafters only the first can: "
                                "name it first, or leave it out")  # fmt: skip
        self.companion, self.drawer, self.token_rows = first.companion, first.drawer, first.token_rows
        self.first_layers = first.first_layers

    def size(self, request: Request) -> int:
        return sum(its.size(request) for its in self.parts)

    def draws(self, request: Request) -> bool:
        return self.parts[0].draws(request)

    def late(self, request: Request) -> Draft | None:
        return self.parts[0].late(request)

    def reach(self, context: int) -> int:
        return min(its.reach(context) for its in self.parts)

    def sort(self, request: Request) -> int:
        return self.parts[0].sort(request)

    def think(self) -> bool:
        return self.parts[0].think()

    def sized_by(self, sized: Callable[[Request], bool]) -> None:
        for its in self.parts:
            its.sized_by(sized)

    def at_least(self, chance: float) -> None:
        for its in self.parts:
            its.at_least(chance)

    def close(self) -> None:
        for its in self.parts:
            its.close()


def headroom(request: Request) -> int:
    """Returns the number of drafted tokens in a row that the request could still take; one more follows them."""
    most = request.limit - request.known - 1
    return most if request.until is None else min(most, request.until - request.known)


def judged(span: Span) -> range:
    """The rows of a span after which a token is judged or drawn: a draft's, but for those that ask, or the last of a
    request's text."""
    if span.note is not None:
        return range(span.rows - span.note.ask)
    return range(span.rows - span.reaches_end, span.rows)
