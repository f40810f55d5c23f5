"""What stands for the keys of whole pages of slots, beside a layer's rows: a page is chosen by it before it is read."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from phasewise.kv.buffer import entry_bytes
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.part import Part

By = Literal["bounds", "means"]
"""bounds: the smallest and the largest number of a page's keys in each dimension; means: the mean of its keys."""

VECTORS: dict[By, int] = {"bounds": 2, "means": 1}


class PageKeys:
    """Of the pages of `size` slots below `upto`, all committed: `vectors` [1 | 2, h, room, D] in the keys' type.

    There is room for more; who holds it alone writes there.
    """

    def __init__(self, by: By, size: int, vectors: Tensor, upto: int = 0) -> None:
        self.by, self.size, self.vectors, self.upto = by, size, vectors, upto

    @classmethod
    def none(cls, by: By, size: int, keys: Tensor) -> PageKeys:
        """Of no page, with no room, for keys like these [h, 0, D]."""
        return cls(by, size, keys.new_empty((VECTORS[by], *keys.shape)))

    @staticmethod
    def key(by: By, size: int, slab: int = 0) -> Hashable:
        """By which a layer keeps them (`Beside`)."""
        return "pages", by, size, slab

    @property
    def bytes(self) -> int:
        return self.vectors.nbytes

    @property
    def room(self) -> int:
        return self.vectors.shape[2]

    @property
    def width(self) -> int:
        """Bytes of one page."""
        planes, heads, _, dim = self.vectors.shape
        return planes * heads * dim * self.vectors.itemsize

    @property
    def known(self) -> Tensor:
        """[1 | 2, h, upto, D]."""
        return self.vectors[:, :, : self.upto]

    def fork(self) -> PageKeys:
        return PageKeys(self.by, self.size, self.vectors.clone(), self.upto)

    def roomy(self, pages: int) -> PageKeys:
        """The same with room for so many pages; itself where it has that."""
        if pages <= self.room:
            return self
        planes, heads, _, dim = self.vectors.shape
        vectors = self.vectors.new_empty((planes, heads, pages, dim))
        vectors[:, :, : self.upto] = self.known
        return PageKeys(self.by, self.size, vectors, self.upto)

    def fill(self, part: Part, upto: int) -> None:
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


class PageTable:
    """Where a native step finds the page keys of a request's layers, and what reading them costs.

    `address`: of int64 [layers, 3], as Choice takes it. `row_bytes` and `key_bytes` of a row, `page_bytes` of a page:
    of all layers that have page keys.
    """

    __slots__ = ("_kept", "_words", "address", "count", "key_bytes", "page_bytes", "row_bytes")

    def __init__(self, layers: Sequence[LayerKV], kept: Sequence[PageKeys | None]) -> None:
        self._kept = [keys for keys in kept if keys is not None]
        self._words = array("q")
        self.row_bytes = self.key_bytes = self.page_bytes = 0
        for layer, keys in zip(layers, kept):
            if keys is None:
                self._words.extend((0, 0, 0))
                continue
            low, head = keys.vectors.data_ptr(), keys.vectors.stride(1)
            high = low + keys.vectors.stride(0) * keys.vectors.itemsize if keys.by == "bounds" else 0
            self._words.extend((low, high, head))
            entry = entry_bytes(layer.codec, layer.shape)
            self.row_bytes += entry * layer.shape.heads
            self.key_bytes += entry // 2 * layer.shape.heads
            self.page_bytes += keys.width
        self.address = self._words.buffer_info()[0]
        self.count = min((keys.upto for keys in self._kept), default=0)  # pages that all of them know

    @classmethod
    def of(cls, layers: Sequence[LayerKV], skipped: Sequence[bool], by: By, size: int) -> PageTable | None:
        """Of plain layers but those `skipped`, with room for all pages that their rows have room for. None where the
        budget has no room for that."""
        kept: list[PageKeys | None] = []
        key = PageKeys.key(by, size)
        for layer, without in zip(layers, skipped):
            if without:
                kept.append(None)
                continue
            found, shape = layer.beside.get(key), layer.shape
            if not isinstance(found, PageKeys):
                found = PageKeys.none(by, size, torch.empty((shape.heads, 0, shape.dim), dtype=shape.dtype))
            roomy = found.roomy(layer.slabs[0].buffer.cap // size)
            if layer.beside.get(key) is not roomy:
                layer.beside.keep(key, roomy)
            if layer.beside.get(key) is not roomy:
                return None
            kept.append(roomy)
        return cls(layers, kept)

    def sealed(self, count: int) -> None:
        """All layers know so many pages now."""
        for keys in self._kept:
            keys.upto = max(keys.upto, count)
        self.count = count

    def known(self, wanted: int) -> int:
        """How many pages all layers know, of those wanted; a step in halves may have added some."""
        if self.count < wanted:
            self.count = min(keys.upto for keys in self._kept)
        return min(self.count, wanted)
