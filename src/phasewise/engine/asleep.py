"""A stand-in for an engine while its model's weights are not in memory."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from phasewise.request.counters import Counters
    from phasewise.request.request import Request
    from phasewise.verbs.place import Placed


class Asleep:
    """Idle, holds nothing, and remembers what had been counted; nothing can be added."""

    idle = True
    kv_bytes = prefix_bytes = lora_bytes = 0

    def __init__(self, engine: Placed) -> None:
        self.counters: Counters = copy.copy(engine.counters)
        self.by_recipe = engine.by_recipe
        self.by_role: dict[str, dict[str, int]] = {}
        self.workers: dict[str, int] = {}
        self.tiers: dict[str, float] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> NoReturn:
        raise AssertionError("the model is asleep: wake it first")

    def cancel(self, request: Request) -> bool:
        return False

    def step(self) -> list[Request]:
        return []

    def close(self) -> None:
        pass

    def forget(self, recipes: Collection[str]) -> None:
        pass  # what is woken has not learned them

    def wake(self, engine: Placed) -> None:
        """Have another engine go on counting."""
        for name, count in self.counters.as_dict().items():
            engine.counters.count(name, count)
