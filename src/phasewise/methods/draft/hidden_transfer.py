"""Pseudo hidden states of later tokens, made in the middle of the model, guess them in the verify pass itself (Hidden
Transfer, arXiv 2404.12022): exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.first_layers import FirstLayers
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.hidden_transfer import TransferMaps
from phasewise.speculation.heads.hidden_transfer_layout import transfer_maps
from phasewise.speculation.heads.last_state import MOST, RankPath, rank_tree
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "hidden_transfer"
DEEPEST = 8  # guesses in a row


@dataclass(frozen=True)
class HiddenTransfer(Method):
    """A fixed tree of at most `nodes` guesses, at most `depth` in a row and no more than the heads have maps.

    A pass runs the pending token and its guesses through the model's first l layers. There, linear maps make of each
    row the pseudo rows of the next tokens. The layers from l on run both: a pseudo row sees what its origin sees, its
    origin, and the earlier pseudo rows of that origin; no real row sees any. Those of the last accepted row say what
    the next pass guesses, and the model's own output head reads them. None stays in the KV.

    So n guesses cost n + 1 rows of l layers, and (n + 1)(1 + maps) rows of the others; each layer is read once. A pass
    after a prompt, or after its rows were computed anew, has nothing to guess by: it guesses nothing, and makes pseudo
    rows. Which ranks the tree holds follows from how often each was right on held-out text, as measured in training.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder of `phasewise train heads
    hidden_transfer`; or `random:SEED`, three maps behind half of the layers. Guesses are chosen, not drawn. Verifiers
    under which tokens depend on the size of a guess are refused, as are methods that choose among the rows or layers of
    a decode step. Left out: maps at several layers, one for each token.
    """

    heads: str = AUTO
    nodes: int = 15
    depth: int = 3

    paper: ClassVar[str] = "arXiv 2404.12022"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"nodes": 5, "depth": 2}

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST:
            raise UserError(f"{NAME}: nodes={self.nodes} must be from 1 to {MOST}")
        if not 1 <= self.depth <= DEEPEST:
            raise UserError(f"{NAME}: depth={self.depth} must be from 1 to {DEEPEST}")

    @property
    def traits(self) -> Traits:
        rows = (1 + self.nodes) * (1 + self.depth)
        return Traits("draft", drawn=False, max_nodes=rows - 1, begins_rows=True)

    def bind(self, host: Host) -> HiddenTransferDrafter:
        maps, accuracy = transfer_maps(host.model, self.heads)
        return HiddenTransferDrafter(host, maps, rank_tree(accuracy[: self.depth], self.nodes), self.depth)


class HiddenTransferDrafter(Drafter):
    """Hidden Transfer in one engine. Of a request it keeps the last layer's pseudo rows of the token before the pending
    one, as `request.state` has it: the number of tokens for which they hold, and the rows [maps, d]."""

    def __init__(self, host: Host, maps: TransferMaps, tree: Sequence[RankPath], depth: int) -> None:
        self.model, self.counters = host.model, host.counters
        self.maps = maps.to(host.model.device).requires_grad_(False)
        self.tree, self.depth = tuple(tree), min(depth, maps.depth)
        self.first_layers: FirstLayers = FirstLayers(host.model, maps.layer, host.counters)

    # ---- how large
    def size(self, request: Request) -> int:
        levels = headroom(request)
        return self._rows(self._within(levels), levels)

    def reach(self, context: int) -> int:
        return ENDLESS

    def _within(self, levels: int) -> list[RankPath]:
        return [path for path in self.tree if len(path) <= levels]

    def _pseudo(self, above: int, levels: int) -> int:
        """The pseudo rows of a row so many guesses below the pending token: as many as the next draft may be deep."""
        return max(0, min(self.depth, levels - above - 1))

    def _rows(self, paths: Sequence[RankPath], levels: int) -> int:
        """The nodes of a draft: its guesses, and the pseudo rows of these and of the pending token."""
        return len(paths) + sum(self._pseudo(len(path), levels) for path in ((), *paths))

    # ---- drafts
    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        trees = self._trees(requests, budgets)
        drafts = [self._asking(r, tree, most) for r, tree, most in zip(requests, trees, budgets)]
        begun = [(r, draft) for r, draft in zip(requests, drafts) if draft is not None]
        if begun:
            self._begin([request for request, _ in begun], [draft for _, draft in begun])
        return drafts

    def _trees(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """The guesses for each request, as many as there is room for with their pseudo rows; none where no pseudo rows
        say any."""
        known = [self._known(request) for request in requests]
        paths = [self._fitting(*each) for each in zip(requests, budgets, map(len, known))]
        asked = [rows[: max(map(len, own))] for rows, own in zip(known, paths) if own]
        trees = [Draft([], []) for _ in requests]
        if not asked:
            return trees
        rows = torch.cat(asked)
        self.counters.head_rows += len(rows)
        width = 1 + max(path[-1] for own in paths for path in own)
        ids: list[list[int]] = self.model.head(rows).topk(min(width, self.model.config.vocab), -1).indices.tolist()
        at = 0
        for tree, own in zip(trees, paths):
            nodes: dict[RankPath, int] = {(): -1}
            for path in own:
                nodes[path] = tree.add(nodes[path[:-1]], ids[at + len(path) - 1][path[-1]])
            at += max(map(len, own), default=0)
        return trees

    def _known(self, request: Request) -> Tensor:
        """The pseudo rows by which a request is guessed for, [at most maps, d]."""
        known, rows = request.state.get(NAME, (-1, None))
        if known != request.known or rows is None:
            return torch.empty(0, self.model.config.hidden, dtype=self.model.dtype, device=self.model.device)
        found: Tensor = rows
        return found

    def _fitting(self, request: Request, budget: int, deep: int) -> list[RankPath]:
        levels, most = headroom(request), self._most(request, budget)
        paths = self._within(min(levels, deep))
        while paths and self._rows(paths, levels) > most:
            paths.pop()
        return paths

    def _most(self, request: Request, budget: int) -> int:
        return min(budget, self.first_layers.room(request) - 1)

    def _asking(self, request: Request, tree: Draft, budget: int) -> Draft | None:
        """The draft, with its pseudo rows behind its guesses; None: there is room for neither."""
        levels, tokens = headroom(request), len(tree.tokens)
        if self._rows(tree.paths(tokens), levels) > self._most(request, budget):
            return None
        for node, path in enumerate(((), *tree.paths(tokens)), -1):
            above = node
            for _ in range(self._pseudo(len(path), levels)):
                above = tree.add(above, 0)  # no token: its row is given
                tree.ask += 1
        return tree if tree.tokens else None

    def _begin(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> None:
        """Run the first layers, and make the rows that enter the others beside theirs."""
        rows = self.first_layers.run_trees(requests, drafts)
        pseudo = self.maps(torch.cat(rows).float())[:, : self.depth].to(self.model.dtype)  # [rows, maps, d]
        at = 0
        for request, draft, own in zip(requests, drafts, rows):
            levels = headroom(request)
            paths = ((), *draft.paths(len(own) - 1))
            made = [pseudo[at + row, : self._pseudo(len(path), levels)] for row, path in enumerate(paths)]
            self.first_layers.begin_behind(request, torch.cat(made))
            at += len(own)

    # ---- what the pass says
    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            if span.note is None or not span.note.ask or span.layers is None:
                continue  # none of its rows was made by the maps
            last = outcome.keep - 1 if isinstance(outcome.keep, int) else outcome.keep[-1]
            rows = _pseudo_rows(span.note, last - 1)
            said = hidden.x[span.start + 1 + rows.start : span.start + 1 + rows.stop].clone()
            span.request.state[NAME] = (span.request.known + len(outcome.tokens), said)


def _pseudo_rows(draft: Draft, node: int) -> range:
    """The nodes that ask below a guess (-1: the pending token), each the child of the one before."""
    total, first = len(draft.tokens), len(draft.tokens) - draft.ask
    start = next((i for i in range(first, total) if draft.parents[i] == node), total)
    stop = start
    while stop < total and draft.parents[stop] == (node if stop == start else stop - 1):
        stop += 1
    return range(start, stop)
