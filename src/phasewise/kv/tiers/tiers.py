"""Prefix blocks below the engine's budget: in memory beyond it, and in a folder on disk that outlives the process.

    computed ──► prefix cache (the budget) ──► memory ──► gone
        └──────────── written behind ────────► disk  ──► gone

A block is written to disk by a thread soon after it was computed, and once more offered where it falls out of the
budget or of memory and is not there. What the budget gives up goes to memory as it is. Both tiers keep within their
bytes by giving up what has not been used for longest.

A request whose prompt has blocks on disk waits until a thread has read them; all others go on meanwhile. Its own prompt
is not computed beside that, since rows attend to all rows before them. The engine's thread never reads or writes a
file, and never waits for one: writes beyond `PENDING` bytes are left out, and a request that has waited `PATIENCE`
seconds goes on with what is there.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phasewise.kv.tiers.block_file import DIGEST, BlockName
from phasewise.kv.tiers.codec import BlockCodec, BlockLayout, BlockPlanes
from phasewise.kv.tiers.folder import BlockFolder

log = logging.getLogger(__name__)
PENDING = 512 << 20  # bytes of blocks that wait to be written
STAGED = 256 << 20  # bytes of blocks that were read and wait for their request: no other load begins beyond that
PATIENCE = 10.0  # seconds
NICE = 10  # of the thread that writes, as of processes
FLUSH = 10.0  # seconds that blocks not written yet are given when an engine ends


@dataclass(slots=True)
class TierCounts:
    """What the tiers have done since start. Hits are blocks that requests took from there."""

    memory_hits: int = 0
    memory_evicted: int = 0
    disk_hits: int = 0
    writes_dropped: int = 0
    load_seconds: float = 0.0  # from a request's arrival until its blocks were there, of all loads
    loads: int = 0


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks of one request's prompt on their way from the disk, in the order of their rows."""

    space: TierSpace
    names: Sequence[BlockName]
    began: float
    got: dict[BlockName, BlockPlanes] = field(default_factory=dict)
    done: bool = False
    left: bool = False  # nobody waits for it any more

    @property
    def bytes(self) -> int:
        return len(self.got) * self.space.layout.bytes


@dataclass(frozen=True, slots=True, eq=False)
class TierSpace:
    """The blocks of one prefix tree in the tiers."""

    tiers: KVTiers
    name: bytes  # 16 bytes: what the rows mean, and the form in which they are written
    layout: BlockLayout
    codec: BlockCodec

    def block(self, key: bytes) -> BlockName:
        return BlockName(self.name, key)

    def made(self, key: bytes, planes: BlockPlanes) -> None:
        """The prefix cache has a new block."""
        self.tiers.offer(self, self.block(key), planes)

    def wants(self, key: bytes) -> bool:
        """True if a block would be kept that the tiers do not have."""
        return self.tiers.wants(self, self.block(key))

    def fallen(self, key: bytes, planes: BlockPlanes) -> None:
        """The budget has no more room for a block."""
        self.tiers.fall(self, self.block(key), planes)

    def fetch(self, request: str, keys: Sequence[bytes]) -> None:
        """Begin to load the blocks that follow what a request finds in the budget."""
        self.tiers.fetch(self, request, [self.block(key) for key in keys])

    def take(self, request: str, keys: Sequence[bytes]) -> list[BlockPlanes]:
        """The first of these blocks that are in memory or were loaded for the request. Its load is over then."""
        return self.tiers.take(request, [self.block(key) for key in keys])

    def use(self, keys: Sequence[bytes]) -> None:
        """A request has found these blocks in the budget."""
        self.tiers.use([self.block(key) for key in keys])


