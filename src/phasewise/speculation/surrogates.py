"""Surrogates stand in for the states of guesses, and each new guess enters as the trigram of its last three tokens.

```
 the model's states           h0  h1  h2              rows of the heads' KV, kept
 the pending token            .   .   .   g3          g3: trigram of tokens 1 to 3; out comes s3, in place of h3
 below it, a guess            .   .   .   s3  g4      g4: trigram of tokens 2, 3 and the guess
 below that                   .   .   .   s3  s4  g5  each level adds its parents' surrogates
```

Nothing but itself reads a trigram's row; surrogates are read by the rows below them. None of these rows stays: once the
model has judged, its true states take their place (arXiv 2402.15758).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes, SecondModelKV
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, FeatureDrafter, follower
from phasewise.speculation.heads.trigram import GRAM, TrigramHeads, gram_of
from phasewise.speculation.tree_drafter import TreeShape
from phasewise.step.span import Span
from phasewise.verbs.host import Host

Gram = tuple[int, ...]


class TrigramTable:
    """Trigrams of three tokens [n, d], computed when they are first asked for. The last `kept` of them are remembered;
    0: none. A row of the table is what the encoder gives."""

    def __init__(self, model: FeatureModel, kept: int = 0) -> None:
        heads = model.heads
        assert isinstance(heads, TrigramHeads)
        self.model, self.heads, self.kept = model, heads, kept
        self.computed = 0  # trigrams that went through the encoder
        self._places: dict[Gram, int] = {}
        self._held: list[Gram] = []  # by place
        self._next = 0
        self._rows: Tensor | None = None  # [kept, d]

    def rows(self, grams: Sequence[Gram]) -> Tensor:
        """One row [d] for each of these, in order."""
        different = list(dict.fromkeys(grams))
        if len(different) > self.kept:  # with a table this small, rows would be overwritten before they are read
            return self._encoded(grams)
        if fresh := [gram for gram in different if gram not in self._places]:
            made = self._encoded(fresh)
            if self._rows is None:
                self._rows = made.new_empty(self.kept, made.shape[1])
            asked = set(different)
            for gram, row in zip(fresh, made):
                self._rows[self._free(asked, gram)] = row
        assert self._rows is not None
        return self._rows[torch.tensor([self._places[gram] for gram in grams], device=self._rows.device)]

    def _free(self, asked: set[Gram], gram: Gram) -> int:
        """A place for a gram: one that is empty, else that of the oldest one that is not asked for now."""
        if len(self._held) < self.kept:
            self._held.append(gram)
            self._places[gram] = len(self._held) - 1
            return len(self._held) - 1
        while self._held[self._next] in asked:
            self._next = (self._next + 1) % self.kept
        at, self._next = self._next, (self._next + 1) % self.kept
        del self._places[self._held[at]]
        self._held[at], self._places[gram] = gram, at
        return at

    def _encoded(self, grams: Sequence[Gram]) -> Tensor:
        self.computed += len(grams)
        flat = [token for gram in grams for token in gram]
        return self.heads.trigram(self.model.embedded(flat).view(len(grams), GRAM, -1))


@dataclass(slots=True)
class _Draft:
    """The state of one request's draft while it grows. Node -1 is the pending token, whose entries come first."""

    state: Tensor  # [d], of the last token that has one
    ends: list[Sequence[int]]  # the last three tokens up to each node
    surrogates: Tensor  # [1 + nodes, d]
    depths: list[int]  # of the guess that follows each node, from 0 on
    parents: list[int]  # of each node but the pending token
    rows: dict[int, int]  # uncommitted row of a node's surrogate, for nodes that have one


