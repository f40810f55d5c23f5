"""SIGHUP: the recipes and the keys are read again while requests are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from phasewise.errors import UserError
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.guard.policy import Reread
from phasewise.serve.service import Service

log = logging.getLogger(__name__)


class Reloader:
    """Reads what may change while a server runs; whatever is wrong with it stays as it was, and the log says why.

    `service`: whose recipes those are; None: a server of many models, where `recipes` are not read again.
    """

    def __init__(self, service: Service | None, keys: KeyRing | None, recipes: Callable[[], Reread] | None) -> None:
        self._service, self._keys, self._recipes = service, keys, recipes
        self._turn = asyncio.Lock()

    async def __call__(self) -> None:
        """The recipes, then the keys, which may name them; without any file there is nothing to read."""
        async with self._turn:
            if self._recipes is not None and self._service is not None:
                await self._revise(self._service, self._recipes)
            if self._keys is not None:
                self._keys.reload()

    async def _revise(self, service: Service, read: Callable[[], Reread]) -> None:
        try:
            found = await asyncio.to_thread(read)
            await service.revise(found.recipes)
        except UserError as error:
            log.error("the recipes stay as they were: %s", error)
        except Exception:  # of a method's own binding
            log.exception("the recipes stay as they were")
        else:
            log.warning("the recipes have been read again: %s", ", ".join(service.llm.recipes) or "none")
            if found.changed:
                log.warning("%s changed as well, and will count when the server starts again", ", ".join(found.changed))
