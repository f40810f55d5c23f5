"""Heads that guess from the model's last hidden state alone: what Medusa's and Hydra's modules and drafters share.

Positions: the model has computed a text's tokens up to t, with the state h [d] of token t after the final norm, and has
chosen the token t + 1, the *root*. Head i, from 0 on, says what token t + 2 + i will be. A draft is a fixed tree of
*rank paths*: (2, 0) is the third guess of head 0, followed by the first guess of head 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.speculation.heads.block import packed
from phasewise.speculation.heads.folder import CONFIG, StoredHeads, check, locate, read, seed_of
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host

RankPath = tuple[int, ...]
MOST = 63  # nodes: with the pending token, the rows of one native step
RANKS = 10  # guesses of a head that a tree may hold
# Accuracies by rank where none were measured, for any head: heads with random weights need some tree.
UNMEASURED = tuple(0.5 * 0.5**rank for rank in range(RANKS))


@dataclass(frozen=True)
class HeadsShape:
    """The sizes of a set of heads: width `hidden`, `heads` of them, of `layers` blocks each.

    `own_head`: each has an output matrix [vocab, hidden] of its own; otherwise all read out through the model's.
    """

    hidden: int
    vocab: int
    heads: int = 4
    layers: int = 1
    own_head: bool = False


class LastStateHeads(nn.Module, ABC):
    """The heads of one kind, float32. `lm_heads`: an output matrix for each; None: all share the model's own."""

    kind: ClassVar[str]
    architecture: ClassVar[str]  # as configurations name it
    reads_path: ClassVar[bool]  # whether a head reads the tokens guessed before its own
    lm_heads: nn.ModuleList | None

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape, self.depth = shape, shape.heads  # depth: the number of heads

    def output_matrices(self, bias: bool = False) -> nn.ModuleList | None:
        """`lm_heads` by the heads' shape."""
        shape = self.shape
        each = (nn.Linear(shape.hidden, shape.vocab, bias=bias) for _ in range(shape.heads))
        return nn.ModuleList(each) if shape.own_head else None

    @abstractmethod
    def state(self, head: int, h: Tensor, path: Tensor | None) -> Tensor:
        """The rows that the output matrix of a head reads, [n, d].

        h [n, d]: the model's states. path [n, at least head + 1, d]: embeddings of the root and of the tokens guessed
        after it; heads that do not read the path are given None.
        """

    def logits(self, head: int, state: Tensor, unembed: Callable[[Tensor], Tensor]) -> Tensor:
        """[n, d] -> float32 [n, V]. `unembed`: the product with the model's own output matrix."""
        return unembed(state) if self.lm_heads is None else self.lm_heads[head](state).float()

    def config(self) -> dict[str, Any]:
        """The configuration that describes the module, as it is stored. Kinds add their own."""
        shape = self.shape
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "speculators_model_type": self.kind,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "num_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "original_lm_head": not shape.own_head,
        }

    @classmethod
    @abstractmethod
    def described(cls, stored: StoredHeads, common: HeadsShape) -> Self:
        """Heads without values, as a configuration describes them; `common` is what it says of any kind. Raises
        UserError for what is not supported."""

    @classmethod
    def of(cls, stored: StoredHeads) -> Self:
        """The heads of a folder. Raises UserError for what the configuration asks and the tensors do not hold."""
        number, own = stored.number, not stored.config.get("original_lm_head", False)
        sizes = (number("hidden_size"), number("vocab_size"), number("num_heads"), number("num_hidden_layers", 1))
        common = HeadsShape(*sizes, own)
        if not common.heads:
            raise UserError(f"{stored.path}: num_heads=0: there must be at least one head")
        with torch.device("meta"):
            made = cls.described(stored, common)
        made = made.to_empty(device="cpu")
        filled(made, stored)
        return made

    @classmethod
    @abstractmethod
    def untrained(cls, hidden: int, vocab: int) -> Self:
        """Heads of the usual shape for a model of this width and vocabulary, which say again what the model says."""


def filled(module: LastStateHeads, stored: StoredHeads) -> None:
    """Give a module the stored weights. Raises UserError naming a tensor that is missing or of another shape."""
    tensors = stored.take({name: tuple(value.shape) for name, value in module.state_dict().items()})
    module.load_state_dict(tensors)


