"""LQ-LoRA (arXiv 2311.12023): a matrix A as Q + L1 L2, few bits and low rank, and which kind of bits each one gets.

Q and the pair are found in turns: L1 L2 is the best matrix of its rank for A - Q, then Q holds what the pair has left
of A. The squared error falls for some rounds and rises in the end; the round before is kept. Where there are squared
gradients F of A, the pair is chosen under the means of F's rows and columns, and the error is weighed by F.
Kinds are chosen for all matrices together: the least sum of errors whose sizes keep to a budget, which is a knapsack
of which one item is taken from each class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.gguf.blocks import LowRankPair
from phasewise.model.lq_kinds import Coded, encode

ROUNDS = 100  # at most, as in the paper
MORE = 10  # columns of the randomised decomposition beyond the rank
PASSES = 2  # over the matrix, by which its small singular values fade
UNITS = 20_000  # into which a budget is cut; sizes are rounded up to whole ones


@dataclass(frozen=True)
class LayerSplit:
    """A matrix as Q, and a pair (None: of rank 0). `errors`: the squared error after each accepted round."""

    coded: Coded
    pair: LowRankPair | None
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.errors[-1]

    def values(self) -> Tensor:
        """What stands for the matrix, float32 [out, in]."""
        return self.coded.values if self.pair is None else self.coded.values + product(self.pair)


def product(pair: LowRankPair) -> Tensor:
    return pair.up.float() @ pair.down.float()


def squared_error(weight: Tensor, values: Tensor, fisher: Tensor | None) -> float:
    """The sum of squared differences, each times its number of `fisher`, [out, in]."""
    off = (weight - values).square_()
    return float((off if fisher is None else off.mul_(fisher)).sum(dtype=torch.float64))


def best_pair(rest: Tensor, rank: int, fisher: Tensor | None = None, seed: int = 0) -> LowRankPair:
    """The pair of this rank that is nearest to a matrix float32 [out, in], in bfloat16; all weighed by the roots of the
    means of each row and of each column of `fisher`."""
    rows = columns = None
    if fisher is not None:
        rows, columns = _roots(fisher.mean(1))[:, None], _roots(fisher.mean(0))
        rest = rest * rows * columns
    u, s, v = randomised_svd(rest, rank, seed)
    root = s.sqrt()
    up, down = u * root, v * root
    if rows is not None and columns is not None:
        up, down = up / rows, down / columns[:, None]
    return LowRankPair(down.T.bfloat16().contiguous(), up.bfloat16().contiguous())


def _roots(means: Tensor) -> Tensor:
    """Square roots, with those of rows that have no gradient at all held above 0."""
    return (means + 1e-6 * means.mean() + 1e-38).sqrt()


def randomised_svd(matrix: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values s [rank] of a matrix [out, in] with their vectors u [out, rank] and v [in, rank]
    (arXiv 0909.4061)."""
    width = min(rank + MORE, *matrix.shape)
    draw = torch.Generator().manual_seed(seed)
    span = matrix @ torch.randn(matrix.shape[1], width, generator=draw)
    for _ in range(PASSES):
        span = matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(span).Q).Q
    basis = torch.linalg.qr(span).Q  # [out, width]
    u, s, v = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return (basis @ u)[:, :rank], s[:rank], v[:rank].T


def split(
    weight: Tensor, kind: str, rank: int, fisher: Tensor | None = None, *, rounds: int = ROUNDS, seed: int = 0,
) -> LayerSplit:  # fmt: skip
    """A matrix float32 [out, in] as Q of a kind, and a pair. The error of rounds that are kept never rises.

    Raises UserError for a rank that the matrix does not have, and for numbers that are not finite.
    """
    if rank > min(weight.shape):
        raise UserError(f"rank={rank} is above that of a matrix of {list(weight.shape)}: choose at most "
                        f"{min(weight.shape)}")  # fmt: skip
    if not bool(torch.isfinite(weight).all()) or (fisher is not None and not bool(torch.isfinite(fisher).all())):
        raise UserError("a matrix, or its gradients, have numbers that are not finite, which no level stands for")
    if rank == 0:
        coded = encode(weight, kind)
        return LayerSplit(coded, None, (squared_error(weight, coded.values, fisher),))
    kept: LayerSplit | None = None
    values = torch.zeros_like(weight)
    for _ in range(rounds):
        pair = best_pair(weight - values, rank, fisher, seed)
        beside = product(pair)
        coded = encode(weight - beside, kind)
        error = squared_error(weight, coded.values + beside, fisher)
        if kept is not None and error >= kept.error:
            break
        kept = LayerSplit(coded, pair, (*(() if kept is None else kept.errors), error))
        values = coded.values
    assert kept is not None
    return kept


