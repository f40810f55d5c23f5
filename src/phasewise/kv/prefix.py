"""Exact prefix reuse: a reference-counted tree of prompt blocks keyed by chained hashes, least recently used out first.

A block's key is the hash of its tokens and of its parent's key; the root's key names everything else that shaped the
rows (model, store, prefill methods). Blocks own their memory; a request copies the rows it reuses into its own slab
(a copy of 1k rows costs well under a millisecond) and holds its nodes so that they are still there after a preemption.
Where its recipe reads them in place (`Sharing.by_reference`), it copies nothing and holds the nodes instead of rows.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from phasewise.kv.buffer import Ledger
from phasewise.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog
from phasewise.kv.layer_kv import LayerKV
from phasewise.kv.retained import RetainedStore

if TYPE_CHECKING:
    from phasewise.kv.tiers.tiers import KVTiers, TierSpace

BLOCK = 32  # rows per node, or the smallest multiple of the decode method's unit


class Node:
    """One block of rows, `n_bytes` large. `planes` [layer][plane] of [H, rows, ...]; none where rows are numbers."""

    __slots__ = ("bytes", "children", "key", "parent", "planes", "refs", "rows", "used")

    def __init__(self, key: bytes, parent: Node | None, planes: list[list[Tensor]], rows: int, n_bytes: int) -> None:
        self.key, self.parent, self.planes, self.rows = key, parent, planes, rows
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.used = 0
        self.bytes = n_bytes

    def hold(self) -> Node:
        self.refs += 1
        return self

    def release(self) -> None:
        assert self.refs > 0, "a prefix node was released more often than it was held"
        self.refs -= 1


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block: stable across processes and runs."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class CutRows(Protocol):
    """A source of rows that blocks are cut from."""

    def size(self, block: int) -> int:
        """Bytes of so many rows."""
        ...

    def copy(self, start: int, stop: int) -> list[list[Tensor]]:
        """Some of them, the caller's to keep."""
        ...


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows of a request's layers, each in one slab."""

    layers: Sequence[LayerKV]

    def size(self, block: int) -> int:
        planes = (plane for layer in self.layers for plane in layer.slabs[0].buffer.planes)
        return sum(plane.nbytes // plane.shape[1] for plane in planes) * block

    def copy(self, start: int, stop: int) -> list[list[Tensor]]:
        slabs = [layer.slabs[0] for layer in self.layers]
        return [[plane[:, start - s.base : stop - s.base].clone() for plane in s.buffer.planes] for s in slabs]


class PrefixTree:
    """`unit`: rows of one unit depend on each other's tokens, so only whole units may be shared. `ticks` say in which
    order blocks are used, of all trees that make way for one another. `below`: its blocks in the tiers beyond the
    budget; None: what makes way is gone."""

    below: TierSpace | None = None

    def __init__(
        self, key: str, ledger: Ledger, unit: int = 1, ticks: Iterator[int] | None = None,
        events: KVEventLog | None = None,
    ) -> None:  # fmt: skip
        self.events = KVEventLog() if events is None else events
        self.block = math.lcm(BLOCK, unit)
        self.root = Node(hashlib.blake2b(key.encode(), digest_size=16).digest(), None, [], 0, 0)
        self.ledger = ledger
        self.bytes = 0
        self._ticks = ticks or itertools.count()

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The longest chain of cached blocks that `tokens` starts with; each node is held for the caller."""
        now = next(self._ticks)
        node, path = self.root, []
        for start in range(0, len(tokens) - self.block + 1, self.block):
            child = node.children.get(chain(node.key, tokens[start : start + self.block]))
            if child is None:
                break
            child.used = now
            path.append(child.hold())
            node = child
        return path

    def keys(self, tokens: Sequence[int]) -> tuple[list[bytes], int]:
        """The keys of all whole blocks of `tokens`, and how many of these are cached, from the first on."""
        node: Node | None = self.root
        key, found, cached = self.root.key, list[bytes](), 0
        for start in range(0, len(tokens) - self.block + 1, self.block):
            key = chain(key, tokens[start : start + self.block])
            found.append(key)
            node = None if node is None else node.children.get(key)
            cached += node is not None
        return found, cached

    def copy_into(self, blocks: Sequence[Sequence[Sequence[Tensor]]], layers: list[LayerKV]) -> int:
        """Write the rows of blocks, [layer][plane] each, to the start of empty slabs. Returns bytes copied."""
        moved, at = 0, 0
        for block in blocks:
            for layer, planes in zip(layers, block):
                for plane, rows in zip(layer.slabs[0].buffer.planes, planes):
                    plane[:, at : at + self.block] = rows
                    moved += rows.nbytes
            at += self.block
        for layer in layers:
            layer.slabs[0].n = at
        return moved

    def insert(self, tokens: Sequence[int], rows: CutRows, held: list[Node]) -> tuple[list[Node], int]:
        """Cache the whole blocks of `tokens`, whose `rows` are there. `held` are the caller's nodes so far.

        Returns the caller's nodes now and the bytes copied. Stops, silently, where the budget ends: what follows goes
        to the tiers below.
        """
        now = next(self._ticks)
        block = self.block
        node = held[-1] if held else self.root
        path, moved, new = list(held), 0, list[Node]()
        for start in range(len(held) * block, len(tokens) - block + 1, block):
            key = chain(node.key, tokens[start : start + block])
            child = node.children.get(key)
            if child is None:
                size = rows.size(block)
                if not self.ledger.room(size):
                    self._hand_down(node.key, tokens, start, rows)
                    break
                child = node.children[key] = Node(key, node, rows.copy(start, start + block), block, size)
                self.ledger.add(child.bytes)
                self.bytes += child.bytes
                moved += child.bytes
                if self.below is not None:
                    self.below.made(key, child.planes)
                new.append(child)
            child.used = now
            path.append(child.hold())
            node = child
        if new and self.events:  # what is new stands behind what was there
            start = (len(path) - len(new)) * block
            parent = None if new[0].parent is self.root or new[0].parent is None else new[0].parent.key
            stored = [int(token) for token in tokens[start : start + len(new) * block]]
            self.events.tell(BlockStored([child.key for child in new], parent, stored, block))
        return path, moved

    def _hand_down(self, key: bytes, tokens: Sequence[int], start: int, rows: CutRows) -> None:
        """Blocks from `start` on, for which the budget has no room, as far as the tiers below want them; `key` is that
        of the block before."""
        if self.below is None:
            return
        for at in range(start, len(tokens) - self.block + 1, self.block):
            key = chain(key, tokens[at : at + self.block])
            if self.below.wants(key):
                self.below.fallen(key, rows.copy(at, at + self.block))

    def nodes(self) -> list[Node]:
        found, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            found.append(node)
        return found[1:]

    def unheld(self) -> list[Node]:
        """Blocks that could go now: nobody holds them, and none follows them."""
        return [node for node in self.nodes() if not node.children and not node.refs]

    def remove(self, node: Node) -> int:
        """Give an unheld block back. -> bytes"""
        assert node.parent is not None and not node.children and not node.refs
        del node.parent.children[node.key]
        if self.below is not None:
            self.below.fallen(node.key, node.planes)
        self.ledger.add(-node.bytes)
        self.bytes -= node.bytes
        if self.events:
            self.events.tell(BlockRemoved([node.key]))
        return node.bytes


class PrefixCache:
    """All that is cached of prompts under one ledger: a tree per key, and whoever needs room may have unused blocks of
    any of them; then what requests have `left`. `tiers`: what lies below the budget, if anything does."""

    def __init__(self, ledger: Ledger, tiers: KVTiers | None = None) -> None:
        self.ledger, self.tiers = ledger, tiers
        self.trees: dict[str, PrefixTree] = {}
        self.events = KVEventLog()
        self.retained = RetainedStore()
        self._ticks = itertools.count()

    def tree(self, key: str, unit: int = 1, *, silent: bool = False) -> PrefixTree:
        """The tree of a key, which names all that shapes rows besides their tokens, `unit` included: whoever says the
        same shares it. `silent`: nobody is told of its blocks, as they are no KV."""
        if key not in self.trees:
            self.trees[key] = PrefixTree(key, self.ledger, unit, self._ticks, None if silent else self.events)
        return self.trees[key]

    @property
    def bytes(self) -> int:
        return sum(tree.bytes for tree in self.trees.values()) + self.retained.bytes

    def room(self, n_bytes: int) -> bool:
        """Frees unused blocks until there is room for `n_bytes`. Returns True if there is."""
        if self.ledger.room(n_bytes):
            return True
        self.shrink(n_bytes - self.ledger.free)
        return self.ledger.room(n_bytes)

    def shrink(self, n_bytes: int) -> int:
        """Give back at least `n_bytes` if unheld blocks, and then what requests have left, allow it: each the least
        recently used first. -> bytes."""
        freed = 0
        while freed < n_bytes:
            leaves = [(tree, node) for tree in self.trees.values() for node in tree.unheld()]
            if not leaves:
                break
            for tree, node in sorted(leaves, key=lambda leaf: leaf[1].used):
                freed += tree.remove(node)
                if freed >= n_bytes:
                    break
        before = self.ledger.used + freed
        while before - self.ledger.used < n_bytes and self.retained.give_up():
            pass
        return before - self.ledger.used

    def keep(self, used: Callable[[PrefixTree], bool]) -> None:
        """Forget the trees that are not in use, and whose blocks nobody holds."""
        for key, tree in list(self.trees.items()):
            if used(tree):
                continue
            while leaves := tree.unheld():
                for node in leaves:
                    tree.remove(node)
            if not tree.root.children:
                del self.trees[key]

    def clear(self) -> None:
        """Forget every block nobody holds, and what requests have left. Tiers below the budget keep theirs."""
        self.retained.clear()
        self.shrink(self.bytes)
        if self.events and not any(tree.root.children for tree in self.trees.values()):
            self.events.tell(AllBlocksCleared())

    def close(self) -> None:
        """The engine ends: what lies below the budget is put in order."""
        if self.tiers is None:
            return
        for tree in self.trees.values():
            if (below := tree.below) is not None:
                for node in tree.nodes():  # where too many waited before
                    below.made(node.key, node.planes)
        self.tiers.close()
