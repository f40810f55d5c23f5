"""Rows that lie alike in all layers: what one native call for all of them needs to find them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from phasewise.kv.blocks import LayerSaliency, ahead, alike, seal_full, seals, sides_struct
from phasewise.kv.format import SIDES, BlockCut, Raw, entry_bytes
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.unequal import Narrow, Unequal, by_head, lined, unequal
from phasewise.kv.vectors import VectorTable
from phasewise.ops.native.abi import PlacesStruct, PlanesStruct, SidesStruct, Structures
from phasewise.ops.native.sealing import Seals


class ContiguousView:
    """The rows of the layers asked for, on the CPU, as the model made them or rounded to int8 (`RowFormat.scaled`); or
    the first of them in sealed blocks that native kernels read. Without such blocks, layers and heads may hold
    unequally many: then `unequal` says where they lie, and `address` nothing.

    The first rows may be held by reference, and lie in blocks elsewhere: `shared`, of Planes (kernels.h) [layers,
    shared_slots / BLOCK].

    `n`: committed rows, of the longest head. `gaps`: they need not be those of positions 0 .. n-1, as some were given
    up; which they are may differ by layer and head. `address`: of Planes (kernels.h) [layers].
    `row_bytes`: what a row takes in all layers. `tables`: of vectors beside them, by whoever asked for them; `biases`:
    of what is added to scores of slot 0, likewise; `front`: of what a window with a stride sees for good. `lowered`:
    the kept form of a single row (step/lower.py), which holds as long as this object does.
    """

    __slots__ = ("_fitted", "_line", "_narrow", "_places", "_planes", "_positions", "_sealed", "_seals", "_sides",
                 "_slabs", "address", "biases", "front", "gaps", "layers", "lowered", "n", "row_bytes", "shared",
                 "shared_slots", "tables", "unequal")  # fmt: skip

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self.layers, self.tables, self.biases = layers, dict[Hashable, VectorTable](), dict[Hashable, Tensor]()
        self.front: tuple[object, int, int] | None = None
        self.lowered: Any = None
        self._slabs = [slab for layer in layers for slab in layer.slabs]
        self.n = max(layer.n for layer in layers)
        self.unequal = Unequal(layers, self.n) if unequal(layers) else None
        self.gaps = any(slab.positions is not None for slab in self._slabs)
        self._line: tuple[Narrow, int] | None = None
        self._narrow: tuple[Narrow, Unequal] | None = None
        self._places: Structures[PlacesStruct] | None = None
        self._positions: list[list[memoryview]] | None = None  # of slabs, by head: these write one fastest
        dim = layers[0].shape.dim
        self.row_bytes = sum(entry_bytes(layer.format, layer.shape) * layer.shape.heads for layer in layers)
        rounded = layers[0].format.scaled
        planes = list[PlanesStruct]()
        for slab in self._slabs if self.unequal is None else ():
            cap, addresses = slab.buffer.cap, slab.buffer.addresses
            lies = PlanesStruct(head=cap * dim)
            if slab.base:  # slot 0 would be so far before
                rows = (slab.base * plane.stride(1) * plane.itemsize for plane in slab.buffer.planes)
                addresses = [address - gone for address, gone in zip(addresses, rows)]
            if rounded:
                lies.k, lies.k_scale, lies.v, lies.v_scale = addresses
                lies.scale_head = cap
            else:
                lies.k, lies.v = addresses
            planes.append(lies)
        self._planes = Structures(PlanesStruct, planes)
        self.address = self._planes.address
        self.shared_slots = layers[0].shared.n if layers[0].shared is not None else 0
        every = (layer.shared for layer in layers if self.shared_slots)
        self.shared = Structures(PlanesStruct, [block for rows in every if rows is not None for block in rows.structs])
        self._sealed = [(layer.blocks, layer.slabs[0].buffer.planes, layer.slabs[0].base) for layer in layers
                        if layer.blocks is not None and layer.blocks.active]  # fmt: skip
        self._fitted = any(sealed.fit for sealed, _, _ in self._sealed)  # then blocks of layers differ in size
        self._seals: Sequence[Seals | None] = ()  # made when first asked for
        self._sides = [sides_struct(sealed) for sealed, _, _ in self._sealed]

    @classmethod
    def of(cls, layers: Sequence[LayerKV]) -> ContiguousView | None:
        """None where rows do not lie like that."""
        first = layers[0]
        if not (isinstance(first.format, Raw) or first.format.scaled) or first.shape.device != "cpu":
            return None
        sealed = [layer.blocks for layer in layers if layer.blocks is not None and layer.blocks.active]
        if sealed and (len(sealed) < len(layers) or not alike(sealed)):
            return None
        if not sealed and unequal(layers):
            return cls(layers)
        n = first.n
        for layer in layers:
            slab = layer.slabs[0] if len(layer.slabs) == 1 else None
            if slab is None or slab.base + slab.n != n or slab.heads is not None or layer.fresh:
                return None
        return cls(layers)

    @property
    def cuts(self) -> tuple[BlockCut, BlockCut] | None:
        """The block sizes of keys and values; None if no rows are sealed."""
        return self._sealed[0][0].format.cuts if self._sealed else None

    def sides(self, upto: Sequence[int]) -> Structures[SidesStruct]:
        """Returns the addresses of the first `upto` [keys, values] rows as they lie packed in each layer, as StackSpan
        takes them: sealed now, or `ahead`."""
        found = Structures(SidesStruct, self._sides)
        for layer in found:
            layer.keys.slots, layer.values.slots = upto
        return found

    def ahead(self, upto: Sequence[int]) -> None:
        """Seal so many committed rows, as far as that has not been done, without counting them."""
        ahead(self._sealed, upto)

    def seal(self, saliency: LayerSaliency | None = None) -> int:
        """Seal what committed rows fill, those by saliency as soon as it is known. Returns bytes moved."""
        if not self._seals:
            self._seals = [seals(self._sealed, side) for side in SIDES]
        return seal_full(self._sealed, self.n, self._seals, saliency)

    def reads(self, upto: Sequence[int], n: int) -> int:
        """Returns the bytes that reading `n` rows takes in all layers with the first `upto` of them sealed."""
        if self._fitted:
            return sum(sealed.read_bytes(upto, n) for sealed, _, _ in self._sealed)
        return self._sealed[0][0].read_bytes(upto, n) * len(self._sealed)

    def lined(self, narrow: Narrow, position: int) -> bool:
        """True if the committed rows of narrow heads are their sinks, the first positions, and then consecutive ones
        right before `position`."""
        if not self.gaps and self.unequal is None:
            return position == self.n
        line = narrow, position - self.n
        if self._line == line:  # rows that came after it was asked continue them: others change the difference
            return True
        if not lined(self.layers, narrow, position):
            return False
        self._line = line
        return True

    def narrowed(self, narrow: Narrow) -> Unequal:
        """Returns the addresses of heads of which some see less than all, as `unequal` has them."""
        if self._narrow is None or self._narrow[0] != narrow:
            self._narrow = narrow, Unequal(self.layers, self.n, narrow)
        return self._narrow[1]

    @property
    def places(self) -> int:
        """The address of where the positions of committed rows are, by layer and head (Places in kernels.h)."""
        if self._places is None:
            places = list[PlacesStruct]()
            for slab, place in (each for layer in self.layers for each in by_head(layer)):
                at, begin = slab.positions, self.n - slab.base - slab.n
                row = 0 if at is None else at[min(place, slab.said - 1)].data_ptr() - begin * at.itemsize
                places.append(PlacesStruct(at=row, first=begin))
            self._places = Structures(PlacesStruct, places)
        return self._places.address

    def advance(self, positions: range) -> None:
        """Rows of these positions that were written behind them are committed, in all layers."""
        self.n += len(positions)
        if self._positions is None:
            said = (() if slab.positions is None else slab.positions.numpy() for slab in self._slabs)
            self._positions = [[memoryview(row) for row in rows] for rows in said]
        for slab, known in zip(self._slabs, self._positions):
            for row in known:
                for slot, position in enumerate(positions, slab.n):
                    row[slot] = position
            slab.n += len(positions)
