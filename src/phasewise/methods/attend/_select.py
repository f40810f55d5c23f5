"""What scorers of cached keys share: vectors that stand for keys, kept beside the rows, and votes by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from phasewise.kv.buffer import rounded
from phasewise.kv.vectors import Kept
from phasewise.step.plan import KernelScores, Rivals, Scores
from phasewise.step.read import Read
from phasewise.step.reference import NEVER


def grouped(q: Tensor, heads: int) -> Tensor:
    """q [R, h * G, D] -> float32 [h, G, R, D]."""
    return q.float().view(q.shape[0], heads, -1, q.shape[2]).permute(1, 2, 0, 3)


def tally(logits: Tensor, among: Tensor | None) -> Tensor:
    """Soft votes: how much of each head's softmax over the candidates every row gets, summed over a group's heads.

    logits [g, H, R, N], among bool [1 | g, R, N] -> logarithms [g, R, N], in which nothing is too small to be ranked.
    """
    if among is not None:
        logits = logits.masked_fill(~among[:, None], NEVER)
    return logits.log_softmax(-1).logsumexp(1)


def kept(
    read: Read, name: str, width: int, make: Callable[[int, int], Tensor], dtype: torch.dtype | None = None
) -> Kept:
    """What is kept by this name for all committed rows, of the keys' dtype unless another is given; `make(start, stop)`
    [h, stop - start, width] is asked for what is missing, which costs reading their keys."""
    part = read.part
    key = name, part.slab
    found = part.derived.get(key)
    if not isinstance(found, Kept):
        found = Kept(part.keys(0, 0).new_empty((part.size[0], 0, width), dtype=dtype))
    if found.upto < part.n:
        read.count_keys((part.n - found.upto) * part.size[0])
        found = found.roomy(rounded(part.size[1]))
        found.add(make(found.upto, part.n))
        part.derived.keep(key, found)
    return found


class RowScorer(ABC):
    """Scores every row by a vector that stands for its key. Vectors are kept beside the rows as `name`."""

    name: str
    kernel: KernelScores | None = None
    dtype: torch.dtype | None = None  # of what is kept; None: that of the keys

    @abstractmethod
    def width(self, dim: int) -> int:
        """Numbers of a vector for keys of so many."""

    @abstractmethod
    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        """The vectors of the keys of these slots as they are kept, [h, stop - start, width]; no other key is read."""

    def opened(self, stands: Tensor) -> Tensor:
        """Vectors as they are kept [h, N, width] -> as `votes` takes them."""
        return stands

    @abstractmethod
    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        """How every row ranks the rows of the vectors [h, N, width], `among` those [1 | h, R, N] (None: all): the more
        the better, [1 | h, R, N]; what it says of others does not matter."""

    def index(self, read: Read) -> Kept:
        def make(start: int, stop: int) -> Tensor:
            return self.stand(read, start, stop)

        return kept(read, self.name, self.width(read.q.shape[2]), make, self.dtype)

    def scores(self, read: Read, index: Kept, rows: Rivals) -> Scores:
        part = read.part
        if rows.single:  # whose own key has no vote
            read.count_bytes(rows.single * index.rows[:, :1].nbytes)
        else:
            read.count_bytes(index.known.nbytes)
            read.count_keys(part.fresh * part.size[0])
        stands = torch.cat((index.known, self.stand(read, part.n, part.size[1])), 1)
        return Scores(self.votes(read, self.opened(stands), rows.rivals))