def random_weights(module: nn.Module, seed: int) -> None:
    """Normal values of variance 1 / columns: nothing learned, but every part at work."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)


# ---- trees
def rank_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> tuple[RankPath, ...]:
    """The rank paths that are likeliest to be right, at most `nodes`, likeliest first; so parents come before children.

    `accuracy[i][r]`: how often rank r of head i is right where the path before it is. A path's weight is the product of
    its accuracies (arXiv 2401.10774, section 2.3.3).
    """
    paths: list[RankPath] = []
    ahead: list[tuple[float, RankPath, float]] = [(-accuracy[0][0], (0,), 1.0)]  # weight, path, its parent's weight
    while ahead and len(paths) < nodes:
        weight, path, above = heappop(ahead)
        paths.append(path)
        head, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracy[head]):
            heappush(ahead, (-above * accuracy[head][rank + 1], (*path[:-1], rank + 1), above))
        if head + 1 < len(accuracy):
            heappush(ahead, (weight * accuracy[head + 1][0], (*path, 0), -weight))
    return tuple(paths)


def expected_tokens(accuracy: Sequence[Sequence[float]], tree: Sequence[RankPath]) -> float:
    """Tokens that a pass gives if the heads are right as often as that: one, and the sum of all paths' weights."""
    weights: dict[RankPath, float] = {(): 1.0}
    for path in tree:
        weights[path] = weights[path[:-1]] * accuracy[len(path) - 1][path[-1]]
    return sum(weights.values())


def tree_of(stored: StoredHeads, depth: int, nodes: int) -> tuple[RankPath, ...]:
    """The tree of stored heads, cut to its `nodes` likeliest paths. Raises what `accuracy_of` does."""
    return rank_tree(accuracy_of(stored, depth), nodes)


def accuracy_of(stored: StoredHeads, depth: int) -> Sequence[Sequence[float]]:
    """How often each rank of each of stored heads was right, as `rank_tree` takes it: as measured, where that was done.
    Raises UserError for accuracies that do not belong to so many heads."""
    measured = stored.own.get("accuracy")
    if measured is None:
        return [UNMEASURED] * depth
    rows = measured if isinstance(measured, list) else []
    numbers = all(isinstance(row, list) and row and all(isinstance(x, float | int) for x in row) for row in rows)
    if len(rows) != depth or not numbers:
        raise UserError(f'{stored.path / CONFIG}: "accuracy" must hold a list of numbers for each of the {depth} heads')
    return rows


# ---- the drafter
@dataclass(frozen=True)
class _Asked:
    """A request whose guesses are made: its place among all, and the rank paths that it gets."""

    place: int
    request: Request
    paths: Sequence[RankPath]


