"""Feature drafters that guess k tokens a pass, and the next k from these: semi-autoregressive ones (arXiv 2412.12639).

The last k pairs of a text make k distributions. Those of levels 2 to k of a tree do not hang on the guesses above them
in the same group. Below a guess of level k, 2 k and so on the next pass goes on: with the k guesses down to it, and the
k features that the pass before has given, in the recurrent state that its group has left. So a tree of any shape takes
one pass for each k levels.

Only the last k rows of a text need what attention gives; of all others the keys and values are kept, which do not hang
on who sees whom. So groups may end wherever the text does: the last k rows run again in every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phasewise.kv.cache import KV
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion, NewNodes, SecondModelKV, common
from phasewise.speculation.draft_rows import DraftRows
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, FeatureDrafter, Features, follower
from phasewise.speculation.heads.falcon import RECURRENT_LAYERS, FalconHeads, Recurrence
from phasewise.speculation.tree_drafter import TreeShape
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.host import Host

if TYPE_CHECKING:
    from phasewise.kv.drawers import Room
    from phasewise.kv.format import KVShape


class GroupRows(DraftRows):
    """Rows of a draft that come in groups of `together`. A row sees its whole group, and the groups above it."""

    __slots__ = ("together",)

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together = together

    def add_groups(self, above: Sequence[int]) -> Tensor:
        """Adds a group below each of these, which are numbers of groups that were added before; -1: below the
        request's tokens. Returns what the new rows see, bool [new, rows]."""
        k, first = self.together, len(self)
        sees = torch.zeros(first + len(above) * k, first + len(above) * k, dtype=torch.bool)
        if self._sees is not None:
            sees[:first, :first] = self._sees
        for i, group in enumerate(above):
            own = slice(first + i * k, first + (i + 1) * k)
            sees[own, own] = True
            if group >= 0:
                sees[own, :first] = sees[group * k, :first].clone()
            start = 0 if group < 0 else self.depths[group * k] + k
            self.depths += range(start, start + k)
        self._sees = sees
        return sees[first:]


class RecurrentKV(SecondModelKV):
    """The KV of a request's rows, and the recurrent state after the first `at` pairs of its text."""

    def __init__(self, kv: KV, state: Recurrence) -> None:
        super().__init__(kv)
        self.state, self.at = state, 0

    def fork(self) -> RecurrentKV:
        self.settle([])
        twin = RecurrentKV(self.kv.fork(), self.state)
        twin.base, twin.tail, twin.at = self.base, list(self.tail), self.at
        return twin


class TreeNode(NamedTuple):
    """A guess of a tree that grows: the group whose output foretold it, its level from 1 on, and the tokens down to it
    from its group's first."""

    group: int
    level: int
    path: tuple[int, ...]


@dataclass(slots=True)
class GrownTree:
    """The groups that make a request's tree so far. Group 0 is that of the text's last pairs.

    `said` [groups, k, V]: logits. `features` [groups, k, d]: what the pass gives in place of the target's states.
    `state` [layers, groups, d] each: the recurrent state behind every group.
    """

    said: Tensor
    features: Tensor
    state: Recurrence
    nodes: list[TreeNode]


