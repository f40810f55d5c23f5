"""Drafting in `phasewise simulate` and `phasewise plan`: depth, acceptance and the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.plan.drafts import Drafts

DEPTHS = "0,1,2,4,8"
DRAFTER = "prompt_lookup"


@dataclass(frozen=True)
class Guesses:
    """The values of `--accept`, `--draft-ms` and `--depths`."""

    accept: float | None
    draft_ms: float
    depths: str | None

    def drafts(self, depth: int, seed: int) -> Drafts:
        """Drafts of `depth` guesses a step. Raises UserError if their acceptance is not given."""
        from phasewise.plan.drafts import Drafts

        if depth and self.accept is None:
            raise UserError(f"{depth} guesses a step need --accept, the probability that one is accepted, such as 0.6")
        return Drafts(depth, self.accept or 0.0, self.draft_ms / 1e3, seed)

    def several(self) -> list[int]:
        """The depths to try. Raises UserError."""
        text = self.depths or ("0" if self.accept is None else DEPTHS)
        found = [int(part) for part in text.split(",") if part.strip().isdigit()]
        if not found or len(found) < len(text.split(",")):
            raise UserError(f"depths={text!r}: write numbers of guesses, such as {DEPTHS}")
        self.drafts(max(found), 0)
        return found

    def one(self) -> int:
        """The one depth to simulate. Raises UserError."""
        found = self.several() if self.depths is not None else [0]
        if len(found) > 1:
            raise UserError(f"depths={self.depths!r}: a simulation takes one number of guesses")
        if not found[0] and self.accept is not None:
            raise UserError("--accept is the acceptance of guesses, and --depths is 0: add --depths 4")
        return found[0]


def drafter(text: str, depth: int) -> str:
    """A drafter at a depth, as `serve --draft` takes it. Raises UserError for one without the knob `k`."""
    from phasewise import catalog

    name = catalog.split(text, "draft")[0]
    if "k" not in getattr(catalog.method("draft", name), "__dataclass_fields__", {}):
        raise UserError(f"draft={name!r} has no knob k, the guesses a step: take {DRAFTER} or another that has")
    found = f"{text}{',' if ':' in text else ':'}k={depth}"
    catalog.build("draft", found)
    return found
