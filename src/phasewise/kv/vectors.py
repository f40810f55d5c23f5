"""Vectors that summarise the keys of a layer, row by row or for runs of rows, beside its rows; and the addresses of
those of all layers, for native steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phasewise.kv.format import entry_bytes
from phasewise.kv.layer_kv import LayerKV
from phasewise.ops.native.abi import LayerChoiceStruct, Structures
from phasewise.ops.native.choice import ALL, Ways

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView


class Standing(Protocol):
    """Vectors for the first `upto` keys (or runs of keys), all committed: `vectors` [planes, h, room, width]. `sums` of
    the values of these rows, float32 [h, D], which are read once, too; or None."""

    upto: int

    @property
    def sums(self) -> Tensor | None: ...

    @property
    def vectors(self) -> Tensor: ...

    @property
    def bytes(self) -> int: ...

    def fork(self) -> Standing: ...

    def roomy(self, room: int) -> Standing: ...


class Kept:
    """One vector for each of the first `upto` committed rows of a layer (or runs of them): `rows` [h, room, width].

    There is room for more; who holds it alone writes there.
    """

    def __init__(self, rows: Tensor, upto: int = 0) -> None:
        self.rows, self.upto, self.sums = rows, upto, None

    @property
    def vectors(self) -> Tensor:
        return self.rows[None]

    @property
    def bytes(self) -> int:
        return self.rows.nbytes

    @property
    def known(self) -> Tensor:
        """[h, upto, width]."""
        return self.rows[:, : self.upto]

    def fork(self) -> Kept:
        return Kept(self.rows.clone(), self.upto)

    def roomy(self, room: int) -> Kept:
        """The same with room for so many; itself where it has that."""
        if room <= self.rows.shape[1]:
            return self
        rows = self.rows.new_empty((self.rows.shape[0], room, self.rows.shape[2]))
        rows[:, : self.upto] = self.known
        return Kept(rows, self.upto)

    def add(self, new: Tensor) -> None:
        """The next ones, [h, m, width], for which there is room."""
        self.rows[:, self.upto : self.upto + new.shape[1]] = new
        self.upto += new.shape[1]


class VectorTable:
    """The addresses of the vectors beside a request's layers, for native steps, and the bytes that reading them takes.

    `structs`: LayerChoice (kernels.h) [layers], with a scale of products (0: the layer's own). `row_bytes` of a row,
    `made_bytes` of what is read of one to make a vector, `each` of a vector, `sums` of all: in all layers that have
    some. `slot`: bytes of a row of one head. `count`: of how many keys, or runs, all of them know the vector.
    """

    __slots__ = ("count", "each", "kept", "made_bytes", "row_bytes", "slot", "structs", "sums")

    def __init__(self, layers: Sequence[LayerKV], kept: Sequence[Standing | None], scale: float) -> None:
        self.kept, structs = kept, list[LayerChoiceStruct]()
        self.row_bytes = self.made_bytes = self.each = self.sums = self.slot = 0
        for layer, own in zip(layers, kept):
            if own is None:
                structs.append(LayerChoiceStruct(way=ALL))
                continue
            structs.append(Ways.layer(own.vectors, own.sums, scale))
            self.slot = entry_bytes(layer.format, layer.shape)
            self.row_bytes += self.slot * layer.shape.heads
            self.made_bytes += (self.slot // 2 if own.sums is None else self.slot) * layer.shape.heads
            self.each += own.vectors[:, :, :1].nbytes
            self.sums += 0 if own.sums is None else own.sums.nbytes
        self.structs = Structures(LayerChoiceStruct, structs)
        self.count = min((own.upto for own in kept if own is not None), default=0)

    @classmethod
    def of(
        cls, flat: ContiguousView, choice: Hashable, key: Hashable, none: Callable[[int, Tensor], Standing | None],
        room: Callable[[int], int], scale: float = 0.0,
    ) -> VectorTable | None:  # fmt: skip
        """A choice's, of plain layers, with room for all vectors of as many rows as their buffers hold, `room(rows)`.
        `none`: of a layer, by its number among these, no vectors for keys like these [h, 0, D]; None: it has none. None
        where the budget has no room for them, or layers know unequally many, and sums of values."""
        table = flat.tables.get(choice)
        if table is None or not table.holds(flat.layers, key):
            kept: list[Standing | None] = []
            for i, layer in enumerate(flat.layers):
                shape = layer.shape
                found = none(i, torch.empty((shape.heads, 0, shape.dim), dtype=shape.dtype))
                if found is not None:
                    known = layer.beside.get(key)
                    found = known if isinstance(known, type(found)) else found
                    roomy = found.roomy(room(layer.slabs[0].buffer.cap))
                    if known is not roomy:
                        layer.beside.keep(key, roomy)
                    if layer.beside.get(key) is not roomy:
                        return None
                    found = roomy
                kept.append(found)
            table = flat.tables[choice] = cls(flat.layers, kept, scale)
        uneven = table.sums and len({own.upto for own in table.kept if own is not None}) > 1
        return None if uneven else table  # values would be added twice

    def holds(self, layers: Sequence[LayerKV], key: Hashable) -> bool:
        """True if these are still the ones that lie there."""
        return all(own is None or layer.beside.get(key) is own for layer, own in zip(layers, self.kept))

    def known(self, wanted: int) -> int:
        """Returns the number of vectors that all layers have, of those wanted. A step in halves may have added some."""
        if self.count < wanted:
            self.count = min(own.upto for own in self.kept if own is not None)
        return min(self.count, wanted)

    def made(self, count: int) -> None:
        """All layers know so many now."""
        for own in self.kept:
            if own is not None:
                own.upto = max(own.upto, count)
        self.count = count