class KVTiers:
    """Both tiers of one engine. `memory`: bytes of the one in memory; 0: there is none.

    Public methods are the engine thread's. Two threads of its own read and write; the lock is never held while they do.
    """

    def __init__(self, memory: int, folder: BlockFolder | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.folder, self.counts = memory, folder, TierCounts()
        self._clock = clock
        self._kept: OrderedDict[BlockName, tuple[TierSpace, BlockPlanes]] = OrderedDict()
        self._bytes = 0
        self._writes: OrderedDict[BlockName, tuple[TierSpace, BlockPlanes]] = OrderedDict()
        self._pending = 0  # bytes of these
        self._loads: dict[str, BlockLoad] = {}
        self._queue: deque[BlockLoad] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._threads: list[threading.Thread] = []
        if folder is not None:
            for work in (self._read_all, self._write_all):
                self._threads.append(threading.Thread(target=work, name="kv tiers", daemon=True))
                self._threads[-1].start()
            atexit.register(self.close)  # of an engine that nobody closes

    def space(self, key: bytes, layout: BlockLayout, codec: BlockCodec) -> TierSpace:
        """The blocks of a prefix tree, `key` being its root's. They share a name with no other key, layout or form."""
        about = repr((key, layout, codec.form)).encode()
        return TierSpace(self, hashlib.blake2b(about, digest_size=DIGEST).digest(), layout, codec)

    # ---- blocks that come
    def offer(self, space: TierSpace, name: BlockName, planes: BlockPlanes) -> None:
        """Have a block written, unless it is there or too many wait. Its planes must stay as they are."""
        if self.folder is None or name in self.folder:
            return
        with self._changed:
            if name in self._writes:
                return
            if self._pending + space.layout.bytes > PENDING:
                self.counts.writes_dropped += 1
                return
            self._writes[name] = (space, planes)
            self._pending += space.layout.bytes
            self._changed.notify_all()

    def wants(self, space: TierSpace, name: BlockName) -> bool:
        """True if `fall` would keep a block that is not there yet."""
        if space.layout.bytes <= self.limit:
            return name not in self._kept
        return not self._lies(name) and self._pending + space.layout.bytes <= PENDING and self.folder is not None

    def fall(self, space: TierSpace, name: BlockName, planes: BlockPlanes) -> None:
        """Keep a block in memory, at the price of those that have not been used for longest."""
        size = space.layout.bytes
        if size > self.limit:
            self.offer(space, name, planes)
            return
        if name not in self._kept:
            self._kept[name] = (space, [[plane.cpu() for plane in layer] for layer in planes])
            self._bytes += size
        self._kept.move_to_end(name)
        while self._bytes > self.limit:
            gone, (owner, kept) = self._kept.popitem(last=False)
            self._bytes -= owner.layout.bytes
            self.counts.memory_evicted += 1
            self.offer(owner, gone, kept)

    # ---- blocks that are wanted
    def use(self, names: Sequence[BlockName]) -> None:
        """These blocks have been of use: later rows leave before earlier ones."""
        for name in reversed(names):
            if name in self._kept:
                self._kept.move_to_end(name)
        if self.folder is not None:
            self.folder.use(names)

    def fetch(self, space: TierSpace, request: str, names: Sequence[BlockName]) -> None:
        """Begin to load, for a request, what follows the blocks in memory and is on disk without a gap."""
        if self.folder is None:
            return
        start = next((at for at, name in enumerate(names) if name not in self._kept), len(names))
        stop = next((at for at in range(start, len(names)) if not self._lies(names[at])), len(names))
        if start < stop:
            load = BlockLoad(space, names[start:stop], self._clock())
            with self._changed:
                self._loads[request] = load
                self._queue.append(load)
                self._changed.notify_all()

    def _lies(self, name: BlockName) -> bool:
        """True if a block is on disk, or on its way there."""
        return self.folder is not None and (name in self.folder or name in self._writes)

    def loading(self, request: str) -> bool:
        """True while a request had better wait for its blocks."""
        load = self._loads.get(request)
        return load is not None and not load.done and self._clock() - load.began < PATIENCE

    def forget(self, request: str) -> None:
        """A request needs nothing any more."""
        if self._loads:
            self._over(request)

    def take(self, request: str, names: Sequence[BlockName]) -> list[BlockPlanes]:
        """See `TierSpace.take`."""
        load, found = self._over(request), list[BlockPlanes]()
        for name in names:
            if name in self._kept:
                found.append(self._kept[name][1])
                self.counts.memory_hits += 1
            elif load is not None and name in load.got:
                found.append(load.got[name])
                self.counts.disk_hits += 1
            else:
                break
        self.use(names[: len(found)])
        return found

    def _over(self, request: str) -> BlockLoad | None:
        with self._changed:
            load = self._loads.pop(request, None)
            if load is not None:
                load.left = True
                self.counts.loads += 1
                self.counts.load_seconds += self._clock() - load.began
                self._changed.notify_all()
        return load

    @property
    def busy(self) -> bool:
        """True while a load is under way."""
        return any(not load.done for load in self._loads.values())

    def wait(self, seconds: float) -> None:
        """Return when a load is complete, or after so long."""
        with self._changed:
            if self.busy:
                self._changed.wait(seconds)

    def numbers(self) -> Mapping[str, float]:
        """What metrics say of the tiers, by name; those that end in `_held` go down as well."""
        counts, folder = self.counts, self.folder
        found: dict[str, float] = {"memory_bytes_held": self._bytes, "memory_hits": counts.memory_hits,
                                   "memory_evicted": counts.memory_evicted}  # fmt: skip
        if folder is not None:
            found |= {
                "disk_bytes_held": folder.held, "disk_hits": counts.disk_hits, "disk_evicted": folder.counts.evicted,
                "disk_written_bytes": folder.counts.written_bytes, "disk_read_bytes": folder.counts.read_bytes,
                "disk_writes_dropped": counts.writes_dropped, "disk_write_errors": folder.counts.write_errors,
                "disk_refused": folder.counts.refused, "loads": counts.loads, "load_seconds": counts.load_seconds,
            }  # fmt: skip
        return found

    def close(self) -> None:
        """Write what waits and what is in memory, as far as `FLUSH` seconds allow, and leave the folder."""
        if self.folder is None or self._ends:
            return
        for name in reversed(list(self._kept)):
            self.offer(*self._kept_as_offer(name))
        with self._changed:
            self._changed.wait_for(lambda: not self._writes, FLUSH)
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(FLUSH)
        self.folder.close()
        atexit.unregister(self.close)

    def _kept_as_offer(self, name: BlockName) -> tuple[TierSpace, BlockName, BlockPlanes]:
        space, planes = self._kept[name]
        return space, name, planes

    # ---- the threads
    @torch.inference_mode()
    def _write_all(self) -> None:
        assert self.folder is not None
        with contextlib.suppress(AttributeError, OSError):  # steps come first; Linux has this for single threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            if not self._writes:
                self.folder.note()
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._ends)
                if self._ends:
                    return
                name, (space, planes) = next(iter(self._writes.items()))
            try:
                self.folder.write(name, list(space.codec.encode(planes)))
            except Exception:  # a codec that fails costs a block, and nothing else
                log.exception("a KV block could not be encoded")
                self.folder.counts.write_errors += 1
            with self._changed:
                del self._writes[name]
                self._pending -= space.layout.bytes
                self._changed.notify_all()

    @torch.inference_mode()
    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or (self._queue and self._staged() < STAGED))
                if self._ends:
                    return
                load = self._queue.popleft()
            try:
                self._read(load)
            except Exception:  # whatever happens, its request goes on
                log.exception("KV blocks could not be loaded")
            with self._changed:
                load.done = True
                self._changed.notify_all()

    def _staged(self) -> int:
        return sum(load.bytes for load in self._loads.values())

    def _read(self, load: BlockLoad) -> None:
        """Blocks one after another, until one is not there or nobody waits any more."""
        assert self.folder is not None
        pacer = load.space.codec.pacer()
        for at, name in enumerate(load.names):
            waits = self._writes.get(name)
            if load.left or self._ends:
                return
            if waits is not None and not load.space.codec.lossy:
                load.got[name] = waits[1]
                continue
            planes = self.folder.read(name, load.space.codec, pacer, len(load.names) - at)
            if planes is None:
                return
            load.got[name] = planes
