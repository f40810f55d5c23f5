"""From logits to tokens: distributions, and randomness that depends on the request alone.

One function turns logits into the distribution a token is drawn from (DESIGN law 6): the engine's `sample` method,
used by sampler, verifier and drafter alike. Randomness is counter-based, keyed by (request seed, absolute position,
purpose) (law 7), so a request draws the same tokens in any batch, process or placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.request import Request


class Purpose(IntEnum):
    """What a random number is for; different purposes at one position are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    METHOD = 4  # free for a method's own use


def uniform(seed: int, position: int, purpose: int, index: int = 0) -> float:
    """A number in [0, 1) from Philox counters; the same arguments always give the same number."""
    counter = np.array([position, purpose, index, 0], dtype=np.uint64)
    raw = int(np.random.Philox(key=seed & (2**128 - 1), counter=counter).random_raw())
    return float((raw >> 11) * 2.0**-53)


@dataclass(frozen=True, slots=True)
class Context:
    """The prefix a row of logits belongs to: the request's tokens, then `path` (a draft path not yet accepted)."""

    request: Request
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn."""
        return self.request.known + len(self.path)


class Dist:
    """The distributions tokens are drawn from, one per row. Greedy rows are points and cost no softmax."""

    __slots__ = ("_row", "probs", "top", "vocab")

    def __init__(self, top: list[int], vocab: int, sampled: Sequence[int] = (), probs: Tensor | None = None) -> None:
        self.top = top  # most likely token per row
        self.vocab = vocab
        self._row = {row: i for i, row in enumerate(sampled)}  # rows that are not greedy
        self.probs = probs  # float32 [len(sampled), V]

    def __len__(self) -> int:
        return len(self.top)

    def greedy(self, row: int) -> bool:
        return row not in self._row

    def row(self, row: int) -> Tensor:
        """Probabilities float32 [V]."""
        if row in self._row:
            assert self.probs is not None
            return self.probs[self._row[row]]
        point = torch.zeros(self.vocab)
        point[self.top[row]] = 1.0
        return point

    def prob(self, row: int, token: int) -> float:
        if row in self._row:
            assert self.probs is not None
            return float(self.probs[self._row[row], token])
        return float(self.top[row] == token)

    def draw(self, row: int, u: float) -> int:
        """The token whose stretch of the cumulated probabilities holds `u`."""
        return pick(self.row(row), u) if row in self._row else self.top[row]

    def draw_all(self, us: Sequence[float]) -> list[int]:
        """One token per row; `us` [rows]."""
        tokens = list(self.top)
        if self._row:
            assert self.probs is not None
            sampled = sorted(self._row, key=self._row.__getitem__)
            cumulated = self.probs.double().cumsum(-1)
            at = torch.tensor([us[row] for row in sampled], dtype=torch.float64)[:, None]
            found = torch.searchsorted(cumulated, at.to(cumulated.device) * cumulated[:, -1:], right=True)
            for row, token in zip(sampled, found[:, 0].tolist()):
                tokens[row] = min(token, self.vocab - 1)
        return tokens


def pick(probs: Tensor, u: float) -> int:
    """Inverse-CDF draw from probabilities [V] (need not be normalised)."""
    cumulated = probs.double().cumsum(-1)
    found = int(torch.searchsorted(cumulated, u * float(cumulated[-1]), right=True))
    return min(found, probs.shape[-1] - 1)


class Sample(Protocol):
    """sample: logits to the distribution a token is drawn from."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        """logits float32 [n, V] (may be overwritten), one context per row."""
        ...


def draw(sample: Sample, logits: Tensor, contexts: Sequence[Context]) -> list[int]:
    """One token per row of logits [n, V], by each request's own randomness."""
    dist = sample(logits, contexts)
    us = [
        0.0 if dist.greedy(i) else uniform(c.request.params.seed, c.position, Purpose.SAMPLE)
        for i, c in enumerate(contexts)
    ]
    return dist.draw_all(us)
