"""All KV of one request: its layers, reserved, committed, forked, dumped and freed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.kv.blocks import seal_alike
from phasewise.kv.contiguous import ContiguousView
from phasewise.kv.drawers import Drawers
from phasewise.kv.dump import _by_layer, _fill
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.shared_rows import SharedRows
from phasewise.kv.wire import Dump, Wire
from phasewise.request.counters import Counters

if TYPE_CHECKING:
    from phasewise.kv.prefix import Node
    from phasewise.kv.retained import InjectedKV


class KV:
    """The cached rows of one request, all layers. Room is made once per step, by `reserve`, never inside a layer."""

    def __init__(
        self, layers: list[LayerKV], counters: Counters, wire: Wire | None = None, level: bool = False,
        drawers: Drawers | None = None,
    ) -> None:  # fmt: skip
        """`level`: rows may come to a layer late, so each has room for as many as the layer that holds most."""
        self.drawers = drawers  # bytes booked for what methods keep in drawers; None: they keep nothing there
        self.layers = layers
        self.counters = counters
        self.level = level
        self.wire = wire  # in what form the rows travel; None = as they are
        self.rounded = False  # rows have been through a lossy wire; none goes through one twice
        self.approximate = False  # some rows are not what computing their tokens would have given
        self.reused = 0  # rows that were not computed for this request
        self.nodes: list[Node] = []  # shared-prefix nodes this request holds
        self.packs_blocks = any(layer.blocks is not None for layer in layers)  # its formats have blocks
        self.has_blocks = any(layer.blocks is not None and layer.blocks.active for layer in layers)  # some are
        self._flat: ContiguousView | None = None
        self._walk: tuple[int, ...] | None = None  # the layers of `_flat`
        self._written: Sequence[int] = ()  # positions of this step's rows, where `flat` was used to write them
        self._spare: int | None = None

    def flat(self, walk: tuple[int, ...] | None = None) -> ContiguousView | None:
        """Returns the addresses of the rows of all layers, or of some, for native kernels; None if rows lie in another
        way."""
        if self._flat is None or walk != self._walk:
            self._flat = ContiguousView.of(self._of(walk))
            self._walk = walk
        return self._flat

    @property
    def layout(self) -> ContiguousView | None:
        """The last answer of `flat`, as long as it holds."""
        return self._flat

    def _of(self, walk: tuple[int, ...] | None) -> Sequence[LayerKV]:
        return self.layers if walk is None else [self.layers[i] for i in walk]

    def written(self, positions: Sequence[int]) -> None:
        """A native kernel has put this step's rows behind the committed ones in all layers of the last `flat`; behind
        those that it has put there before, where rows of one tree come in pieces."""
        assert self._flat is not None
        before = self._written
        if isinstance(before, range) and isinstance(positions, range) and before.stop == positions.start:
            self._written = range(before.start, positions.stop)
        else:
            self._written = [*before, *positions] if before else positions

    def spread(self) -> None:
        """Rows that a native kernel has put there so far become rows that were appended, layer by layer."""
        written, self._written = self._written, ()
        if written:
            for layer in self._of(self._walk):
                layer.appended(written)
            self._flat = None

    @property
    def bytes(self) -> int:
        """Bytes allocated; a buffer shared by forks counts for each of them (the store's ledger counts it once)."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def live_bytes(self) -> int:
        return sum(layer.live_bytes for layer in self.layers)

    @property
    def beside(self) -> int:
        """Bytes booked for what methods keep beside the rows; what forks share counts for each of them."""
        return self.drawn + sum(layer.beside.booked for layer in self.layers)

    @property
    def drawn(self) -> int:
        """The part of these bytes that is booked for drawers, which forks do not share."""
        return 0 if self.drawers is None else self.drawers.bytes

    @property
    def derived_bytes(self) -> int:
        """The part of these bytes that derived data takes now, drawers aside."""
        return sum(layer.beside.bytes for layer in self.layers)

    def growth(self, rows: int) -> int:
        """Bytes that `reserve(rows)` would take from the budget."""
        if rows <= self.spare:
            return 0
        each = [rows + lag for lag in self._lags()]
        drawn = 0 if self.drawers is None else self.drawers.growth(self.layers, each)
        return drawn + sum(layer.growth(rows) for layer, rows in zip(self.layers, each))

    def reserve(self, rows: int) -> None:
        if rows > self.spare:
            self._reserve([rows + lag for lag in self._lags()])

    def _reserve(self, each: Sequence[int]) -> None:
        self.counters.kv_bytes_moved += sum(layer.reserve(rows) for layer, rows in zip(self.layers, each))
        if self.drawers is not None:
            self.drawers.book(self.layers)
        self.changed()

    @property
    def spare(self) -> int:
        """Rows that there is room for."""
        if self._spare is None:
            self._spare = min((layer.spare - lag for layer, lag in zip(self.layers, self._lags())), default=0)
            if self.drawers is not None and self.drawers.growth(self.layers, [0] * len(self.layers)):
                self._spare = 0
        return self._spare

    def changed(self) -> None:
        """Buffers are others now."""
        self._flat = self._spare = None

    def _lags(self) -> list[int]:
        """Returns the number of rows that each layer may still get besides those to come."""
        if not self.level:
            return [0] * len(self.layers)
        most = max((layer.n for layer in self.layers), default=0)
        return [most - layer.n for layer in self.layers]

    def commit(self, rows: int | Sequence[int]) -> None:
        """End the step: keep the first `rows` rows of the span, or the rows of a path; drop the others."""
        flat, written, self._written = self._flat, self._written, ()
        if (
            flat is not None
            and isinstance(written, range)
            and isinstance(rows, int)
            and (flat.gaps or written.start == flat.n)
        ):
            flat.advance(written[:rows])
            self._use(rows)
            if self.has_blocks:
                self.seal()
            return
        self._written = written
        self.spread()
        self._flat = None  # skipped layers, or positions that are not slots
        moved = 0
        for layer in self.layers:
            moved += layer.commit(rows)
        self.counters.kv_bytes_moved += moved
        self._use(rows if isinstance(rows, int) else len(rows))

    def _use(self, rows: int) -> None:
        if self._spare is not None:
            self._spare -= rows

    def refer(self, nodes: list[Node]) -> None:
        """Hold these nodes, whose rows are the request's first ones, in the place of the rows and of the nodes that it
        has held."""
        for i, layer in enumerate(self.layers):
            self.counters.kv_bytes_moved += layer.refer(SharedRows([node.planes[i] for node in nodes]))
        self.nodes = nodes
        self.changed()

    @property
    def refers(self) -> bool:
        """True if the rows of its nodes are nowhere else."""
        return any(layer.shared is not None for layer in self.layers)

    def inject(self, given: InjectedKV, n: int) -> tuple[int, int]:
        """Appends rows that were computed elsewhere behind the first `n`, or in the place of some of these; there must
        be room for them. Returns where they begin, and how many they are."""
        start, count = n if given.start is None else given.start, given.rows[0][0].shape[1]
        if start < n:
            assert not self.refers, "rows held by reference stay as they are"
            self.drop_last(start)
            for node in self.nodes:  # whose rows these are no longer
                node.release()
            self.nodes = []
        for layer, (k, v) in zip(self.layers, given.rows):
            layer.append(k, v, range(start, start + count))
        self.counters.kv_bytes_moved += sum(k.nbytes + v.nbytes for k, v in given.rows)
        self.commit(count)
        self.approximate |= not given.exact
        return start, count

    def keep(self, layer: int, index: Tensor | Sequence[Tensor], room: int = 64) -> None:
        """Evict: `layer` keeps only the slots listed (see LayerKV.keep)."""
        self.counters.kv_bytes_moved += self.layers[layer].keep(index, room)
        self._settle(layer)

    def free(self, layer: int) -> None:
        """Give up all rows of a layer that no row will run again."""
        self.layers[layer].close()
        self._settle(layer)

    def _settle(self, layer: int) -> None:
        if self.drawers is not None:
            self.drawers.settle(layer, self.layers[layer])
        self.changed()

    def limit(self, layer: int, n_bytes: int) -> None:
        """From now on no more than `n_bytes` lie in drawers for a layer, whatever was announced for its rows."""
        if self.drawers is not None:
            self.drawers.most[layer] = n_bytes
            self._settle(layer)

    def complete(self) -> None:
        """The prompt is complete: what lay in drawers for it alone is there no more."""
        if self.drawers is not None:
            self.drawers.prompt = False
            for layer in range(len(self.layers)):
                self._settle(layer)

    def drop_last(self, position: int) -> None:
        """Roll back to the first `position` positions."""
        for layer in self.layers:
            layer.drop_last(position)
        self.changed()

    def seal(self, saliency: Callable[[int, int, int], Tensor] | None = None) -> None:
        """The prompt is complete and stays here: pack blocks of rows that are full by now; to be called after every
        later commit as well. `saliency`: see `kv/blocks.py`."""
        if self.packs_blocks:
            if self.has_blocks and self._flat is not None and self._walk is None and self._flat.cuts is not None:
                self.counters.kv_bytes_moved += self._flat.seal(saliency)
                return
            moved = seal_alike(self.layers, saliency) if self.has_blocks else None
            self.has_blocks = True
            if moved is None:
                own = [None if saliency is None else partial(saliency, i) for i in range(len(self.layers))]
                moved = sum(layer.seal(of) for layer, of in zip(self.layers, own))
                self.changed()
            self.counters.kv_bytes_moved += moved

    def boundary(self, n: int) -> int | None:
        """The position that rows of a step must not reach, `n` of them being there; None: they may reach any."""
        return next((layer.blocks.boundary(n) for layer in self.layers if layer.blocks is not None), None)

    def settle(self, saliency: Callable[[int, int, int], Tensor] | None = None) -> None:
        """The prompt is complete and stays here: give its rows the values that would have arrived elsewhere, and pack
        finished blocks."""
        self.rewrite()
        self.seal(saliency)

    def rewrite(self) -> None:
        """Give the rows of a prompt that is complete the values that would have arrived elsewhere."""
        if self.wire is None or not self.wire.fixed or self.rounded:
            return
        for layer, pieces in zip(self.layers, _by_layer(self.wire.settled(self.dump()))):
            self.counters.kv_bytes_moved += layer.rewrite([piece["planes"] for piece in pieces])
        self.rounded = True
        self.changed()

    def fork(self) -> KV:
        """Copy-on-write twin."""
        drawers = None if self.drawers is None else self.drawers.fork()
        twin = KV([layer.fork() for layer in self.layers], self.counters, self.wire, self.level, drawers)
        twin.approximate = self.approximate
        twin.rounded, twin.reused = self.rounded, max(layer.n for layer in self.layers)
        twin.nodes = [node.hold() for node in self.nodes]
        self._spare = 0  # the next write of either side makes its own copy
        return twin

    def dump(self, lent: bool = False) -> Dump:
        """Committed rows as plain tensors, layer by layer: what a hand-off carries. `lent`: buffers by name, for a
        hand-off of the memory itself. Rows held by reference come as copies."""
        assert not (lent and self.refers), "rows held by reference are copied, not lent"
        out: Dump = []
        for layer in self.layers:
            pieces: list[dict[str, Any]] = [
                {
                    "heads": s.heads,
                    "positions": None if s.positions is None else s.positions[:, : s.n].clone(),
                    "planes": [] if lent else layer.copies(s),
                    "lent": [s.buffer.name, s.buffer.heads, s.buffer.cap, s.n, s.buffer.wide] if lent else None,
                }
                for s in layer.slabs
            ]
            if layer.blocks is not None and layer.blocks.active:
                assert not lent, "sealed blocks are copied, not lent"
                pieces[0]["sealed"] = {"base": layer.slabs[0].base, "blocks": layer.blocks.dump()}
            out.extend(pieces or [{"heads": None, "positions": None, "planes": []}])  # a freed layer
            out[-1]["last"] = True  # of this layer
        return out

    def load(self, dumped: Dump) -> None:
        """Fill an empty KV from `dump`. The format and shape must be those it was dumped with."""
        layers = _by_layer(dumped)
        assert len(layers) == len(self.layers), "a dump of another model"
        for layer, pieces in zip(self.layers, layers):
            self.counters.kv_bytes_moved += _fill(layer, pieces)
        self.packs_blocks = any(layer.blocks is not None for layer in self.layers)
        self.has_blocks = any(layer.blocks is not None and layer.blocks.active for layer in self.layers)
        self.changed()

    @property
    def names(self) -> list[str]:
        """The names of all buffers, by which another KV adopts them."""
        return [slab.buffer.name for layer in self.layers for slab in layer.slabs]

    @property
    def shared(self) -> int:
        """Bytes that `unshare` would take."""
        return sum(layer.growth(0) for layer in self.layers)

    def unshare(self) -> None:
        """Copy what forks read, too."""
        self._reserve([0] * len(self.layers))

    def lend(self) -> None:
        """Give all buffers up for another KV to adopt (`dump(lent=True)` before): nothing is copied or freed."""
        for layer in self.layers:
            layer.lend()
        self.close()

    def close(self) -> None:
        for layer in self.layers:
            layer.close()
        if self.drawers is not None:
            self.drawers.close()
        for node in self.nodes:
            node.release()
        self.layers, self.nodes, self._written = [], [], ()
        self.changed()
