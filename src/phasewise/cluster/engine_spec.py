"""What another process needs to build the same engines: names and numbers, no objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.engine.limits import Limits
    from phasewise.recipe import Builder


@dataclass(frozen=True)
class EngineSpec:
    """A model by name and a method per verb as text, under limits; plain data as `asdict` gives it."""

    model: str
    limits: Limits
    dtype: str | None = None
    device: str = "cpu"
    verbs: Mapping[str, str | None] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> EngineSpec:
        from phasewise.engine.limits import Limits

        return cls(**{**plain, "limits": Limits(**plain["limits"])})

    def build(self) -> Builder:
        """Load the model and bind the methods. Raises UserError naming what does not fit."""
        from phasewise.load import dtype_of, load_model
        from phasewise.model.model import Model
        from phasewise.options import parse
        from phasewise.recipe import Builder

        def load(name: str) -> Model:
            return load_model(name, dtype=model.dtype, device=self.device)

        model = load_model(self.model, dtype=dtype_of(self.dtype), device=self.device)
        return Builder(model, parse(self.verbs), self.limits, load=load, source=self)
