"""KV that travels while its prompt is still computed: rectangles of layers and rows, cut out here and laid down there.

A row of a layer is final once the layer has run for it, so chunks of a prompt may travel one by one, and the layers of
a slice that runs part of the depth at a time as they are done. Whether all rows stayed as they were sent is asked of
the KV at the end: if some were rewritten, given up or computed again, none of the pieces counts and the KV travels
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from phasewise.kv.buffer import rounded
from phasewise.kv.cache import KV
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.store import Store
from phasewise.kv.wire import Misfit

if TYPE_CHECKING:
    from phasewise.request.request import Request

Plain = list[list[int]]  # a block as JSON


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """Some rows of some layers, both half-open ranges."""

    layers: tuple[int, int]
    rows: tuple[int, int]

    def plain(self) -> Plain:
        return [list(self.layers), list(self.rows)]

    @classmethod
    def of(cls, plain: Plain) -> SegmentBlock:
        (first, last), (start, stop) = plain
        return cls((first, last), (start, stop))


def between(sent: Sequence[int], ready: Sequence[int]) -> list[SegmentBlock]:
    """Returns the blocks that are ready and not sent (rows per layer), one per run of layers with the same rows."""
    blocks = []
    for (start, stop), run in groupby(range(len(ready)), key=lambda i: (sent[i], ready[i])):
        layers = list(run)
        if start < stop:
            blocks.append(SegmentBlock((layers[0], layers[-1] + 1), (start, stop)))
    return blocks


def cut(kv: KV, blocks: Sequence[SegmentBlock]) -> list[Tensor]:
    """Copies of the rows of these blocks: block by block, layer by layer, plane by plane [H, rows, ...]."""
    return [
        plane[:, slice(*block.rows)].clone()
        for block in blocks
        for layer in kv.layers[slice(*block.layers)]
        for plane in layer.read()[0].planes
    ]


def size(kv: KV, blocks: Sequence[SegmentBlock]) -> int:
    """Bytes of `cut`."""
    per_layer = [plane[:, :1].nbytes for layer in kv.layers[:1] for plane in layer.read()[0].planes]
    return sum(per_layer) * sum((b.layers[1] - b.layers[0]) * (b.rows[1] - b.rows[0]) for b in blocks)


class Sent:
    """Which rows of a request's KV have been sent, and whether they have stayed what they were."""

    def __init__(self) -> None:
        self.kv: KV | None = None
        self.rows: list[int] = []  # per layer
        self._versions: list[int] = []
        self.count = 0  # pieces
        self.spoiled = False

    def more(self, request: Request, whole: int) -> list[SegmentBlock]:
        """Returns what can be sent now: committed rows, and those of a slice at the layers it has run, up to row
        `whole` (what lies beyond is computed again once more tokens are known). Nothing once a row was rewritten."""
        kv = request.kv
        if kv is None or self.spoiled:
            return []
        if self.kv is None:
            self.kv, self.rows = kv, [0] * len(kv.layers)
            self._versions = [layer.version for layer in kv.layers]
        ready = [_final(layer, whole) for layer in kv.layers]
        steady = kv is self.kv and self._versions == [layer.version for layer in kv.layers]
        if kv.wire is not None or not steady or any(now < old for now, old in zip(ready, self.rows)):
            self.spoiled = True
            return []
        return between(self.rows, ready)

    def rest(self, request: Request) -> list[SegmentBlock] | None:
        """Returns the unsent blocks of a prompt just completed; None if the KV has to travel whole."""
        blocks = self.more(request, 0)
        full = all(_final(layer, 0) == request.computed for layer in request.kv.layers) if request.kv else False
        return blocks if full and not self.spoiled else None

    def note(self, blocks: Sequence[SegmentBlock]) -> int:
        """These have been sent. -> the number of the piece."""
        for block in blocks:
            for layer in range(*block.layers):
                self.rows[layer] = block.rows[1]
        self.count += 1
        return self.count - 1


def _final(layer: LayerKV, whole: int) -> int:
    """Rows from the first on that stand at their own places and will not change; -1 if they do not stand so."""
    parts = layer.read()
    if len(parts) != 1 or not parts[0].plain or parts[0].heads is not None:
        return -1
    part = parts[0]
    if not part.fresh or part.ids is not None or part.pending[0] != part.n:
        return part.n
    return max(part.n, min(part.n + part.fresh, whole))


class Landing:
    """Room for a request's KV, taken at once and filled by pieces in any order; nobody reads it before that is done."""

    def __init__(self, store: Store, tokens: int) -> None:
        self.store = store
        self.layers: list[LayerKV] = []
        self.blocks: list[SegmentBlock] = []
        self._seen: set[int] = set()
        try:
            self.layers.extend(store.layers(rounded(tokens)))
        except Exception:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        return sum(layer.bytes + layer.beside.booked for layer in self.layers)

    def has(self, number: int) -> bool:
        return number in self._seen

    def lay(self, number: int, blocks: Sequence[SegmentBlock], tensors: Sequence[Tensor]) -> None:
        """Copy the rows of piece `number` to their places. Raises Misfit, having changed nothing that counts."""
        left = iter(tensors)
        for block in blocks:
            for plane in self._places(block):
                rows = next(left, None)
                if rows is None or rows.shape != plane.shape or rows.dtype != plane.dtype:
                    raise Misfit(f"piece {number} does not fit: {list(plane.shape)} of {plane.dtype} are wanted")
                plane.copy_(rows)
                self.store.counters.kv_bytes_moved += rows.nbytes
        self._seen.add(number)
        self.blocks.extend(blocks)

    def _places(self, block: SegmentBlock) -> Iterator[Tensor]:
        (first, last), (start, stop) = block.layers, block.rows
        cap = self.layers[0].spare
        if not (0 <= first < last <= len(self.layers) and 0 <= start < stop <= cap):
            raise Misfit(f"rows {start}-{stop} of layers {first}-{last} do not fit into {cap} of {len(self.layers)}")
        for layer in self.layers[first:last]:
            for plane in layer.slabs[0].buffer.planes:
                yield plane[:, start:stop]

    def covers(self, rows: int) -> bool:
        """Returns whether the first `rows` rows of every layer are there."""
        return all(_reach(self.blocks, layer) >= rows for layer in range(len(self.layers)))

    def finish(self, rows: int) -> KV:
        """The KV, its first `rows` rows committed."""
        assert self.covers(rows), "rows are missing"
        for layer in self.layers:
            layer.slabs[0].n = rows
        layers, self.layers = self.layers, []
        return self.store.made(layers)

    def close(self) -> None:
        """Give the room back; nothing happens if there is none."""
        for layer in self.layers:
            layer.close()
        self.layers = []


def _reach(blocks: Sequence[SegmentBlock], layer: int) -> int:
    """The first row of a layer that is missing."""
    reach = 0
    for start, stop in sorted(block.rows for block in blocks if block.layers[0] <= layer < block.layers[1]):
        if start > reach:
            break
        reach = max(reach, stop)
    return reach
