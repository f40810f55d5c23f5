"""A specification from which another process builds the same engines: names and numbers, no objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from phasewise.engine.limits import Limits

if TYPE_CHECKING:
    from phasewise.verbs.place import PlacementPlan


@dataclass(frozen=True)
class EngineSpec:
    """A model by name and a method per verb as text, under limits; plain data as `asdict` gives it. `recipes`: the
    verbs that each recipe has of its own."""

    model: str
    limits: Limits
    dtype: str | None = None
    device: str = "cpu"
    verbs: Mapping[str, str | None] = field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    weights: str | None = None  # the form that weights are rounded into

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> EngineSpec:
        return cls(**{**plain, "limits": Limits(**plain["limits"])})


Build = Callable[[EngineSpec], "PlacementPlan"]
"""Loads the model of a spec and binds its methods. A function of a module, so that other processes find it by name."""
