"""A registry of models under one budget of memory.

Each model is an engine of its own in this process, with its thread, its methods and its KV. One process is the simplest
that works: keys, limits, logs and metrics have one place, streams are written straight to the socket, and unloading
gives the memory back, since weights are mapped or packed into blocks that go with their model. A model whose placement
has workers (`--place`) has them in processes of their own, as always.

Loads go one after another, so that each has its own block of packed weights and the whole machine's attention.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from phasewise.errors import UserError, near
from phasewise.llm import LLM
from phasewise.model.source import forget
from phasewise.model.weights import LOADING
from phasewise.ops.native.room import let_go
from phasewise.serve.failures import SHUTDOWN, ApiError, without_paths
from phasewise.serve.registry.slot import ModelEntry, ModelSlot
from phasewise.serve.responses.endpoint import Stored
from phasewise.serve.service import Service

log = logging.getLogger(__name__)
AGAIN = 5.0  # seconds for which a load that failed is not tried again
LOOK = 0.2  # seconds after which it is looked again whether a model can make way


class ModelRegistry:
    """Models by name. `limit`: bytes that weights and KV budgets of all loaded ones may take together. `app_of` makes
    the application that answers for a service. Raises UserError for entries that can never be served together.

    All methods are for the event loop.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], limit: int, app_of: Callable[[Service], ASGIApp], stored: Stored
    ) -> None:
        if not entries:
            raise UserError("there is no model to serve: name at least one")
        self.limit, self._app_of, self.stored = limit, app_of, stored
        self.slots = {entry.name: ModelSlot(entry) for entry in entries}
        self.names = _names(entries)
        _check_folders(entries)
        self._pinned_fit(entries)
        self._turn = asyncio.Lock()  # of whoever loads or unloads
        self._changed = asyncio.Event()
        self._clock = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = False

    def start(self) -> None:
        """Begin to load what is to be there from the start."""
        for slot in self.slots.values():
            if slot.entry.pinned or slot.entry.preload:
                self.begin(slot)

    async def stop(self) -> None:
        """All is over."""
        for task in [*self._tasks, *(slot.loading for slot in self.slots.values() if slot.loading)]:
            task.cancel()
        for slot in self.slots.values():
            if slot.timer is not None:
                slot.timer.cancel()
            if slot.service is not None:
                await asyncio.to_thread(_close, slot.service)

    def slot(self, name: str | None) -> ModelSlot:
        """The model that a request names; the first one if it names none. Raises ApiError 404."""
        if name is None:
            return next(iter(self.slots.values()))
        if name not in self.names:
            raise ApiError(404, f"there is no model {name!r}; {near(name, self.names)}", "model", "model_not_found")
        return self.slots[self.names[name]]

    @asynccontextmanager
    async def using(self, slot: ModelSlot) -> AsyncIterator[None]:
        """While inside, the model stays where it is, or is waited for."""
        slot.under_way += 1
        self._clock += 1
        slot.used = self._clock
        if slot.timer is not None:
            slot.timer.cancel()
        try:
            yield
        finally:
            slot.under_way -= 1
            self._rest(slot)
            self._changed.set()

    def begin(self, slot: ModelSlot) -> asyncio.Task[None]:
        """The load of a model: the one under way, or a new one. It raises nothing; `slot.state` and `slot.failure` say
        what came of it."""
        if slot.loading is None or slot.loading.done():
            slot.loading = asyncio.create_task(self._load(slot))
        return slot.loading

    def refuse_failed(self, slot: ModelSlot) -> None:
        """Raise ApiError 503 if a load has failed a moment ago."""
        since = time.monotonic() - slot.failed_at
        if slot.state == "unloaded" and slot.failure is not None and since < AGAIN:
            raise ApiError(503, f"the model {slot.entry.name!r} cannot be loaded: {slot.failure}", "model",
                           "model_load_failed", retry=AGAIN - since)  # fmt: skip

    # ---- inside
    def _pinned_fit(self, entries: Sequence[ModelEntry]) -> None:
        """Raise UserError where the KV budgets of pinned models, and any other one beside them, are too large."""
        pinned = sum(entry.kv_bytes for entry in entries if entry.pinned)
        for entry in entries:
            need = pinned if entry.pinned else pinned + entry.kv_bytes
            if need > self.limit:
                raise UserError(
                    f"model {entry.name!r} does not fit: KV budgets of {need:,} bytes, with those of pinned ones, are "
                    f"more than --models-memory ({self.limit:,}): give it a smaller kv-bytes"
                )

    async def _load(self, slot: ModelSlot) -> None:
        entry, slot.state, slot.fraction, slot.began = slot.entry, "loading", 0.0, time.monotonic()
        try:
            async with self._turn:
                if slot.service is not None:  # whose engine has failed
                    await self._unload(slot, "failed")
                    slot.state = "loading"
                await self._room(slot, await asyncio.to_thread(entry.weigh) + entry.kv_bytes)
                began = time.monotonic()
                llm = await asyncio.to_thread(self._read, slot)
                try:
                    slot.service = Service(llm, entry.name, entry.policy, entry.slo, self.stored)
                except BaseException:
                    llm.close()
                    raise
                slot.bytes = llm.model.weight_bytes + llm.limits.budget + llm.limits.kv_host
                slot.app = self._app_of(slot.service)
                slot.service.start()
        except asyncio.CancelledError:
            slot.state, slot.bytes = "unloaded", 0
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("the model %s could not be loaded", entry.name)
            else:
                log.warning("the model %s could not be loaded: %s", entry.name, error)
            slot.state, slot.bytes, slot.failures = "unloaded", 0, slot.failures + 1
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            slot.failure, slot.failed_at = without_paths(said), time.monotonic()
        else:
            slot.state, slot.failure, slot.loads = "ready", None, slot.loads + 1
            slot.load_seconds += time.monotonic() - began
            self._rest(slot)
        self._changed.set()

    def _read(self, slot: ModelSlot) -> LLM:
        """In a thread: load it, and note how far it is."""

        def told(fraction: float) -> None:
            if self.stopping:
                raise UserError(SHUTDOWN)  # nobody waits for the rest of it
            slot.fraction = max(slot.fraction, fraction)  # a second model's weights begin at 0 again

        _collect()  # what a load that failed has left; and what is packed now shares no block with other models
        entered = LOADING.set(told)
        try:
            return slot.entry.load()
        finally:
            LOADING.reset(entered)

    async def _room(self, slot: ModelSlot, need: int) -> None:
        """Set bytes aside for a model, at the price of those that were not asked for the longest. Waits while all that
        could make way are busy. Raises UserError if it can never fit."""
        pinned = sum(other.bytes for other in self.slots.values() if other.entry.pinned and other is not slot)
        if need > self.limit - pinned:
            raise UserError(
                f"it needs {need:,} bytes for weights and KV, and --models-memory leaves {self.limit - pinned:,}: "
                "raise it, or give the model a smaller kv-bytes"
            )
        while need > self.limit - sum(other.bytes for other in self.slots.values()):
            idle = [other for other in self.slots.values() if other.state == "ready" and not other.entry.pinned]
            idle = sorted((other for other in idle if not other.busy), key=lambda other: other.used)
            if idle:
                await self._unload(idle[0], "memory")
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK):  # engines drop what was cancelled without telling
                    await self._changed.wait()
            except TimeoutError:
                continue
        slot.bytes = need

    async def _unload(self, slot: ModelSlot, why: str) -> None:
        """Give its memory back. Only by whoever has the turn."""
        service, slot.service, slot.app, slot.state = slot.service, None, None, "unloaded"
        slot.evictions[why] += 1
        log.info("unloading %s (%s)", slot.entry.name, why)
        assert service is not None
        service.close()  # whoever listens to its events is told
        await asyncio.to_thread(_close, service)
        del service
        await asyncio.to_thread(_collect)
        slot.bytes = 0

    def _rest(self, slot: ModelSlot) -> None:
        """Count the seconds until an idle model is unloaded."""
        after = slot.entry.idle_after
        if slot.timer is not None:
            slot.timer.cancel()
        if after is not None and not slot.entry.pinned and slot.state == "ready" and not slot.under_way:
            slot.timer = asyncio.get_running_loop().call_later(after, self._retire, slot)

    def _retire(self, slot: ModelSlot) -> None:
        async def retire() -> None:
            async with self._turn:
                if slot.state == "ready" and not slot.busy:
                    await self._unload(slot, "idle")
                elif slot.state == "ready":
                    self._rest(slot)

        task = asyncio.create_task(retire())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _names(entries: Sequence[ModelEntry]) -> dict[str, str]:
    """{what clients say: the model that is meant}. Raises UserError where that is not one."""
    found: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if name in found:
                raise UserError(
                    f"{name!r} is said twice, of {found[name]!r} and of {entry.name!r}: models and adapters need a "
                    "name each"
                )
            found[name] = entry.name
    return found


def _check_folders(entries: Sequence[ModelEntry]) -> None:
    """Raise UserError where two models would write prefix blocks into one folder."""
    owners: dict[str, str] = {}
    for entry in entries:
        if entry.kv_disk is not None and owners.setdefault(entry.kv_disk, entry.name) != entry.name:
            raise UserError(
                f"models {owners[entry.kv_disk]!r} and {entry.name!r} have the same --kv-disk, {entry.kv_disk}: give "
                'each its own in the file of models, as kv-disk = "DIR:SIZE", or leave --kv-disk out'
            )


def _close(service: Service) -> None:
    service.stop()
    service.llm.close()


def _collect() -> None:
    """What a model leaves behind are circles and mapped files."""
    forget()
    gc.collect()
    let_go()