# ---- what the method is compared with
def from_zero(weight: Tensor, kind: str, rank: int, fisher: Tensor | None = None, seed: int = 0) -> LayerSplit:
    """Q nearest to the matrix alone, and a pair that adds nothing until it has learned (QLoRA, arXiv 2305.14314)."""
    alone = split(weight, kind, 0, fisher)
    pair = LowRankPair(_drawn(rank, weight.shape[1], seed).bfloat16(), torch.zeros(len(weight), rank).bfloat16())
    return LayerSplit(alone.coded, pair, alone.errors)


def by_chance(weight: Tensor, kind: str, rank: int, fisher: Tensor | None = None, seed: int = 0) -> LayerSplit:
    """A pair that holds the matrix in directions drawn by chance, and Q nearest to the rest."""
    down = torch.linalg.qr(_drawn(rank, weight.shape[1], seed).T).Q.T
    pair = LowRankPair(down.bfloat16().contiguous(), (weight @ down.T).bfloat16())
    coded = encode(weight - product(pair), kind)
    return LayerSplit(coded, pair, (squared_error(weight, coded.values + product(pair), fisher),))


def _drawn(rank: int, inputs: int, seed: int) -> Tensor:
    found: Tensor = torch.randn(rank, inputs, generator=torch.Generator().manual_seed(seed)) * inputs**-0.5
    return found


# ---- which kind for which matrix
def pair_bits(rank: int, outputs: int, inputs: int) -> int:
    """Bits of a pair in bfloat16."""
    return 16 * rank * (outputs + inputs)


@dataclass(frozen=True)
class KindChoice:
    """A kind for every matrix, in order; the sum of their errors, and of their sizes in bits."""

    kinds: tuple[str, ...]
    error: float
    size: int


def allocate(
    errors: Sequence[Mapping[str, float]], sizes: Sequence[Mapping[str, int]], budget: float, units: int = UNITS
) -> KindChoice:
    """One kind per matrix with the least sum of errors whose sizes, in bits, are within the budget together.

    By dynamic programming over what is left of the budget, in so many units: sizes are rounded up to whole ones, so a
    choice never goes beyond the budget, and misses at most a unit per matrix of it. Raises UserError where not even the
    smallest kinds fit.
    """
    least = sum(min(each.values()) for each in sizes)
    if least > budget:
        raise UserError(f"the budget of {budget:,.0f} bits cannot be met: the smallest kinds take {least:,} bits")
    common = math.gcd(*(bits for each in sizes for bits in each.values()))
    unit = max(common, -(-int(budget) // units))
    if unit % common:
        unit += common - unit % common
    room = int(budget) // unit
    needed = sum(-(-min(each.values()) // unit) for each in sizes)
    if needed > room:  # the budget is met to within the rounding: by the smallest kinds alone
        return _chosen(errors, sizes, [min(each, key=each.__getitem__) for each in sizes])
    best = np.zeros(room + 1)  # the least error by how many units there are for the matrices so far
    picks = []
    for cost, size in zip(errors, sizes):
        kinds = list(cost)
        each = np.full((len(kinds), room + 1), np.inf)
        for row, kind in enumerate(kinds):
            take = -(-size[kind] // unit)
            if take <= room:
                each[row, take:] = best[: room + 1 - take] + cost[kind]
        picked = each.argmin(0)
        picks.append((kinds, picked))
        best = each[picked, np.arange(room + 1)]
    left, found = room, list[str]()
    for (kinds, picked), size in zip(reversed(picks), reversed(sizes)):
        kind = kinds[picked[left]]
        found.append(kind)
        left -= -(-size[kind] // unit)
    return _chosen(errors, sizes, found[::-1])


def _chosen(
    errors: Sequence[Mapping[str, float]], sizes: Sequence[Mapping[str, int]], kinds: Sequence[str]
) -> KindChoice:
    return KindChoice(tuple(kinds), sum(cost[kind] for cost, kind in zip(errors, kinds)),
                  sum(size[kind] for size, kind in zip(sizes, kinds)))  # fmt: skip


def uniform(
    errors: Sequence[Mapping[str, float]], sizes: Sequence[Mapping[str, int]], budget: float
) -> KindChoice | None:
    """The best choice of one kind for all matrices within the budget; None: there is none."""
    shared = set(errors[0]).intersection(*errors)
    every = [_chosen(errors, sizes, [kind] * len(errors)) for kind in sorted(shared)]
    return min((each for each in every if each.size <= budget), key=lambda each: each.error, default=None)
