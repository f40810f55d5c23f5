"""KV heads that hold unequally many rows, by layer or within one, as native steps take them: as if all held as many as
the longest, their rows ending at the same slot, and the first ones were not there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from phasewise.kv.buffer import entry_bytes, scaled
from phasewise.kv.layer_kv import LayerKV, Slab


class Unequal:
    """`address`: of Head (kernels.h) [layers, heads]. `missing`: bytes that reading the longest head's rows of all
    heads would take, and that reading those which there are does not.

    Rows of one step make all heads longer by as many, so this holds until rows are given up or buffers move.
    """

    __slots__ = ("_words", "address", "missing")

    def __init__(self, layers: Sequence[LayerKV], longest: int) -> None:
        self._words, self.missing = array("q"), 0
        for layer in layers:
            each = entry_bytes(layer.codec, layer.shape)
            lies: dict[int, tuple[int, ...]] = {}
            for slab in layer.slabs:
                begin = longest - slab.n
                self.missing += begin * slab.buffer.heads * each
                heads = range(layer.shape.heads) if slab.heads is None else slab.heads.tolist()
                for place, head in enumerate(heads):
                    lies[head] = (*_addresses(layer, slab, place, begin), begin)
            for head in range(layer.shape.heads):
                self._words.extend(lies[head])
        self.address = self._words.buffer_info()[0]


def _addresses(layer: LayerKV, slab: Slab, place: int, begin: int) -> tuple[int, int, int, int]:
    """Where slot 0 of a slab's head would be, its first row being slot `begin`: of k, v and their scales (or 0, 0)."""
    first, dim = place * slab.buffer.cap - begin, layer.shape.dim
    if scaled(layer.codec):
        k, k_scale, v, v_scale = slab.buffer.addresses
        return k + first * dim, v + first * dim, k_scale + 2 * first, v_scale + 2 * first
    k, v = slab.buffer.addresses
    size = dim * layer.shape.dtype.itemsize
    return k + first * size, v + first * size, 0, 0


def unequal(layers: Sequence[LayerKV]) -> bool | None:
    """Whether some heads hold other numbers of rows than others do; None: a layer holds nothing, rows of a step wait to
    be committed, or the first of a layer's rows are sealed alone."""
    if any(not layer.slabs or layer.fresh or any(slab.base for slab in layer.slabs) for layer in layers):
        return None
    return len({slab.n for layer in layers for slab in layer.slabs}) > 1
