"""What a server has cached, as the router knows it: blocks of texts, learnt from its traffic or from its KV events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from phasewise.kv.events import BlockRemoved, BlockStored, KVEvent
from phasewise.kv.prefix import chain

BLOCK = 32  # tokens of a block; bytes, where texts are compared as they are sent
REMEMBERED = 65_536  # blocks of one server


class PrefixIndex:
    """Blocks by chained hashes of their content. `block` tokens each; those used least recently are forgotten.

    A server's own hashes mean nothing here: a block is known by the tokens that it was stored with.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._named: dict[bytes | int, bytes] = {}  # the server's hash of a block: its key here

    @property
    def blocks(self) -> int:
        """The number of blocks that are probably cached."""
        return len(self._known)

    def cached(self, tokens: Sequence[int]) -> int:
        """Tokens at the start of a text that are probably cached."""
        found = 0
        for key in self._keys(tokens):
            if key not in self._known:
                break
            self._known.move_to_end(key)
            found += self.block
        return found

    def remember(self, tokens: Sequence[int]) -> None:
        """The server was given a text."""
        for key in self._keys(tokens):
            self._note(key)

    def apply(self, event: KVEvent) -> None:
        """The server has stored blocks, or given them up."""
        match event:
            case BlockStored():
                self._stored(event)
            case BlockRemoved():
                for name in event.block_hashes:
                    key = self._named.pop(name, None)
                    if key is not None:
                        self._known.pop(key, None)
            case _:
                self.clear()

    def clear(self) -> None:
        """Forget everything: the server has started anew, or was not heard for a while."""
        self._known.clear()
        self._named.clear()

    def _stored(self, event: BlockStored) -> None:
        """Blocks whose parent is not known, as an event was missed, are of no use: no text is found to begin so."""
        if event.block_size != self.block:
            self.block = event.block_size
            self.clear()
        parent = event.parent_block_hash
        key = b"" if parent is None else self._named.get(parent)
        if key is None:
            return
        for i, name in enumerate(event.block_hashes):
            key = chain(key, event.token_ids[i * self.block : (i + 1) * self.block])
            self._named[name] = key
            self._note(key)

    def _note(self, key: bytes) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        key = b""
        for start in range(0, len(tokens) - self.block + 1, self.block):
            key = chain(key, tokens[start : start + self.block])
            yield key
