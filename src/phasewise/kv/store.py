"""Opens KV for requests inside a hard byte budget, with reuse of exact shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Any

from phasewise.kv.beside import Wants
from phasewise.kv.buffer import PLACE, Ledger, rounded
from phasewise.kv.cache import KV
from phasewise.kv.drawers import Drawers, Draws, Room
from phasewise.kv.format import KVShape, RowFormat, booked, entry_bytes
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.prefix import LayerRows, PrefixCache, PrefixTree
from phasewise.kv.retained import RetainedKV
from phasewise.kv.tiers.codec import BlockCodec, BlockLayout, RawBlocks
from phasewise.kv.token_rows import CachedTokenRows, TokenRows
from phasewise.kv.wire import Wire
from phasewise.ops.native.spans import BLOCK
from phasewise.request.counters import Counters

if TYPE_CHECKING:
    from phasewise.request.request import Request


Keeps = Callable[[int, KVShape, int], int]
"""What a method says of its derived data: see `Attend.beside`."""
Draw = Callable[[int, KVShape, Room], int]
"""What a method says of its drawers: see `verbs/host.py`."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which of a prompt's rows others may reuse.

    `prefix_key` names everything that shapes a prompt's KV besides its tokens (model, store, prefill methods), so
    that rewritten rows never meet exact ones (DESIGN law 10); None switches reuse off. The last `private` rows of a
    prompt are always computed. Prompt rows depend on tokens of their own `unit` rows and before (block-causal
    attention), so prefixes are shared in whole units. `by_reference`: requests read cached rows where they lie instead
    of copying them (kv/shared_rows.py); nothing may then move or give up rows of a prompt. `beside`: what methods keep
    of each token in drawers, which must come along with the rows (kv/token_rows.py).
    """

    prefix_key: str | None = None
    private: int = 1
    unit: int = 1
    prefixes: PrefixCache | None = None  # of all stores under one ledger; None: the store has its own
    codec: Callable[[BlockLayout], BlockCodec | None] | None = None  # the form of blocks on disk; None: as they are
    by_reference: bool = False
    beside: Sequence[TokenRows] = ()


class Store:
    """Opens KV for requests inside a hard byte budget (the ledger), with reuse of exact shared prefixes (`Sharing`).

    `wire` is the form in which rows leave for other engines.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        format: RowFormat,
        *,
        ledger: Ledger,
        counters: Counters,
        sharing: Sharing | None = None,
        wire: Wire | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.format = format
        self.wire = wire
        self.counters = counters
        self.ledger = ledger
        self.sharing = sharing or Sharing()
        key, unit = self.sharing.prefix_key, self.sharing.unit
        if key is not None and self.sharing.by_reference:  # kernels look at so many rows at a time
            key, unit = f"{key} by reference", lcm(unit, BLOCK)
        self.prefixes = self.sharing.prefixes or PrefixCache(ledger)
        self.tree = self.prefixes.tree(key, unit) if key is not None else None
        self.beside = [
            CachedTokenRows(rows, self.prefixes.tree(f"{key} with {rows.key}", unit, silent=True))
            for rows in (self.sharing.beside if key is not None else ())
        ]
        if self.tree is not None and self.prefixes.tiers is not None and self.tree.below is None:
            layout = BlockLayout.of(self.shapes, format, self.tree.block)
            coded = None if self.sharing.codec is None else self.sharing.codec(layout)
            self.tree.below = self.prefixes.tiers.space(self.tree.root.key, layout, coded or RawBlocks(layout))
        # of a token, in all layers
        self.row_bytes = sum(entry_bytes(format, shape) * shape.heads for shape in self.shapes)

        self.expect((), False)
        self.wants: list[Wants | None] = [None] * len(self.shapes)  # beside the rows of each layer
        self.draws: list[Draws] = []  # in drawers, likewise; empty: nothing

    def book(self, keeps: Iterable[Keeps], draws: Iterable[Draw] = ()) -> None:
        """Books, for every request opened from now on, what these methods keep beside its rows and in drawers as
        well."""
        if every := list(keeps):
            self.wants = [partial(_together, every, layer, shape) for layer, shape in enumerate(self.shapes)]
        if drawers := list(draws):
            self.draws = [partial(_together, drawers, layer, shape) for layer, shape in enumerate(self.shapes)]

    def expect(self, places: Sequence[Callable[[int, KVShape], int]], late: bool) -> None:
        """Rows of every request opened from now on will be given up, or come to a layer `late`. `places`: of each
        method that gives rows up, `Evict.places`."""
        said = [[each(i, shape) for each in places] for i, shape in enumerate(self.shapes)]
        self.level, self.wide = late, [max(each, default=int(late)) for each in said]  # see KV and LayerKV
        self.row_room = self.row_bytes + sum(self.wide) * PLACE  # of a token, positions included

    def cost(self, tokens: int, shared: int = 0) -> int:
        """Bytes that `open` takes for a request of `tokens` tokens, of which it holds `shared` rows by reference."""
        rows = rounded(tokens) - shared
        beside = sum(wants(rows) for wants in self.wants if wants is not None)
        beside += max(sum(draws(Room(rows, rows, prompt)) for draws in self.draws) for prompt in (False, True))
        return rows * self.row_room + beside + sum(booked(self.format, shape, rows) for shape in self.shapes)

    def layers(self, cap: int) -> Iterator[LayerKV]:
        """One after another, with room for `cap` rows each."""
        for shape, wants, wide in zip(self.shapes, self.wants, self.wide):
            yield LayerKV(shape, self.format, self.ledger, cap, wants, wide)

    def made(self, layers: Iterable[LayerKV]) -> KV:
        """A KV of these layers."""
        drawers = Drawers(self.draws, self.ledger) if self.draws else None
        return KV(list(layers), self.counters, self.wire, self.level, drawers)

    def room(self, n_bytes: int) -> bool:
        """Frees unused prefixes, whoever's they are, until there is room for `n_bytes`. Returns True if there is."""
        return self.prefixes.room(n_bytes)

    @contextmanager
    def holding(self, request: Request) -> Iterator[int]:
        """Meanwhile no cached row that the request would hold by reference is freed. Yields how many these are."""
        nodes = self.tree.match(self._findable(request)) if self.tree is not None and self.sharing.by_reference else []
        try:
            yield sum(node.rows for node in nodes)
        finally:
            for node in nodes:
                node.release()

    def open(self, request: Request, tokens: int) -> KV:
        """A KV with room for `tokens` rows, already holding the longest cached prefix of the request's prompt.

        The last prompt rows are always computed (`Sharing.private`): there must be a row to draw from, and an evictor
        may have to see their queries.
        """
        with self.holding(request) as shared:
            return self._open(request, tokens, shared)

    def _open(self, request: Request, tokens: int, shared: int) -> KV:
        """`open`, with so many rows held by reference."""
        layers: list[LayerKV] = []
        try:
            layers.extend(self.layers(rounded(tokens) - shared))
        except Exception:  # the machine has less memory than the budget says: nothing stays behind
            KV(layers, self.counters).close()
            raise
        kv = self.made(layers)
        if kv.drawers is not None:
            kv.drawers.book(layers)
        if self.tree is not None:
            prompt = self._findable(request)
            kv.nodes = self.tree.match(prompt)
            blocks = [node.planes for node in kv.nodes]
            if (below := self.tree.below) is not None:
                keys = self.tree.keys(prompt)[0]
                below.use(keys[: len(blocks)])
                blocks += below.take(request.id, keys[len(blocks) :])
            hit = len(blocks) * self.tree.block
            if shared:
                kv.refer(kv.nodes)
                blocks = blocks[len(kv.nodes) :]
            self.counters.kv_bytes_moved += self.tree.copy_into(blocks, layers)
            self.counters.kv_bytes_moved += sum(each.give(request, hit) for each in self.beside)
            self.counters.prefix_hits += hit
            request.computed = request.cached = kv.reused = hit
            kv.changed()
        return kv

    def _findable(self, request: Request) -> list[int]:
        """The tokens of a prompt whose rows it may take from the prefix cache."""
        tokens = request.tokens[: max(0, min(request.cacheable, request.prompt_len - self.sharing.private))]
        for each in self.beside:
            tokens = tokens[: each.covered(tokens)]
        return tokens

    def fetch(self, request: Request) -> None:
        """A request has arrived: begin to load what disk has of its prompt, and the prefix cache and memory have
        not."""
        if self.tree is not None and self.tree.below is not None:
            keys, cached = self.tree.keys(self._findable(request))
            self.tree.below.fetch(request.id, keys[cached:])

    def leave(self, request: Request, dense: bool) -> None:
        """Keep the request's KV for others, if it is plain, and what it shares with nobody: a row for every token, in
        the form that this store has. Blocks are no longer what was computed, nor, unless decoding is `dense`, is what
        computing a decoded token as one of a prompt would have given."""
        kv, upto = request.kv, request.computed
        assert kv is not None
        plain = (len(layer.slabs) == 1 and layer.slabs[0].positions is None and layer.n == upto for layer in kv.layers)
        if self.wire is not None or not all(plain) or kv.shared:
            return
        kv.approximate |= kv.packs_blocks or (upto > request.prompt_len and not dense)
        for node in kv.nodes:
            node.release()
        kv.nodes, request.kv = [], None
        for layer in range(len(kv.layers)):
            kv.limit(layer, 0)  # its drawers go with the request
        self.prefixes.retained.put(request.id, RetainedKV(request.tokens[:upto], kv, self))

    def left(self, name: str) -> RetainedKV | None:
        """Returns what a request of this store has left, if that is still kept."""
        return self.prefixes.retained.find(name, self)

    def shareable(self, request: Request) -> int:
        """Returns the number of prompt rows that others could reuse: those of whole units."""
        return request.prompt_len // self.sharing.unit * self.sharing.unit

    def remember(self, request: Request) -> None:
        """Keep the request's computed prompt for others, as far as the budget allows."""
        if self.tree is None or request.kv is None or request.kv.rounded or request.kv.approximate:
            return
        if any(len(layer.slabs) != 1 or layer.slabs[0].positions is not None for layer in request.kv.layers):
            return  # rewritten rows are private
        upto = min(request.computed, request.prompt_len)
        added, moved = self.tree.insert(request.tokens[:upto], LayerRows(request.kv.layers), request.kv.nodes)
        self.counters.kv_bytes_moved += moved
        if self.sharing.by_reference and len(added) > len(request.kv.nodes):
            request.kv.refer(added)
        else:
            request.kv.nodes = added
        self.counters.kv_bytes_moved += sum(each.remember(request, upto) for each in self.beside)

    @property
    def trees(self) -> list[PrefixTree]:
        """All prefix trees that it uses."""
        return [] if self.tree is None else [self.tree, *(each.tree for each in self.beside)]


def _together(keeps: Sequence[Callable[[int, KVShape, Any], int]], layer: int, shape: KVShape, room: Any) -> int:
    return sum(each(layer, shape, room) for each in keeps)
