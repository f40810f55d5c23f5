"""Both phases in one engine, sharing every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed, PlacementPlan, Placing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Colocated(Method, Placing):
    """One engine runs prompts and decoding."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("place")

    def build(self, plan: PlacementPlan) -> Placed:
        return plan.engine(("prefill", "decode"), share=1.0)
