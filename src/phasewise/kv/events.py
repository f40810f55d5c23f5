"""KV events: which blocks of prompts are cached, told as they come and go, in the format that vLLM publishes.

A batch is a MessagePack array [time, [event, ...]]. An event is an array that begins with its name: BlockStored,
BlockRemoved or AllBlocksCleared. A block is known by its hash, and stored with its tokens and its parent's hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from phasewise.errors import UserError

Hash = bytes | int
WAITING = 100_000  # events that nobody has taken; beyond it a log begins anew


class BlockStored(NamedTuple):
    """Blocks of `block_size` tokens each, one behind the other, the first behind `parent_block_hash` (None: a prompt's
    first). `token_ids` are those of all."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]
    block_size: int


class BlockRemoved(NamedTuple):
    """Blocks that are no longer there."""

    block_hashes: Sequence[Hash]


class AllBlocksCleared(NamedTuple):
    """No block is there any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """The events of one engine's prefix cache, as a stream in this process: whoever subscribes is told each event, and
    `take` gives those since the last call. The engine's thread writes; any other may take."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[KVEvent], object]] = []
        self._waiting: list[KVEvent] | None = None

    def __bool__(self) -> bool:
        """Somebody listens; if not, nobody need tell."""
        return self._waiting is not None or bool(self._listeners)

    def subscribe(self, listener: Callable[[KVEvent], object]) -> None:
        self._listeners.append(listener)

    def collect(self) -> None:
        """From now on keep events until they are taken."""
        self._waiting = []

    def tell(self, event: KVEvent) -> None:
        for listener in self._listeners:
            listener(event)
        if self._waiting is not None:
            if len(self._waiting) >= WAITING:  # nobody takes them: whoever comes later knows nothing of before
                self._waiting = [AllBlocksCleared()]
            self._waiting.append(event)

    def take(self) -> list[KVEvent]:
        """Those since the last call."""
        found = self._waiting or []
        if found:  # what is told meanwhile is in one list or in the other
            self._waiting = []
        return found


# ---- on the wire
def packed(events: Sequence[KVEvent], now: float | None = None) -> bytes:
    """A batch as MessagePack. vLLM's fields behind these (adapter, medium) are null. Raises UserError without the
    extra."""
    return bytes(_msgpack().packb([time.time() if now is None else now, [_plain(event) for event in events]]))


def unpacked(batch: bytes) -> list[KVEvent]:
    """The events of a batch. Fields that are not known are passed over, and so are events. Raises ValueError for what
    is no batch."""
    try:
        found = _msgpack().unpackb(batch, strict_map_key=False)
        return [event for plain in found[1] if (event := _event(plain)) is not None]
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"this is no batch of KV events: {error}") from error


def _plain(event: KVEvent) -> list[Any]:
    name = type(event).__name__
    if isinstance(event, BlockStored):
        hashes, parent, tokens, size = event
        return [name, list(hashes), parent, list(tokens), size, None, None, None]
    return [name, list(event.block_hashes), None] if isinstance(event, BlockRemoved) else [name]


def _event(plain: Sequence[Any]) -> KVEvent | None:
    match list(plain):
        case ["BlockStored", list(hashes), parent, list(tokens), int(size), *_] if size > 0:
            return BlockStored(hashes, parent, tokens, size)
        case ["BlockRemoved", list(hashes), *_]:
            return BlockRemoved(hashes)
        case ["AllBlocksCleared", *_]:
            return AllBlocksCleared()
    return None


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise UserError(f"KV events need the extra ({error}): pip install 'phasewise[kv-events]'") from error
    return msgpack
