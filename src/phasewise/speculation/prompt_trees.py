"""Trees of guesses whose nodes have prompt tokens behind them: which ones, by how often guesses are right (the
dynamic sparse trees of arXiv 2405.18628).

A pass over a tree makes the guesses of the next one, behind the node that is accepted last: as deep as that has prompt
tokens. So passes are a Markov chain of which the states are these numbers, with a tree for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

import torch

from phasewise.speculation.heads.last_state import RankPath, rank_tree

Accuracy = tuple[tuple[float, ...], ...]
"""How often each rank of each depth is right where the guesses before it are: [depths][ranks]."""


@dataclass(frozen=True)
class PromptTree:
    """The guesses of a pass, likeliest first, and how many prompt tokens stand behind each and behind the pending token
    `()`."""

    paths: tuple[RankPath, ...]
    prompts: Mapping[RankPath, int]

    @property
    def rows(self) -> int:
        """Guesses and prompt tokens."""
        return len(self.paths) + sum(self.prompts.values())


Trees = tuple[PromptTree, ...]
"""A tree for each number of depths that there are guesses for, from none on."""


@lru_cache(maxsize=64)
def prompt_trees(accuracy: Accuracy, rows: int) -> Trees:
    """Trees of at most `rows` guesses and prompt tokens that have the most tokens accepted in the long run.

    For every number of guesses the likeliest ones are taken, with all prompt tokens behind each. Then those are taken
    away one by one by which least is lost, until the rows do; the pending token keeps all of its own. The number of
    guesses is the best by `expected_accepted`. Needs a row more than there are depths.
    """
    depths = len(accuracy)
    assert rows > depths, "a guess, beside the pending token's prompt tokens"
    whole = [(), *(rank_tree(accuracy[:depth], rows - depths) for depth in range(1, depths + 1))]
    best: Trees = ()
    most = -1.0
    for guesses in range(1, rows - depths + 1):
        chances = [_chances(accuracy, paths[:guesses]) for paths in whole]
        gains = [sum(each.values()) - each[()] for each in chances]
        trees = tuple(_thinned(each, gains, rows) for each in chances)
        accepted = expected_accepted(accuracy, trees)
        if accepted > most:
            best, most = trees, accepted
    return best


def _chances(accuracy: Accuracy, paths: Sequence[RankPath]) -> dict[RankPath, float]:
    """How likely each guess is to be accepted, and the pending token, which is."""
    found: dict[RankPath, float] = {(): 1.0}
    for path in paths:
        found[path] = found[path[:-1]] * accuracy[len(path) - 1][path[-1]]
    return found


def _last(chances: Mapping[RankPath, float]) -> dict[RankPath, float]:
    """How likely each of them is to be accepted last."""
    found = dict(chances)
    for path, chance in chances.items():
        if path:
            found[path[:-1]] -= chance
    return found


def _thinned(chances: Mapping[RankPath, float], gains: Sequence[float], rows: int) -> PromptTree:
    """A tree without the prompt tokens that matter least. `gains`: the guesses that are accepted of a tree of so many
    depths."""
    depths, paths = len(gains) - 1, tuple(chances)[1:]
    prompts, last = dict.fromkeys(chances, depths), _last(chances)
    over = len(paths) + depths * len(prompts) - rows
    worth = [gain - before for before, gain in pairwise(gains)]  # of each prompt token, where its node is last
    losses = [(last[path] * worth[-1], -at, path) for at, path in enumerate(paths)]
    heapify(losses)
    for _ in range(over):
        _, at, path = heappop(losses)
        prompts[path] -= 1
        if prompts[path]:
            heappush(losses, (last[path] * worth[prompts[path] - 1], at, path))
    return PromptTree(paths, prompts)


def transitions(accuracy: Accuracy, trees: Trees) -> torch.Tensor:
    """float64 [states, states]: how likely a pass over the tree of a state is to leave behind another."""
    found = [[0.0] * len(trees) for _ in trees]
    for row, tree in zip(found, trees):
        for path, chance in _last(_chances(accuracy, tree.paths)).items():
            row[tree.prompts[path]] += chance
    return torch.tensor(found, dtype=torch.float64)


def stationary(chances: torch.Tensor) -> torch.Tensor:
    """The share of passes in each state of a chain [states, states] in the long run, float64 [states]."""
    states = len(chances)
    equations = chances.T - torch.eye(states, dtype=torch.float64)
    equations[-1] = 1.0  # the shares are one together; any other equation follows from the rest
    whole = torch.zeros(states, dtype=torch.float64)
    whole[-1] = 1.0
    found: torch.Tensor = torch.linalg.solve(equations, whole)
    return found


def expected_accepted(accuracy: Accuracy, trees: Trees) -> float:
    """Guesses that a pass accepts in the long run."""
    shares: list[float] = stationary(transitions(accuracy, trees)).tolist()
    return sum(share * (sum(_chances(accuracy, tree.paths).values()) - 1.0) for share, tree in zip(shares, trees))