class GroupCompanion(FeatureCompanion):
    """A companion that guesses `together` tokens a pass. `root` and `grow` give logits, not rows."""

    @property
    def heads(self) -> FalconHeads:
        heads = self.model.heads
        assert isinstance(heads, FalconHeads)
        return heads

    @property
    def together(self) -> int:
        return self.heads.together

    def follow(self, features: Features) -> GroupCompanion:
        super().follow(features)
        self.heads.pack()
        return self

    def ready(self, request: Request) -> bool:
        return super().ready(request) and len(self.text(request)) >= self.together

    # ---- the text
    def root(self, requests: Sequence[Request]) -> Tensor:
        k, spans = self.together, self._ahead(requests)
        x = self._committed(spans).x
        ends = [span.start + span.rows - k + i for span in spans for i in range(k)]
        outputs = x[torch.tensor(ends, device=x.device)]
        said = self.model.head(outputs).view(len(spans), 1, k, -1)
        features = self.heads.passed_on(outputs).view(len(spans), 1, k, -1)
        self._trees = {
            request.id: GrownTree(said[i], features[i], (self._after[0][:, i, None], self._after[1][:, i, None]), [])
            for i, request in enumerate(requests)
        }
        return said[:, 0, 0].clone()

    def logits(self, x: Tensor) -> Tensor:
        return x

    def _ahead(self, requests: Sequence[Request]) -> list[Span]:
        spans = []
        for request in requests:
            text = self.text(request)
            held = self._follower(request, len(text))
            known = held.base + common(held.tail, text[held.base :])
            start = max(0, min(known, len(text) - self.together))
            span = self._span(request, held, start, text[start:])
            span.block = span.rows  # all rows see all; what comes out of all but the last k is left alone
            spans.append(span)
            held.base, held.tail = len(text) - 1, [*text[-1:]]
        return spans

    def _span(self, request: Request, follower: SecondModelKV, start: int, tokens: Sequence[int]) -> Span:
        return Companion._span(self, request, follower, start, tokens)  # its rows come once all spans are there

    def _committed(self, spans: Sequence[Span]) -> Hidden:
        self._enter(spans)
        return super()._committed(spans)

    def _enter(self, spans: Sequence[Span]) -> None:
        """Give spans of texts their rows, and keep the recurrent state k pairs before each one's end: from there the
        next draft goes on. `_after`: the states at the ends."""
        k, held, firsts, lasts = self.together, list[RecurrentKV](), list[Tensor](), list[Tensor]()
        for span in spans:
            its: RecurrentKV = span.request.state[self.name]
            start, end = span.positions[0], span.positions[0] + span.rows
            if its.at > start:
                its.state, its.at = self.heads.fresh(1), 0
            tokens = self.text(span.request)[its.at : end]
            pairs = self.model.inputs(tokens, self.features.between(span.request, its.at, end))
            cut = max(0, len(tokens) - k)
            held.append(its)
            firsts.append(pairs[:cut])
            lasts.append(pairs[cut:])
        early, before = self._recur(firsts, _side_by_side([its.state for its in held]))
        late, self._after = self._recur(lasts, before)
        for i, (span, its) in enumerate(zip(spans, held)):
            rows = torch.cat((early[i], late[i]))[span.positions[0] - its.at :]
            span.given = span.hidden = rows
            its.state, its.at = (before[0][:, i, None], before[1][:, i, None]), its.at + len(early[i])

    def _recur(self, pairs: Sequence[Tensor], before: Recurrence) -> tuple[list[Tensor], Recurrence]:
        """Pairs [length, 2 d] of each sequence -> its rows [length, d], and the states after all of them. Sequences of
        one length run together."""
        rows = list(pairs)
        after = (before[0].clone(), before[1].clone())
        for length in {len(each) for each in pairs}:
            own = [i for i, each in enumerate(pairs) if len(each) == length]
            if not length:
                for i in own:
                    rows[i] = pairs[i][:, : self.model.config.hidden]
                continue
            given = (before[0][:, own].contiguous(), before[1][:, own].contiguous())
            found, (after[0][:, own], after[1][:, own]) = self.heads.enter(torch.stack([pairs[i] for i in own]), given)
            for i, its in zip(own, found):
                rows[i] = its
        return rows, after

    def _follower(self, request: Request, tokens: int) -> SecondModelKV:
        held = self._held(request)
        if held is None:
            held = request.state[self.name] = RecurrentKV(self.store.open(request, tokens), self.heads.fresh(1))
        return held

    # ---- the tree
    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        """Logits [all new nodes, V]. A pass runs where groups end, for all requests together."""
        ends = [self._add(level) for level in levels]
        if any(ends):
            self._pass([(level.request, end) for level, end in zip(levels, ends) if end])
        found = []
        for level in levels:
            tree = self._trees[level.request.id]
            new = tree.nodes[-len(level.tokens) :]
            found.append(tree.said[[node.group for node in new], [node.level % self.together for node in new]])
        return torch.cat(found)

    def _add(self, level: NewNodes) -> list[TreeNode]:
        """Notes new nodes. Returns those that end a group; each is noted as of the group that will be made below it."""
        tree, k, ends = self._trees[level.request.id], self.together, list[TreeNode]()
        for token, parent in zip(level.tokens, level.parents):
            above = TreeNode(0, 0, ()) if parent < 0 else tree.nodes[parent]
            node = TreeNode(above.group, above.level + 1, (*above.path, token))
            if node.level % k == 0:
                ends.append(node)
                node = TreeNode(len(tree.said) - 1 + len(ends), node.level, ())
            tree.nodes.append(node)
        return ends

    def _pass(self, below: Sequence[tuple[Request, Sequence[TreeNode]]]) -> None:
        """Runs a group below each of these guesses."""
        spans, k = list[Span](), self.together
        groups = [(self._trees[request.id], node) for request, nodes in below for node in nodes]
        features = torch.cat([tree.features[node.group] for tree, node in groups])
        tokens = [token for _, node in groups for token in node.path]
        pairs = self.model.inputs(tokens, features).view(len(groups), k, -1)
        before = [(tree.state[0][:, node.group, None], tree.state[1][:, node.group, None]) for tree, node in groups]
        given, after = self.heads.enter(pairs, _side_by_side(before))
        at = 0
        for request, nodes in below:
            spans.append(self._groups_below(request, nodes, given[at : at + len(nodes)].flatten(0, 1)))
            at += len(nodes)
        outputs = self._forward(spans).x
        said = self.model.head(outputs).view(len(groups), k, -1)
        features, at = self.heads.passed_on(outputs).view(len(groups), k, -1), 0
        for request, nodes in below:
            tree, own = self._trees[request.id], slice(at, at + len(nodes))
            tree.said = torch.cat((tree.said, said[own]))
            tree.features = torch.cat((tree.features, features[own]))
            tree.state = tuple(torch.cat((old, new[:, own]), 1) for old, new in zip(tree.state, after))  # type: ignore[assignment]
            at += len(nodes)

    def _groups_below(self, request: Request, nodes: Sequence[TreeNode], given: Tensor) -> Span:
        held: SecondModelKV = request.state[self.name]
        rows = held.uncommitted
        if not isinstance(rows, GroupRows):
            rows = held.uncommitted = GroupRows(self.together)
        first = len(rows)
        sees = rows.add_groups([node.group - 1 for node in nodes])  # the text's own group is no draft's
        positions = [held.rows + depth for depth in rows.depths[first:]]
        tokens = [token for node in nodes for token in node.path]
        return Span(request, held.kv, self.phase, tokens, positions, sees, first=first, given=given)


