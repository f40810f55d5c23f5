"""All KV of a model: one request's layers (`KV`), and the store that opens them inside a hard byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasewise.kv.buffer import Buffer, Codec, KVShape, Ledger, entry_bytes
from phasewise.kv.flat import Flat
from phasewise.kv.layer_kv import LayerKV, Slab, rounded
from phasewise.kv.prefix import PrefixTree
from phasewise.kv.wire import Dump, Wire
from phasewise.trace import Counters

if TYPE_CHECKING:
    from phasewise.kv.prefix import Node
    from phasewise.request import Request


class KV:
    """The cached rows of one request, all layers. Room is made once per step, by `reserve`, never inside a layer."""

    def __init__(self, layers: list[LayerKV], counters: Counters, wire: Wire | None = None) -> None:
        self.layers = layers
        self.counters = counters
        self.wire = wire  # in what form the rows travel; None = as they are
        self.rounded = False  # rows have been through a lossy wire; none goes through one twice
        self.reused = 0  # rows that were not computed for this request
        self.nodes: list[Node] = []  # shared-prefix nodes this request holds
        self.spare = min((layer.spare for layer in layers), default=0)  # rows that there is room for
        self._flat: Flat | None = None
        self._written: Sequence[int] = ()  # positions of this step's rows, where `flat` was used to write them

    def flat(self) -> Flat | None:
        """Where a native kernel finds the rows of all layers; None if they lie in another way."""
        if self._flat is None:
            self._flat = Flat.of(self.layers)
        return self._flat

    def written(self, positions: Sequence[int]) -> None:
        """A native kernel has put this step's rows behind the committed ones in all layers of `flat`."""
        assert self._flat is not None and not self._written
        self._written = positions

    @property
    def bytes(self) -> int:
        """Bytes allocated; a buffer shared by forks counts for each of them (the store's ledger counts it once)."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def live_bytes(self) -> int:
        return sum(layer.live_bytes for layer in self.layers)

    def growth(self, rows: int) -> int:
        """Bytes that `reserve(rows)` would take from the budget."""
        return 0 if rows <= self.spare else sum(layer.growth(rows) for layer in self.layers)

    def reserve(self, rows: int) -> None:
        if rows > self.spare:
            self.counters.kv_bytes_moved += sum(layer.reserve(rows) for layer in self.layers)
            self._measure()

    def _measure(self) -> None:
        """Buffers have changed."""
        self._flat = None
        self.spare = min((layer.spare for layer in self.layers), default=0)

    def commit(self, rows: int | Sequence[int]) -> None:
        """End the step: keep the first `rows` rows of the span, or the rows of a path; drop the others."""
        flat, written, self._written = self._flat, self._written, ()
        if flat is not None and isinstance(written, range) and isinstance(rows, int) and written.start == flat.n:
            flat.advance(min(rows, len(written)))
            self.spare -= rows
            return
        self._flat = None  # skipped layers, or positions that are not slots
        if written:
            for layer in self.layers:
                layer.appended(written)
        moved = 0
        for layer in self.layers:
            moved += layer.commit(rows)
        self.counters.kv_bytes_moved += moved
        self.spare -= rows if isinstance(rows, int) else len(rows)

    def keep(self, layer: int, index: Tensor | Sequence[Tensor], room: int = 64) -> None:
        """Evict: `layer` keeps only the slots listed (see LayerKV.keep)."""
        self.counters.kv_bytes_moved += self.layers[layer].keep(index, room)
        self._measure()

    def free(self, layer: int) -> None:
        """Give up all rows of a layer that no row will run again."""
        self.layers[layer].close()
        self._measure()

    def drop_last(self, position: int) -> None:
        """Roll back to the first `position` positions."""
        for layer in self.layers:
            layer.drop_last(position)
        self._measure()

    def settle(self) -> None:
        """The prompt is complete and stays here: give its rows the values that would have arrived elsewhere."""
        if self.wire is None or not self.wire.fixed or self.rounded:
            return
        for layer, pieces in zip(self.layers, _by_layer(self.wire.settled(self.dump()))):
            self.counters.kv_bytes_moved += layer.rewrite([piece["planes"] for piece in pieces])
        self.rounded = True
        self._measure()

    def fork(self) -> KV:
        """Copy-on-write twin."""
        twin = KV([layer.fork() for layer in self.layers], self.counters, self.wire)
        twin.rounded, twin.reused = self.rounded, max(layer.n for layer in self.layers)
        twin.nodes = [node.hold() for node in self.nodes]
        self.spare = 0  # the next write of either side makes its own copy
        return twin

    def dump(self, lent: bool = False) -> Dump:
        """Committed rows as plain tensors, layer by layer: what a hand-off carries. `lent`: buffers by name, for a
        hand-off of the memory itself."""
        out: Dump = []
        for layer in self.layers:
            pieces = [
                {
                    "heads": s.heads,
                    "positions": None if s.positions is None else s.positions[:, : s.n].clone(),
                    "planes": [] if lent else [p[:, : s.n].clone() for p in s.buffer.planes],
                    "lent": [s.buffer.name, s.buffer.heads, s.buffer.cap, s.n] if lent else None,
                }
                for s in layer.slabs
            ]
            out.extend(pieces or [{"heads": None, "positions": None, "planes": []}])  # a freed layer
            out[-1]["last"] = True  # of this layer
        return out

    def load(self, dumped: Dump) -> None:
        """Fill an empty KV from `dump`. The codec and shape must be those it was dumped with."""
        layers = _by_layer(dumped)
        assert len(layers) == len(self.layers), "a dump of another model"
        for layer, pieces in zip(self.layers, layers):
            self.counters.kv_bytes_moved += _fill(layer, pieces)
        self._measure()

    @property
    def names(self) -> list[str]:
        """Of all buffers, for whoever adopts them."""
        return [slab.buffer.name for layer in self.layers for slab in layer.slabs]

    @property
    def shared(self) -> int:
        """Bytes that `unshare` would take."""
        return sum(layer.growth(0) for layer in self.layers)

    def unshare(self) -> None:
        """Copy what forks read, too."""
        self.counters.kv_bytes_moved += sum(layer.reserve(0) for layer in self.layers)
        self._measure()

    def lend(self) -> None:
        """Give all buffers up for another KV to adopt (`dump(lent=True)` before): nothing is copied or freed."""
        for layer in self.layers:
            layer.lend()
        self.close()

    def close(self) -> None:
        for layer in self.layers:
            layer.close()
        for node in self.nodes:
            node.release()
        self.layers, self.nodes, self._written = [], [], ()
        self._measure()


def _by_layer(dumped: Dump) -> list[Dump]:
    layers: list[Dump] = [[]]
    for piece in dumped:
        layers[-1].append(piece)
        if piece.get("last"):
            layers.append([])
    return layers[:-1]


def _fill(layer: LayerKV, pieces: list[dict[str, Any]]) -> int:
    layer.close()
    moved = 0
    for piece in pieces:
        if not piece["planes"] and not piece.get("lent"):
            continue  # freed before it was dumped
        if piece["planes"]:
            heads, n = piece["planes"][0].shape[:2]
            lent, cap = None, rounded(n + 1)
        else:
            lent, heads, cap, n = piece["lent"]
        buffer = Buffer(layer.codec, layer.shape, heads, cap, layer.ledger, lent)
        layer.slabs.append(slab := Slab(buffer, n, piece["heads"], None))  # at once: `close` must find it
        for plane, rows in zip(buffer.planes, piece["planes"]):
            plane[:, :n] = rows
            moved += rows.numel() * rows.element_size()
        positions = piece["positions"]
        if positions is not None:
            slab.positions = torch.empty((positions.shape[0], cap), dtype=torch.int64, device=layer.shape.device)
            slab.positions[:, :n] = positions
    return moved


class Store:
    """Opens KV for requests inside a hard byte budget (the ledger), with reuse of exact shared prefixes.

    `prefix_key` names everything that shapes a prompt's KV besides its tokens (model, store, prefill methods), so
    that rewritten rows never meet exact ones (DESIGN law 10); None switches reuse off. Prompt rows depend on tokens of
    their own `unit` rows and before (block-causal attention), so prefixes are shared in whole units. `wire` is the form
    in which rows leave for other engines.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        codec: Codec,
        *,
        ledger: Ledger,
        counters: Counters,
        prefix_key: str | None = None,
        private: int = 1,
        unit: int = 1,
        wire: Wire | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.codec = codec
        self.wire = wire
        self.counters = counters
        self.ledger = ledger
        self.private = private
        self.unit = unit
        self.tree = PrefixTree(prefix_key, self.ledger, unit) if prefix_key is not None else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(entry_bytes(self.codec, shape) * shape.heads for shape in self.shapes)

    def cost(self, tokens: int) -> int:
        """Bytes that `open` takes for a request of `tokens` tokens."""
        return rounded(tokens) * self.row_bytes

    def room(self, n_bytes: int) -> bool:
        """Whether `n_bytes` can be had now, giving up unused prefixes for them if need be."""
        if self.ledger.room(n_bytes):
            return True
        if self.tree is not None:
            self.tree.shrink(n_bytes - self.ledger.free)
        return self.ledger.room(n_bytes)

    def open(self, request: Request, tokens: int) -> KV:
        """A KV with room for `tokens` rows, already holding the longest cached prefix of the request's prompt.

        The last `private` prompt rows are always computed: there must be a row to draw from, and an evictor may have
        to see their queries.
        """
        layers: list[LayerKV] = []
        try:
            for shape in self.shapes:
                layers.append(LayerKV(shape, self.codec, self.ledger, rounded(tokens)))
        except Exception:  # the machine has less memory than the budget says: nothing stays behind
            KV(layers, self.counters).close()
            raise
        kv = KV(layers, self.counters, self.wire)
        if self.tree is not None:
            kv.nodes = self.tree.match(request.tokens[: max(0, request.prompt_len - self.private)])
            moved = self.tree.copy_into(kv.nodes, layers)
            self.counters.kv_bytes_moved += moved
            hit = sum(node.rows for node in kv.nodes)
            self.counters.prefix_hits += hit
            request.computed = kv.reused = hit
            kv._measure()
        return kv

    def shareable(self, request: Request) -> int:
        """How many rows of its prompt others could reuse: those of whole units."""
        return request.prompt_len // self.unit * self.unit

    def remember(self, request: Request) -> None:
        """Keep the request's computed prompt for others, as far as the budget allows."""
        if self.tree is None or request.kv is None or request.kv.rounded:
            return
        if any(len(layer.slabs) != 1 or layer.slabs[0].positions is not None for layer in request.kv.layers):
            return  # rewritten rows are private
        upto = min(request.computed, request.prompt_len)
        added, moved = self.tree.insert(request.tokens[:upto], request.kv.layers, request.kv.nodes)
        request.kv.nodes = added
        self.counters.kv_bytes_moved += moved
