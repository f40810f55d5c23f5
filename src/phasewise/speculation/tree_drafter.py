"""Draft trees of a second model: a shape says which nodes there are, and a level is one pass for all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, Drawn, headroom
from phasewise.verbs.host import Host
from phasewise.verbs.sample import Context, Coupling, Purpose, uniform

if TYPE_CHECKING:
    from phasewise.model.model import Model

SELF = "self"  # in place of a second model's name
APART = 1 << 16  # more numbers than any node draws


class NodeRequest(NamedTuple):
    """A node whose children are asked for (-1: the request's last token), and what may follow it: probabilities
    float32 [V], by the request's own rules. Where it is greedy, the second model's, its choice the largest."""

    node: int
    q: Tensor


@dataclass(slots=True)
class DraftBuilder:
    """One request's draft while a shape adds guesses to it: at most `room` nodes and `levels` in a row. `notes` are the
    shape's own. `rows` [asked, d]: the second model's rows behind the nodes that a shape is asked for, in their order,
    as its last layer leaves them; the final norm is still to come. None: nobody computed any.

    Guesses for greedy requests are chosen, `point`; others are drawn, and each has a row in `q` (see Draft).
    """

    request: Request
    levels: int
    room: int
    point: bool
    draft: Draft = field(default_factory=lambda: Draft([], []))
    q: list[Tensor] = field(default_factory=list)  # float32 [V] each
    notes: dict[Any, Any] = field(default_factory=dict)
    thoughts: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # see Draft
    coupling: Coupling = "inverse"  # the target's, so that the two agree where they share a number
    rows: Tensor | None = None

    @property
    def left(self) -> int:
        """Nodes that may still be added."""
        return max(0, self.room - len(self.draft.tokens))

    def add(self, parent: int, token: int, q: Tensor | None = None) -> int:
        """Adds a child after its siblings, and the probabilities [V] it was drawn from. Returns its number."""
        if q is not None:
            self.q.append(q)
        return self.draft.add(parent, token)

    def us(self, node: int) -> Callable[[int], float]:
        """The uniform numbers for children of a node. The first is the one that the target draws with there, so that
        a good guess is the target's very choice (arXiv 2408.07978)."""
        seed, position = self.request.params.seed, self.request.known + len(self.draft.path(node))
        return lambda i: uniform(seed, position, Purpose.DRAFT if i else Purpose.SAMPLE, i)

    def own(self, node: int) -> Callable[[int], float]:
        """Uniform numbers for children of a node that neither other nodes draw with nor the verifier judges with: for
        shapes in which the draws of one node decide how many children another node has."""
        seed, position = self.request.params.seed, self.request.known + len(self.draft.path(node))
        return lambda i: uniform(seed, position, Purpose.DRAFT, (node + 2) * APART + i)

    def finish(self, drawn: Drawn) -> Draft:
        """The draft, with how its nodes were drawn, what from, and what else was held likely."""
        self.draft.thoughts = self.thoughts
        if not self.point and self.q:
            self.draft.drawn, self.draft.q = drawn, torch.stack(self.q)
        return self.draft


class TreeShape(Protocol):
    """Which guesses a tree is made of. Whether there is another child of a node may hang on what is known before it is
    drawn, never on which token it turns out to be; siblings stay in the order they were drawn in.
    """

    @property
    def levels(self) -> int:
        """The most guesses in a row."""
        ...

    @property
    def drawn(self) -> Drawn: ...

    def nodes(self, levels: int) -> int:
        """The most guesses in so many levels."""
        ...

    def runs(self, levels: int) -> int:
        """The most nodes that are asked for when so many levels are."""
        ...

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        """Adds children of the nodes asked for. Returns those to ask for next; none where the tree is full."""
        ...

    def finish(self, tree: DraftBuilder) -> Draft:
        """Returns the draft that is proposed."""
        ...


class DraftBackend(Protocol):
    """The model that guesses: a second model (`Companion`), or the model itself on its own KV (`Tails`). The members
    are described there."""

    optional: Callable[[Request], bool]
    text: Callable[[Request], Sequence[int]]

    @property
    def model(self) -> Model: ...

    def lag(self, request: Request) -> int: ...

    def catch_up(self, requests: Sequence[Request], most: int) -> None: ...

    def reserve(self, request: Request, rows: int) -> bool: ...

    def root(self, requests: Sequence[Request]) -> Tensor: ...

    def grow(self, levels: Sequence[NewNodes]) -> Tensor: ...

    def logits(self, x: Tensor) -> Tensor: ...


def lags(second: DraftBackend, request: Request, chunk: int) -> bool:
    """True if the second model has still to read, `chunk` tokens a step, and nothing is guessed in this one.

    Where a guess must be, that is the request's own affair: so many tokens as it takes to read the prompt if nothing
    comes between, however much is really read (after a preemption the rest is read at once).
    """
    if second.optional(request):
        return second.lag(request) > chunk
    return len(second.text(request)) - (request.n_out - 1) * chunk > chunk


class TreeDrafter(Drafter):
    """The runtime of drafters that grow trees of a second model. The first `chunk` tokens of a prompt that it has still
    to read are read at once, more of them in pieces, and meanwhile nothing is guessed."""

    def __init__(self, host: Host, companion: DraftBackend, shape: TreeShape, chunk: int) -> None:
        self.host, self.shape, self.chunk = host, shape, chunk
        self.companion: DraftBackend = companion
        self.thoughts = False

    def think(self) -> bool:
        self.thoughts = True
        return True

    def draws(self, request: Request) -> bool:
        return self.shape.drawn != "point" and not request.params.greedy

    def size(self, request: Request) -> int:
        return self.shape.nodes(min(self.shape.levels, headroom(request)))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        late = {r.id: r for r in requests if self._late(r)}
        trees: dict[int, DraftBuilder] = {}
        for i in sorted(range(len(requests)), key=lambda i: self.companion.optional(requests[i])):
            request = requests[i]
            levels = min(self.shape.levels, headroom(request), budgets[i])  # none is without a node
            if request.id in late or levels < 1:
                continue
            if self.companion.reserve(request, request.known + self._runs(levels)):
                point = not self.draws(request)
                trees[i] = DraftBuilder(request, levels, min(budgets[i], self.shape.nodes(levels)), point)
        if trees:
            self._grow(list(trees.values()))
        ready = [r for r in late.values() if self.companion.reserve(r, r.known)]
        if ready:
            self.companion.catch_up(ready, self.chunk)
        return [self.shape.finish(trees[i]) if i in trees else None for i in range(len(requests))]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass  # the companion finds out by itself which of its rows still hold

    def _runs(self, levels: int) -> int:
        return self.shape.runs(levels - 1) if levels > 1 else 0  # the last level is guessed, not asked

    def _late(self, request: Request) -> bool:
        return lags(self.companion, request, self.chunk)

    def _grow(self, trees: Sequence[DraftBuilder]) -> None:
        x = self.companion.root([tree.request for tree in trees])
        asked = [(tree, [-1]) for tree in trees]
        ran: dict[int, dict[tuple[int, ...], int]] = {id(tree): {} for tree in trees}  # lane rows by path
        level = 1
        while asked:
            after: list[tuple[DraftBuilder, list[int]]] = []
            first = 0
            for (tree, nodes), rows in zip(asked, self._thought(x, asked)):
                tree.rows, first = x[first : first + len(nodes)], first + len(nodes)
                following = self.shape.grow(tree, [NodeRequest(node, q) for node, q in zip(nodes, rows)])
                if self.thoughts or nodes == [-1]:
                    tree.thoughts |= {tree.draft.path(node): q for node, q in zip(nodes, rows)}
                if following and level < tree.levels:
                    after.append((tree, following))
            if not after:
                break
            x, asked, level = self._run(after, ran), after, level + 1

    def _run(
        self, asked: Sequence[tuple[DraftBuilder, list[int]]], ran: dict[int, dict[tuple[int, ...], int]]
    ) -> Tensor:
        """Rows after all nodes asked for; equal paths are one row of the second model's."""
        levels, places, total = list[NewNodes](), list[int](), 0
        for tree, nodes in asked:
            known, tokens, parents, own = ran[id(tree)], list[int](), list[int](), dict[tuple[int, ...], int]()
            first = len(known)
            for node in nodes:
                path = tree.draft.path(node)
                if path not in own:
                    own[path] = len(tokens)
                    tokens.append(path[-1])
                    parents.append(known[path[:-1]] if len(path) > 1 else -1)
                places.append(total + own[path])
            known |= {path: first + row for path, row in own.items()}
            levels.append(NewNodes(tree.request, tokens, parents))
            total += len(tokens)
        x = self.companion.grow(levels)
        return x if places == list(range(total)) else x[torch.tensor(places, device=x.device)]

    def _thought(self, x: Tensor, asked: Sequence[tuple[DraftBuilder, list[int]]]) -> list[list[Tensor]]:
        """Returns the probabilities float32 [V] of what may follow each of the nodes asked for; rows of x are theirs,
        in order."""
        contexts = [Context(tree.request, tree.draft.path(node)) for tree, nodes in asked for node in nodes]
        chosen = [row for row, context in enumerate(contexts) if context.request.params.greedy]
        logits = self.companion.logits(x)
        plain = logits[chosen].softmax(-1) if chosen else logits
        dist = self.host.sample(logits, contexts)
        for tree, _ in asked:
            tree.coupling = dist.coupling
        for own, row in zip(plain, chosen):
            best, first = dist.top[row], int(own.argmax())
            own[[best, first]] = own[[first, best]]
        rows = dict(zip(chosen, plain))
        thought = (rows[row] if row in rows else dist.row(row) for row in range(len(contexts)))
        return [list(islice(thought, len(nodes))) for _, nodes in asked]


def tree_drafter(host: Host, name: str, model: str, shape: TreeShape, chunk: int) -> TreeDrafter:
    """Makes the runtime of a drafter called `name` with a second model by name or path, or the engine's own (SELF).
    Raises UserError if the vocabularies differ."""
    second = host.model if model == SELF else host.load(model)
    ours, theirs = second.config.vocab, host.model.config.vocab
    if ours != theirs:
        raise UserError(
            f"{name}: {model!r} has {ours:,} tokens in its vocabulary, the model has {theirs:,}: "
            f"give one made for the same tokenizer"
        )
    return TreeDrafter(host, host.companion(name, second), shape, chunk)
