"""Vectors that summarise the keys of whole pages of slots. They lie beside a layer's rows, and a page is chosen by them
before it is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch
from torch import Tensor

from phasewise.kv.part import KVPart

By = Literal["bounds", "means"]
"""bounds: the smallest and the largest number of a page's keys in each dimension; means: the mean of its keys."""

VECTORS: dict[By, int] = {"bounds": 2, "means": 1}


class PageKeys:
    """The summaries of the first `upto` pages of `size` slots, all committed: `vectors` [1 | 2, h, room, D] in the
    keys' type.

    There is room for more; who holds it alone writes there.
    """

    def __init__(self, by: By, size: int, vectors: Tensor, upto: int = 0) -> None:
        self.by, self.size, self.vectors, self.upto, self.sums = by, size, vectors, upto, None

    @classmethod
    def none(cls, by: By, size: int, keys: Tensor) -> PageKeys:
        """Returns the summaries of no page, with no room, for keys like these [h, 0, D]."""
        return cls(by, size, keys.new_empty((VECTORS[by], *keys.shape)))

    @staticmethod
    def key(by: By, size: int, slab: int = 0) -> Hashable:
        """Returns the key under which a layer keeps them (`Beside`)."""
        return "pages", by, size, slab

    @property
    def bytes(self) -> int:
        return self.vectors.nbytes

    @property
    def known(self) -> Tensor:
        """[1 | 2, h, upto, D]."""
        return self.vectors[:, :, : self.upto]

    def fork(self) -> PageKeys:
        return PageKeys(self.by, self.size, self.vectors.clone(), self.upto)

    def roomy(self, pages: int) -> PageKeys:
        """The same with room for so many pages; itself where it has that."""
        if pages <= self.vectors.shape[2]:
            return self
        planes, heads, _, dim = self.vectors.shape
        vectors = self.vectors.new_empty((planes, heads, pages, dim))
        vectors[:, :, : self.upto] = self.known
        return PageKeys(self.by, self.size, vectors, self.upto)

    def fill(self, part: KVPart, upto: int) -> None:
        """Add the pages below `upto`, for which there is room, from rows that lie in slots of their positions. The
        plain twin of what a whole step does."""
        keys = part.keys(self.upto * self.size, upto * self.size)
        keys = keys.view(keys.shape[0], -1, self.size, keys.shape[2])  # [h, m, size, D]
        new = self.vectors[:, :, self.upto : upto]
        if self.by == "bounds":
            new[0], new[1] = keys.amin(2), keys.amax(2)
        else:
            total = keys[:, :, 0].to(torch.promote_types(keys.dtype, torch.float32))
            for j in range(1, self.size):  # in order, as the kernel adds
                total = total + keys[:, :, j]
            new[0] = total / self.size
        self.upto = upto
