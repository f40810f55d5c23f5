"""Trees of likely continuations by what follows two tokens: best first, or by Monte Carlo tree search (ADED)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from phasewise.verbs.draft import Draft

Follows = Callable[[int, int], list[tuple[int, float]]]
"""(two tokens) -> what follows them with its weight, which is above 0, heaviest first."""


def best_first(follows: Follows, end: tuple[int, int], nodes: int, levels: int) -> Draft:
    """The `nodes` continuations of at most `levels` tokens that are most likely, likeliest first: those of the largest
    product of weights, each as a share of its row's. Ties: what was found first."""
    draft = Draft([], [])
    ahead: list[tuple[float, int, int, int, tuple[int, int], list[tuple[int, float]], float]] = []
    found = 0

    def push(chance: float, parent: int, depth: int, before: tuple[int, int]) -> None:
        """The first child there; each brings its next sibling when its turn has come."""
        nonlocal found
        row = follows(*before)
        if row:
            scale = chance / sum(weight for _, weight in row)
            heappush(ahead, (-scale * row[0][1], found, parent, depth, before, row, scale))
            found += 1

    push(1.0, -1, 0, end)
    while ahead and len(draft.tokens) < nodes:
        chance, _, parent, depth, before, row, scale = heappop(ahead)
        token = row[0][0]
        node = draft.add(parent, token)
        if len(row) > 1:
            heappush(ahead, (-scale * row[1][1], found, parent, depth, before, row[1:], scale))
            found += 1
        if depth + 1 < levels:
            push(-chance, node, depth + 1, (before[1], token))
    return draft


@dataclass(eq=False, slots=True)
class _Node:
    token: int
    weight: float
    path: tuple[int, ...]  # tokens down to it
    visits: int = 0
    reward: float = 0.0
    children: list[_Node] | None = None  # None: not expanded


@dataclass
class MonteCarlo:
    """The paper's search: walks down the tree, of at most `levels` tokens. At a node with N visits the child with the
    largest

        reward / visits + (32 + ln((N + 9) / 8)) weight sqrt(N) / (1 + visits),

    is next, but those never visited come before all others, heaviest first. A node reached for the first time gets its
    children; the walk enters the heaviest, goes on at random, by weight, and rewards all on its way with 1 + the sum of
    the weights. `us`: uniform numbers in [0, 1).
    """

    follows: Follows
    end: tuple[int, int]
    levels: int
    us: Callable[[], float]
    root: _Node = field(default_factory=lambda: _Node(-1, 0.0, ()))

    def search(self, rounds: int) -> None:
        for _ in range(rounds):
            self._walk()

    def draft(self, nodes: int) -> Draft:
        """Most visited first, each followed by the likeliest token after it. Ties: what is nearer, then found first."""
        found, ahead = list[_Node](), [self.root]
        while ahead:  # level by level
            ahead = [child for node in ahead for child in node.children or () if child.visits]
            found += ahead
        found.sort(key=lambda node: -node.visits)
        paths = list[tuple[int, ...]]()
        for node in found[:nodes]:
            after = self._after(node.path)
            paths.append((*node.path, after[0][0]) if after else node.path)
        return Draft.trie(paths).cut(nodes)

    def _walk(self) -> None:
        node, way = self.root, [self.root]
        while node.children:
            node = self._choice(node)
            way.append(node)
        if node.children is None and len(node.path) < self.levels:
            after = self._after(node.path)
            node.children = [_Node(token, weight, (*node.path, token)) for token, weight in after]
            if node.children:
                node = node.children[0]
                way.append(node)
        reward = 1.0 + sum(each.weight for each in way) + self._rollout(node.path)
        for each in way:
            each.visits += 1
            each.reward += reward

    def _choice(self, node: _Node) -> _Node:
        scale = (32 + math.log((node.visits + 9) / 8)) * math.sqrt(node.visits)
        best, most = None, -math.inf
        for child in node.children or ():
            if not child.visits:
                return child
            score = child.reward / child.visits + scale * child.weight / (1 + child.visits)
            if score > most:
                best, most = child, score
        assert best is not None
        return best

    def _rollout(self, path: tuple[int, ...]) -> float:
        """Weights of tokens drawn below a path, up to the last level."""
        total = 0.0
        while len(path) < self.levels:
            after = self._after(path)
            if not after:
                break
            left = self.us() * sum(weight for _, weight in after)
            drawn = after[-1]
            for each in after:
                left -= each[1]
                if left < 0:
                    drawn = each
                    break
            total, path = total + drawn[1], (*path, drawn[0])
        return total

    def _after(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        first, second = (*self.end, *path)[-2:]
        return self.follows(first, second)
