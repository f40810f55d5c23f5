"""Both phases in one engine, sharing every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.place import Placed, Plan


@dataclass(frozen=True)
class Colocated:
    """One engine runs prompts and decoding."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def build(self, plan: Plan) -> Placed:
        return plan.engine(("prefill", "decode"), share=1.0)
