"""Pieces of a long prompt that are worth reading again: its beginning, the pieces nearest to its end, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SATURATION, LENGTH = 1.2, 0.75  # BM25's k1 and b

Pieces = list[list[int]]
Scorer = Callable[[Pieces, list[int]], NDArray[np.float64]]
"""(pieces, query) -> how near each piece is to the query."""


def shortened(prompt: Sequence[int], context: int, piece: int, query: int, scorer: Scorer) -> list[int]:
    """At most `context` tokens of the prompt, in its order: all of it, if it is no longer; else the first `piece`, the
    last `query`, and of the pieces between those that score best (of equal ones the earlier) as far as there is room.
    """
    if len(prompt) <= context:
        return list(prompt)
    end = len(prompt) - query
    starts = range(piece, end, piece)
    pieces = [list(prompt[start : min(start + piece, end)]) for start in starts]
    scores = scorer(pieces, list(prompt[end:]))
    best = np.argsort(-scores, kind="stable")[: (context - query) // piece - 1]
    kept = [pieces[at] for at in sorted(best.tolist())]
    return [*prompt[:piece], *(token for part in kept for token in part), *prompt[end:]]


def bm25(pieces: Pieces, query: list[int]) -> NDArray[np.float64]:
    """Okapi BM25, tokens being the terms: rare tokens of the query count most, and repeated ones less each time."""
    terms, asked = np.unique(np.asarray(query, dtype=np.int64), return_counts=True)
    lengths = np.array([len(piece) for piece in pieces])
    tokens = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    owner = np.repeat(np.arange(len(pieces)), lengths)
    at = np.minimum(np.searchsorted(terms, tokens), len(terms) - 1)
    hit = terms[at] == tokens
    counts = np.bincount(at[hit] * len(pieces) + owner[hit], minlength=len(terms) * len(pieces))
    counts = counts.reshape(len(terms), len(pieces))
    holders = (counts > 0).sum(1)
    rarity = np.log1p((len(pieces) - holders + 0.5) / (holders + 0.5))
    room = SATURATION * (1 - LENGTH + LENGTH * lengths / lengths.mean())
    scores: NDArray[np.float64] = (asked * rarity) @ (counts * (SATURATION + 1) / (counts + room))
    return scores


def nearest(embed: Callable[[Tensor], Tensor], pieces: Pieces, query: list[int]) -> NDArray[np.float64]:
    """Cosine between the mean embeddings of piece and query; `embed`: ids [n] -> rows [n, d]."""
    with torch.inference_mode():
        means = torch.stack([embed(torch.tensor(each)).double().mean(0) for each in (*pieces, query)])
        means /= means.norm(dim=1, keepdim=True).clamp_min(1e-30)
        scores: NDArray[np.float64] = (means[:-1] @ means[-1]).cpu().numpy()
    return scores
