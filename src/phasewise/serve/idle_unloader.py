"""Sleep: after a while without requests the weights leave memory, and the next request has them loaded again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.failures import Unavailable, without_paths
from phasewise.serve.loop import EngineLoop

log = logging.getLogger(__name__)


class IdleUnloader(Collector):
    """Told of every request that comes and goes. `after`: seconds without any; None: the model never sleeps.

    Loading happens in the engine's thread; requests wait for it, and requests under way keep it from sleeping. Raises
    UserError where there are workers, whose weights are in other processes.
    """

    def __init__(self, llm: LLM, engine: EngineLoop, after: float | None) -> None:
        if after is not None and llm.engine.workers:
            raise UserError("--sleep-after is for a model in one process: leave it out, or the placement with workers")
        self._llm, self._engine, self._after = llm, engine, after
        self.asleep = False
        self._under_way = self._naps = 0
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._nap: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """A request comes."""
        self._under_way += 1
        if self._timer is not None:
            self._timer.cancel()

    def leave(self) -> None:
        """It is answered, or nobody waits for it any more."""
        self._under_way -= 1
        self.rest()

    def rest(self) -> None:
        """Count the seconds from now, if nobody asks for anything."""
        if self._after is not None and not self._under_way:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._after, self._lie_down)

    async def awake(self) -> None:
        """Return once the model can be asked. Raises Unavailable if it cannot be loaded any more."""
        if self._after is None:
            return
        async with self._turn:
            if not self.asleep:
                return
            try:
                await self._engine.between(self._wake)
            except Exception as error:
                log.exception("the model cannot be loaded again")
                raise Unavailable(f"the model cannot be loaded again: {without_paths(str(error))}") from error
            self.asleep = False

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("phasewise_asleep", "1 while the weights are not in memory", int(self.asleep))
        yield CounterMetricFamily("phasewise_naps", "How often the model was put to sleep", self._naps)

    def close(self) -> None:
        """The server ends."""
        self._after = None
        if self._timer is not None:
            self._timer.cancel()

    def _lie_down(self) -> None:
        self._nap = asyncio.create_task(self._sleep())

    async def _sleep(self) -> None:
        async with self._turn:
            if self._under_way or self.asleep or self._engine.failed is not None:
                return
            if self._engine.live:  # nobody waits for it any more, but it is not dropped yet
                self.rest()
                return
            await self._engine.between(self._doze)
            self.asleep, self._naps = True, self._naps + 1

    # ---- in the engine's thread
    def _doze(self) -> None:
        self._engine.drive(None)  # which held the last of it
        try:
            self._llm.sleep()
        finally:
            self._engine.drive(self._llm.engine)

    def _wake(self) -> None:
        self._llm.wake()
        self._engine.drive(self._llm.engine)