class GroupDrafter(FeatureDrafter):
    """The runtime of drafters that grow trees of guesses made k at a time."""

    companion: GroupCompanion

    def __init__(self, host: Host, companion: GroupCompanion, shape: TreeShape, chunk: int) -> None:
        super().__init__(host, companion, shape, chunk)
        self.drawer = self._drawer

    def _drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Bytes of the features, and of a recurrent state."""
        its = self.companion.model
        state = 2 * RECURRENT_LAYERS * its.config.hidden * its.dtype.itemsize
        return self.companion.features.drawer(layer, shape, room) + (0 if layer else state)

    def _runs(self, levels: int) -> int:
        k = self.companion.together
        return k * sum(self.shape.runs(level) - self.shape.runs(level - 1) for level in range(k, levels, k))


def group_drafter(host: Host, name: str, model: FeatureModel, shape: TreeShape, chunk: int) -> GroupDrafter:
    """Makes the runtime of a drafter called `name` with heads that guess several tokens a pass."""
    return GroupDrafter(host, follower(host, name, model, GroupCompanion), shape, chunk)


def _side_by_side(states: Sequence[Recurrence]) -> Recurrence:
    """The states [layers, n, d] of n sequences as those of one batch."""
    hidden, cell = zip(*states)
    return torch.cat(hidden, 1), torch.cat(cell, 1)
