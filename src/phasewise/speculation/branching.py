"""Several guesses for one next token: the draws that drafters share, each with the distribution it was drawn from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phasewise.verbs.draft import Drawn
from phasewise.verbs.sample import Coupling, pick


def branch(
    q: Tensor, n: int, drawn: Drawn, us: Callable[[int], float], coupling: Coupling = "inverse"
) -> tuple[list[int], Tensor | None]:
    """At most `n` tokens from probabilities q [V], in draw order, and what they were drawn from, [tokens, V].

    `us(i)` is the uniform number of draw i, and `coupling` how it draws. Without replacement there are no more tokens
    than q has; `top_plus_one` is the n - 1 likeliest tokens, then one drawn from the others (arXiv 2502.18779), if they
    have any weight.
    """
    if drawn == "point":
        return _likeliest(q, n), None
    if drawn == "iid":
        return [pick(q, us(i), coupling) for i in range(n)], q.expand(n, -1)
    if drawn == "top_plus_one":
        return _top_plus_one(q, n, us, coupling)
    tokens, rows = [pick(q, us(0), coupling)], [q]
    while len(tokens) < n:
        rest = without(rows[-1], tokens[-1:])
        if rest is None:
            break
        tokens.append(pick(rest, us(len(tokens)), coupling))
        rows.append(rest)
    return tokens, torch.stack(rows)


def _top_plus_one(q: Tensor, n: int, us: Callable[[int], float], coupling: Coupling) -> tuple[list[int], Tensor]:
    top = _likeliest(q, n - 1)
    rows = q.new_zeros((len(top) + 1, q.shape[0]))  # zero rows: chosen, not drawn
    rest = without(q, top)
    if rest is None:
        return top, rows[:-1]
    rows[-1] = rest
    return [*top, pick(rest, us(0), coupling)], rows


def _likeliest(q: Tensor, n: int) -> list[int]:
    values, tokens = q.topk(min(n, q.shape[0]))
    return [token for token, value in zip(tokens.tolist(), values.tolist()) if value > 0]


def without(q: Tensor, tokens: list[int]) -> Tensor | None:
    """q with some tokens taken out, renormalised; None if nothing is left."""
    rest = q.clone()
    for token in tokens:
        rest[token] = 0.0
    total = float(rest.sum())
    return rest / total if total > 0 else None
