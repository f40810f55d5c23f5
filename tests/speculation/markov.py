"""A world without models: Markov tables as target and drafter, for exact statements about drafting and verifying."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phasewise.speculation.branching import branch
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.sample import Dist, Purpose, uniform
from phasewise.verbs.verify import Verifier
from tests.lazy import lazy

stats: Any = lazy("scipy.stats")

Table = torch.Tensor  # [V, V]: row t = distribution of the token after t
Drafts = Callable[[int, int, int], Draft]  # (last token, seed, position) -> a draft


def table(vocab: int, seed: int, sharp: float = 1.5) -> Table:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab, vocab, generator=gen) * sharp).softmax(-1)


def relative(p: Table, seed: int, noise: float = 1.0) -> Table:
    """A drafter's table: alike enough to be accepted often, unlike enough to be refused often."""
    gen = torch.Generator().manual_seed(seed)
    return (p.log() + torch.randn(p.shape, generator=gen) * noise).softmax(-1)


def target(p: Table, draft: Draft, last: int) -> Dist:
    """The target's distributions after the pending token `last` and after every node."""
    rows = p[torch.tensor([last, *draft.tokens])]
    return Dist(rows.argmax(-1).tolist(), p.shape[0], range(len(rows)), rows)


@dataclass(frozen=True)
class Tree:
    """A drafter: level d gives `widths[d]` children to every node of the level before, drawn from table `q`."""

    q: Table
    widths: Sequence[int]
    drawn: Drawn

    def __call__(self, last: int, seed: int, position: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[torch.Tensor] = []
        level = [-1]
        for depth, width in enumerate(self.widths):
            grown = []
            for node in level:

                def us(i: int, at: int = position + depth, index: int = 16 * (node + 1)) -> float:
                    return uniform(seed, at, Purpose.DRAFT, index + i)

                children, q = branch(self.q[last if node < 0 else tokens[node]], width, self.drawn, us)
                grown += range(len(tokens), len(tokens) + len(children))
                tokens += children
                parents += [node] * len(children)
                rows += [] if q is None else [q]
            level = grown
        return Draft(tokens, parents, self.drawn, torch.cat(rows) if rows else None)


def generate(verify: Verifier, drafter: Drafts, p: Table, n: int, seed: int) -> list[int]:
    """The first `n` tokens after token 0, round by round as the engine would."""
    out: list[int] = []
    while len(out) < n:
        last, position = (out or [0])[-1], len(out)
        draft = drafter(last, seed, position)

        def rng(depth: int, purpose: int, index: int = 0, at: int = position) -> float:
            return uniform(seed, at + depth, purpose, index)

        path, token = verify(draft, target(p, draft, last), rng)
        out += [*(draft.tokens[node] for node in path), token]
    return out[:n]


def sequences(p: Table, n: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every sequence of `n` tokens after token 0."""
    chances = {}
    for sequence in itertools.product(range(p.shape[0]), repeat=n):
        chance = 1.0
        for last, token in zip((0, *sequence), sequence):
            chance *= float(p[last, token])
        chances[sequence] = chance
    return chances


def fits(drawn: Sequence[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """p-value of a chi-square test of draws against exact chances; cells expecting fewer than 5 are pooled."""
    counts, n = Counter(drawn), len(drawn)
    assert set(counts) <= {cell for cell, chance in chances.items() if chance > 0}, "an impossible sequence was drawn"
    rest_seen = rest_expected = 0.0
    seen, expected = [], []
    for cell, chance in chances.items():
        if chance * n < 5:
            rest_seen += counts[cell]
            rest_expected += chance * n
        else:
            seen.append(float(counts[cell]))
            expected.append(chance * n)
    if rest_expected > 0:
        seen.append(rest_seen)
        expected.append(rest_expected)
    scale = sum(seen) / sum(expected)  # 1 up to rounding
    return float(stats.chisquare(seen, np.array(expected) * scale).pvalue)
