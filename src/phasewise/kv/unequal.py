"""KV heads that hold unequally many rows, by layer or within one, as native steps take them: as if all held as many as
the longest, their rows ending at the same slot, and the first ones were not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phasewise.kv.format import entry_bytes
from phasewise.kv.layer_kv import LayerKV, Slab
from phasewise.ops.native.abi import HeadStruct, Structures
from phasewise.ops.native.spans import BLOCK


class Narrow(NamedTuple):
    """KV heads whose rows see the first `sinks` and the last `window` ones: those that `heads`, by layer, says yes to.
    None: all."""

    sinks: int
    window: int
    heads: tuple[tuple[bool, ...], ...] | None = None

    def among(self, layer: int, head: int) -> bool:
        return self.heads is None or self.heads[layer][head]


class Unequal:
    """`address`: of Head (kernels.h) [layers, heads]. `missing`: bytes that reading the longest head's rows of all
    heads would take, and that reading those which there are does not.

    Rows of one step make all heads longer by as many, so this holds until rows are given up or buffers move.
    """

    __slots__ = ("_ends", "_structs", "address", "missing")

    def __init__(self, layers: Sequence[LayerKV], longest: int, narrow: Narrow | None = None) -> None:
        structs, self.missing = list[HeadStruct](), 0
        self._ends = Counter[int]()  # of the sinks of narrow heads: the bytes of a row of theirs
        for i, layer in enumerate(layers):
            each = entry_bytes(layer.format, layer.shape)
            for head, (slab, place) in enumerate(by_head(layer)):
                begin, window, sinks = longest - slab.n, 0, 0
                self.missing += begin * each
                if narrow is not None and narrow.among(i, head):
                    window, sinks = narrow.window, narrow.sinks
                    self._ends[begin + sinks] += each
                struct = HeadStruct(begin=begin, window=window, sinks=sinks)
                struct.k, struct.v, struct.k_scale, struct.v_scale = _addresses(layer, slab, place, begin)
                structs.append(struct)
        self._structs = Structures(HeadStruct, structs)
        self.address = self._structs.address

    def unseen(self, start: int) -> int:
        """Bytes that narrow heads hold between their sinks and a window from slot `start` on, in whole blocks: these
        are passed over, and of others every row is read."""
        return sum(each * max(0, start // BLOCK - -(-end // BLOCK)) * BLOCK for end, each in self._ends.items())


def _heads(layer: LayerKV, slab: Slab) -> Sequence[int]:
    """Returns the heads of a slab, by number."""
    return range(layer.shape.heads) if slab.heads is None else slab.heads.tolist()


def by_head(layer: LayerKV) -> list[tuple[Slab, int]]:
    """The slab that each head's rows lie in, and its place there."""
    found = {head: (slab, place) for slab in layer.slabs for place, head in enumerate(_heads(layer, slab))}
    return [found[head] for head in range(layer.shape.heads)]


def _addresses(layer: LayerKV, slab: Slab, place: int, begin: int) -> tuple[int, int, int, int]:
    """Returns the addresses that slot 0 of a slab's head would have, its first row being slot `begin`: of k, v and
    their scales (or 0, 0)."""
    first, dim = place * slab.buffer.cap - begin, layer.shape.dim
    if layer.format.scaled:
        k, k_scale, v, v_scale = slab.buffer.addresses
        return k + first * dim, v + first * dim, k_scale + 2 * first, v_scale + 2 * first
    k, v = slab.buffer.addresses
    size = dim * layer.shape.dtype.itemsize
    return k + first * size, v + first * size, 0, 0


def unequal(layers: Sequence[LayerKV]) -> bool | None:
    """True if some heads hold other numbers of rows than others do; None: a layer holds nothing, rows of a step wait to
    be committed, or the first of a layer's rows are sealed alone."""
    if any(not layer.slabs or layer.fresh or any(slab.base for slab in layer.slabs) for layer in layers):
        return None
    return len({slab.n for layer in layers for slab in layer.slabs}) > 1


def lined(layers: Sequence[LayerKV], narrow: Narrow, position: int) -> bool:
    """True if narrow heads hold the rows of the first positions, their sinks, and then consecutive ones right before
    `position`."""
    for i, layer in enumerate(layers):
        for slab in layer.slabs:
            near = [place for place, head in enumerate(_heads(layer, slab)) if narrow.among(i, head)]
            if not near:
                continue
            if slab.positions is None:
                if slab.base + slab.n != position:
                    return False
                continue
            wanted = torch.arange(slab.n)
            wanted[narrow.sinks :] += position - slab.n
            held = slab.positions[:, : slab.n].cpu()
            if not bool(((held if held.shape[0] == 1 else held[near]) == wanted).all()):
                return False
    return True
