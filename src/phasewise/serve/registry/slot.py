"""One model of a registry: what it is, and whether it is in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from starlette.types import ASGIApp

from phasewise.request.params import SLO
from phasewise.serve.guard.policy import ServePolicy

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.serve.service import Service

POLICY = ServePolicy()
State = Literal["unloaded", "loading", "ready"]


@dataclass(frozen=True)
class ModelEntry:
    """A model that a registry may load. `weigh` fetches what is not here and says how many bytes its weights take;
    `kv_bytes` is its budget for KV, with what lies below it in memory, which counts as taken while it is loaded."""

    name: str
    load: Callable[[], LLM]
    weigh: Callable[[], int]
    kv_bytes: int
    recipes: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()  # adapters, which clients name like models
    kv_disk: str | None = None  # the folder below its KV budget
    pinned: bool = False  # loaded at the start, and never unloaded
    preload: bool = False  # loaded at the start
    idle_after: float | None = None  # seconds without requests after which it is unloaded; None: never
    policy: ServePolicy = POLICY
    slo: SLO | None = None

    @property
    def names(self) -> list[str]:
        """What clients call it and its adapters, by themselves and with each of its recipes."""
        own = (self.name, *self.loras)
        return [f"{name}@{recipe}" if recipe else name for name in own for recipe in ("", *self.recipes)]

    def parent(self, name: str) -> str | None:
        """The model whose adapter is called so; None of the model itself."""
        return self.name if name.partition("@")[0] in self.loras else None


@dataclass(eq=False)
class ModelSlot:
    """The state of one entry. While it is `ready`, `app` answers its requests."""

    entry: ModelEntry
    state: State = "unloaded"
    fraction: float = 0.0  # of its weights that are read, while it loads
    bytes: int = 0  # of weights and KV that are set aside for it
    under_way: int = 0  # requests that wait for it, or that it answers
    used: int = 0  # when it was last asked for, in requests of the registry
    service: Service | None = None
    app: ASGIApp | None = None
    failure: str | None = None  # why the last load failed
    failed_at: float = 0.0
    began: float = 0.0  # when the load under way began
    loads: int = 0
    failures: int = 0
    load_seconds: float = 0.0  # of all loads that succeeded
    evictions: Counter[str] = field(default_factory=Counter)  # by why: idle, memory, failed
    loading: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """True if somebody waits for it, or its engine still has requests."""
        return self.under_way > 0 or (self.service is not None and self.service.engine.live > 0)

    @property
    def broken(self) -> bool:
        """True if its engine has failed, so that only loading it again helps."""
        return self.service is not None and self.service.engine.failed is not None

    @property
    def progress(self) -> str:
        """How far its load has come, for people."""
        if not self.bytes:
            return "waiting for memory, or for another load"
        return f"{self.fraction:.0%} of its weights are read"