class LastStateDrafter(Drafter):
    """Fills a tree of ranks in with what the heads guess; one state for each request, kept from the step before.

    Heads that read the state alone are asked all at once, so that the output matrix is read once; heads that read the
    path are asked level by level, for all requests and all paths of a level together.
    """

    def __init__(self, host: Host, heads: LastStateHeads, tree: Sequence[RankPath]) -> None:
        self.model, self.name = host.model, heads.kind
        self.dtype = torch.bfloat16 if host.model.dtype == torch.bfloat16 else torch.float32  # that the heads run in
        self.heads = packed(heads.to(host.model.device, self.dtype).requires_grad_(False))
        self.tree = tuple(tree)
        self._upto: dict[int, tuple[RankPath, ...]] = {}  # the tree's paths of at most so many levels
        self._depth = max(map(len, self.tree))

    def size(self, request: Request) -> int:
        return len(self._paths(request))

    def reach(self, context: int) -> int:
        return ENDLESS

    def _paths(self, request: Request) -> tuple[RankPath, ...]:
        levels = min(self._depth, headroom(request))
        if levels not in self._upto:
            self._upto[levels] = tuple(path for path in self.tree if len(path) <= levels)
        return self._upto[levels]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """Keeps, of every request, the row of the token before the one that is pending then."""
        last = [each.keep - 1 if isinstance(each.keep, int) else each.keep[-1] for each in outcomes]
        rows = [span.start + row for span, row in zip(spans, last)]
        states = hidden.x[torch.tensor(rows, device=hidden.x.device)]  # a copy: steps write over their rows
        for span, outcome, state in zip(spans, outcomes, states):
            span.request.state[self.name] = (span.request.known + len(outcome.tokens), state)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        asked = [
            _Asked(place, request, paths)
            for place, (request, budget) in enumerate(zip(requests, budgets))
            if self.ready(request) and (paths := self._paths(request)[:budget])
        ]
        drafts: list[Draft | None] = [None] * len(requests)
        if asked:
            h = self.states([each.request for each in asked])
            found = self._level_by_level(h, asked) if self.heads.reads_path else self._at_once(h, asked)
            for each, tokens in zip(asked, found):
                drafts[each.place] = _tree(each.paths, tokens)
        return drafts

    def ready(self, request: Request) -> bool:
        """True if the state is there after which a guess is to be made."""
        return bool(request.state.get(self.name, (-1, None))[0] == request.known)

    def states(self, requests: Sequence[Request]) -> Tensor:
        """What the heads read of these requests, [n, d] in their dtype."""
        return self.model.norm(torch.stack([request.state[self.name][1] for request in requests])).to(self.dtype)

    def _unembed(self, state: Tensor) -> Tensor:
        return self.model.unembed(state.to(self.model.dtype)).float()

    def _at_once(self, h: Tensor, asked: Sequence[_Asked]) -> list[dict[RankPath, int]]:
        """The token of every path: the head decides with the rank alone."""
        levels = max(len(path) for each in asked for path in each.paths)
        width = 1 + max(path[-1] for each in asked for path in each.paths)
        states = [self.heads.state(head, h, None) for head in range(levels)]
        if self.heads.lm_heads is None:
            logits = self._unembed(torch.cat(states)).view(levels, len(asked), -1)
        else:
            logits = torch.stack([self.heads.logits(head, state, self._unembed) for head, state in enumerate(states)])
        ids = _likeliest(logits.flatten(0, 1), width)  # head after head, of all requests each
        return [
            {path: ids[(len(path) - 1) * len(asked) + row][path[-1]] for path in each.paths}
            for row, each in enumerate(asked)
        ]

    def embedded(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Embeddings of roots and what was guessed after them, [paths, tokens, d] in the heads' dtype; all are equally
        long."""
        ids = torch.tensor(paths, device=self.model.device)
        return self.model.embed(ids.flatten()).to(self.dtype).view(*ids.shape, -1)

    def _level_by_level(self, h: Tensor, asked: Sequence[_Asked]) -> list[dict[RankPath, int]]:
        """The token of every path: the head reads the tokens of the path before it."""
        found: list[dict[RankPath, int]] = [{} for _ in asked]
        for head in range(max(len(path) for each in asked for path in each.paths)):
            level = [(row, path) for row, each in enumerate(asked) for path in each.paths if len(path) == head + 1]
            parents = list(dict.fromkeys((row, path[:-1]) for row, path in level))
            before = [_walk(asked[row].request.tokens[-1], above, found[row]) for row, above in parents]
            own = h[torch.tensor([row for row, _ in parents], device=h.device)]
            logits = self.heads.logits(head, self.heads.state(head, own, self.embedded(before)), self._unembed)
            ranks = dict(zip(parents, _likeliest(logits, 1 + max(path[-1] for _, path in level))))
            for row, path in level:
                found[row][path] = ranks[row, path[:-1]][path[-1]]
        return found


def _walk(root: int, path: RankPath, tokens: Mapping[RankPath, int]) -> list[int]:
    """The root, and the tokens along a path."""
    return [root, *(tokens[path[:end]] for end in range(1, len(path) + 1))]


def bound(host: Host, kind: type[LastStateHeads], heads: str, nodes: int) -> LastStateDrafter:
    """The runtime of a drafter with heads of a kind for the host's model. Raises what `loaded` does."""
    made, tree, _ = loaded(host.model, kind, heads, nodes)
    return LastStateDrafter(host, made, tree)


def loaded(
    model: Model, kind: type[LastStateHeads], heads: str, nodes: int
) -> tuple[LastStateHeads, tuple[RankPath, ...], StoredHeads | None]:
    """The heads of a kind for a model, their tree of so many nodes at most, and the folder, where they come from one.
    `heads`: auto, a folder or random:SEED. Raises UserError naming what does not fit."""
    seed = seed_of(heads)
    if seed is not None:
        made = kind.untrained(model.config.hidden, model.config.vocab)
        random_weights(made, seed)
        return made, rank_tree([UNMEASURED] * made.depth, nodes), None
    stored = read(locate(model, (kind.kind,), heads))
    check(stored, model, kind.kind)
    made = kind.of(stored)
    return made, tree_of(stored, made.depth, nodes), stored


def _likeliest(logits: Tensor, n: int) -> list[list[int]]:
    ids: list[list[int]] = logits.topk(min(n, logits.shape[-1]), -1).indices.tolist()
    return ids


def _tree(paths: Sequence[RankPath], tokens: Mapping[RankPath, int]) -> Draft:
    draft = Draft([], [])
    nodes: dict[RankPath, int] = {(): -1}
    for path in paths:
        nodes[path] = draft.add(nodes[path[:-1]], tokens[path])
    return draft
