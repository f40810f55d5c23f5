"""The measured costs of forms of weights, by known model, which `scripts/weights_quality.py --write` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOUND = Path(__file__).with_name("forms.json")
Interval = tuple[float, float, float]
"""A mean, and the ends of its 95 % interval."""


@dataclass(frozen=True)
class FormCost:
    """The cost of one form beside the form that the checkpoint has. `nats`: more per token of held-out text.
    `points`: of 100 answers, how many more are right (fewer: negative); None where the model was asked nothing.
    `worse`: rows of `phasewise eval` that get worse by more than their own interval."""

    bits: float  # per weight, embeddings included
    nats: Interval
    points: Interval | None
    worse: tuple[str, ...]

    @property
    def lossy(self) -> bool:
        """True if text or answers get worse by more than the interval of the difference."""
        return self.nats[1] > 0 or (self.points is not None and self.points[2] < 0)

    def __str__(self) -> str:
        said = f"{self.nats[0]:+.4f} nats a token ({self.nats[1]:+.4f} to {self.nats[2]:+.4f})"
        if self.points is not None:
            said += f", {self.points[0]:+.1f} points of right answers ({self.points[1]:+.1f} to {self.points[2]:+.1f})"
        return f"{'lossy' if self.lossy else 'no loss found'}: {said}"


@dataclass(frozen=True)
class ModelForms:
    """The forms of one model. `reference`: the one that the others are compared with; `about`: machine and command."""

    reference: str
    about: str
    costs: dict[str, FormCost]


@cache
def measured() -> dict[str, ModelForms]:
    """The forms of every measured model, by its name."""
    said: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    return {
        name: ModelForms(each["reference"], each["about"], {form: _cost(cost) for form, cost in each["forms"].items()})
        for name, each in said.items()
    }


def _cost(said: dict[str, Any]) -> FormCost:
    points = said["points"]
    return FormCost(
        said["bits"], tuple(said["nats"]), None if points is None else tuple(points), tuple(said["worse"])
    )  # fmt: skip


def keep(name: str, forms: ModelForms) -> None:
    """Put a model's forms into the file, in the place of those that it had."""
    said: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    costs = {form: vars(cost) for form, cost in forms.costs.items()}
    said[name] = {"reference": forms.reference, "about": forms.about, "forms": costs}
    FOUND.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
