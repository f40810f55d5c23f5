"""Placements: engines made of engines, with the same verbs. Nothing above this line knows which one it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from phasewise.cluster.launcher import Launcher
    from phasewise.cluster.policy import Policy
    from phasewise.engine.engine import Engine
    from phasewise.kv.buffer import Ledger
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.request.params import Params
    from phasewise.request.request import Request


class Placing(ABC):
    """place: where does each phase run, and how does KV get there?"""

    @abstractmethod
    def build(self, plan: PlacementPlan) -> Placed:
        """An engine, or an engine made of engines, ready for requests."""

    def policy(self, now: float, cores: Sequence[int]) -> Policy | None:
        """Returns the policy of its workers, in numbers; `cores`: those of the machine, ids. A simulator asks the same
        policy. None: all runs in one engine."""
        return None

    @staticmethod
    def sizes(devices: int) -> Sequence[str] | None:
        """Knobs of all placements that so many devices, or fewer, can be workers of, smaller ones first. A planner
        tries them. None: it is no matter of devices."""
        return None


class Placed(Protocol):
    """An engine as the server, the offline API and other placements see it."""

    model: Model

    @property
    def counters(self) -> Counters:
        """Work done since start, by all engines together."""
        ...

    @property
    def idle(self) -> bool: ...
    @property
    def waiting(self) -> Sequence[Request]: ...
    @property
    def running(self) -> Sequence[Request]: ...
    @property
    def kv_bytes(self) -> int:
        """KV bytes in use now, prefix cache included."""
        ...

    @property
    def prefix_bytes(self) -> int:
        """The part of these bytes that the prefix cache holds."""
        ...

    @property
    def tiers(self) -> Mapping[str, float]:
        """Numbers of the tiers below the KV budget (kv/tiers/tiers.py: `numbers`); empty where there are none."""
        ...

    @property
    def lora_bytes(self) -> int:
        """The part of the KV budget that adapters take, in all engines together."""
        ...

    @property
    def workers(self) -> dict[str, int]:
        """The number of workers of each role that are alive and ready; empty if all runs in one engine."""
        ...

    @property
    def by_role(self) -> dict[str, dict[str, int]]:
        """The counters by the role of the workers; empty if all runs in one engine."""
        ...

    @property
    def by_worker(self) -> Mapping[str, Mapping[str, int]]:
        """The counters of the workers that are here, by their names; empty if all runs in one engine."""
        ...

    @property
    def by_recipe(self) -> dict[str, dict[str, int]]:
        """Those counters that belong to single requests, by their recipe."""
        ...

    def reach(self, recipe: str) -> int:
        """Returns the number of positions that a text may have with a recipe: the model's context, or more."""
        ...

    def prepare(self, params: Params, recipe: str) -> None:
        """Raise UserError if what `params` asks for cannot be honoured with a recipe. From any thread: what takes long
        is then done before a request is added."""
        ...

    def learn(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Recipes by name, each a method per verb, that requests may name from now on beside those there are: all or
        none. Raises UserError where they do not fit."""
        ...

    def forget(self, recipes: Collection[str]) -> None:
        """Requests name these recipes no more, which others than the engine's own are; those under way keep them. What
        they alone have, adapters and cached prompts, is freed behind the last."""
        ...

    def check(self, request: Request) -> None:
        """Raise UserError if the request can never run here, BudgetError where the KV budget is too small for it."""
        ...

    def add(self, request: Request) -> None: ...
    def cancel(self, request: Request) -> bool: ...
    def step(self) -> list[Request]: ...
    def forget_prefixes(self) -> None: ...
    def close(self) -> None:
        """Dismiss whatever runs elsewhere. Nothing can be added afterwards."""
        ...


class PlacementPlan(Protocol):
    """The plan that a placement builds from: a recipe bound to a model, from which engines for some phases can be
    made."""

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def budget(self) -> int:
        """Bytes of KV for all engines together."""
        ...

    @property
    def cores(self) -> Sequence[int]:
        """The cores that workers of this machine may use, by their ids."""
        ...

    def launcher(self) -> Launcher:
        """Returns the launcher, which starts workers where the user wants them."""
        ...

    def engine(self, phases: tuple[str, ...], share: float, ledger: Ledger | None = None) -> Engine:
        """A new engine for these phases with `share` of the KV budget, or with an account of its own in a pool."""
        ...