class SurrogateCompanion(FeatureCompanion):
    """A companion whose kept rows are true states alone. `root` and `grow` give what output heads make of the
    last true state and a surrogate, [n, d] (or logits, where heads have matrices of their own)."""

    table: TrigramTable

    def remembering(self, kept: int) -> SurrogateCompanion:
        """Remembers the last `kept` trigrams."""
        self.table, self._drafts = TrigramTable(self.model, kept), dict[str, _Draft]()
        return self

    @property
    def heads(self) -> TrigramHeads:
        return self.table.heads

    def root(self, requests: Sequence[Request]) -> Tensor:
        grams = self._trigrams([request.tokens for request in requests])
        ahead = self._ahead(requests)
        spans = [self._with_trigram(span, grams[i : i + 1]) for i, span in enumerate(ahead)]
        x = self._forward(spans).x
        for span in spans:
            span.kv.commit(span.rows - 1)
        surrogates = x[torch.tensor([span.start + span.rows - 1 for span in spans], device=x.device)]
        states = torch.cat([self._state(request) for request in requests])
        self._drafts = {
            request.id: _Draft(states[i], [request.tokens[-GRAM:]], surrogates[i : i + 1], [0], [], {})
            for i, request in enumerate(requests)
        }
        return self._guessed(states, surrogates, [0] * len(requests))

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        spans = [self._below(level) for level in levels]
        x = self._forward(spans).x
        states, outputs, depths = list[Tensor](), list[Tensor](), list[int]()
        for level, span in zip(levels, spans):
            draft, end = self._drafts[level.request.id], span.start + span.rows
            mine, new = x[end - len(level.tokens) : end], [1 + draft.depths[1 + parent] for parent in level.parents]
            draft.depths += new
            draft.surrogates = torch.cat((draft.surrogates, mine))
            states.append(draft.state.expand(len(mine), -1))
            outputs.append(mine)
            depths += new
        return self._guessed(torch.cat(states), torch.cat(outputs), depths)

    def _guessed(self, states: Tensor, surrogates: Tensor, depths: Sequence[int]) -> Tensor:
        """The outputs (`TrigramHeads.read`) that the heads of these depths give for the rows, in order."""
        different = sorted(set(depths))
        if len(different) == 1:
            return self.heads.read(different[0], states, surrogates)
        found: Tensor | None = None
        for depth in different:
            at = torch.tensor([i for i, own in enumerate(depths) if own == depth], device=states.device)
            rows = self.heads.read(depth, states[at], surrogates[at])
            found = rows.new_empty(len(depths), rows.shape[1]) if found is None else found
            found[at] = rows
        assert found is not None
        return found

    def _trigrams(self, ends: Sequence[Sequence[int]]) -> Tensor:
        """The trigrams [n, d] of the last tokens of these texts."""
        back = self.heads.reaches_back()
        return self.table.rows([gram_of(tokens, back) for tokens in ends])

    def _state(self, request: Request) -> Tensor:
        """The last true state [1, d]."""
        count = len(self.text(request))
        return self.features.between(request, count - 1, count)

    def _with_trigram(self, span: Span, gram: Tensor) -> Span:
        """The same rows, and behind them the pending token's trigram."""
        assert span.given is not None
        span.kv.reserve(span.rows + 1)
        start, tokens = span.positions[0], [*span.tokens, span.request.tokens[-1]]
        places = range(start, start + len(tokens))
        return Span(span.request, span.kv, span.phase, tokens, places, given=torch.cat((span.given, gram)))

    def _below(self, level: NewNodes) -> Span:
        """Surrogates of parents that have no row yet, then the trigrams of the new nodes."""
        draft, held = self._drafts[level.request.id], level.request.state[self.name]
        assert isinstance(held, SecondModelKV)
        drafted, first = held.uncommitted, len(held.uncommitted)
        fresh = [node for node in dict.fromkeys(level.parents) if node not in draft.rows]
        above = [-1 if node < 0 else draft.rows[draft.parents[node]] for node in fresh]
        stand_ins = [draft.ends[1 + node][-1] for node in fresh]
        masks = [drafted.add(stand_ins, above)] if fresh else []
        draft.rows |= {node: first + i for i, node in enumerate(fresh)}
        masks.append(drafted.add(level.tokens, [draft.rows[parent] for parent in level.parents]))
        ends = [[*draft.ends[1 + parent], token][-GRAM:] for token, parent in zip(level.tokens, level.parents)]
        draft.ends += ends
        draft.parents += level.parents
        places: Sequence[int] = [held.rows + depth for depth in drafted.depths[first:]]
        sees = together(masks, first)
        if sees is None:
            places = range(places[0], places[0] + len(places))
        given = torch.cat((draft.surrogates[[1 + node for node in fresh]], self._trigrams(ends)))
        tokens = [*stand_ins, *level.tokens]
        return Span(level.request, held.kv, self.phase, tokens, places, sees, first=first, given=given)


def together(masks: Sequence[Tensor | None], first: int) -> Tensor | None:
    """What rows see that were added to a draft one after another (`DraftRows.add`), behind `first` others: bool [rows,
    first + rows]; None: each row sees all before it."""
    if all(mask is None for mask in masks):
        return None
    counts = [1 if mask is None else len(mask) for mask in masks]
    sees, at = torch.zeros(sum(counts), first + sum(counts), dtype=torch.bool), 0
    for mask, count in zip(masks, counts):
        if mask is None:
            sees[at, : first + at + 1] = True
        else:
            sees[at : at + count, : mask.shape[1]] = mask
        at += count
    return sees


class SurrogateDrafter(FeatureDrafter):
    """The runtime of drafters that grow trees of guesses read from surrogates."""

    companion: SurrogateCompanion

    def _runs(self, levels: int) -> int:
        """Rows of a draft: each node that is asked for enters as a trigram, and as a surrogate if others follow it; so
        does the pending token."""
        return 2 * super()._runs(levels) + 1


def surrogate_drafter(
    host: Host, name: str, model: FeatureModel, shape: TreeShape, chunk: int, table: int
) -> SurrogateDrafter:
    """Makes the runtime of a drafter called `name` with such heads, which remembers so many trigrams."""
    companion = follower(host, name, model, SurrogateCompanion).remembering(table)
    return SurrogateDrafter(host, companion, shape, chunk)
