"""Options of `phasewise simulate` and `phasewise plan` on guesses: how many, and how many of them hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.plan.drafts import Drafts

DEPTHS = "0,1,2,4,8"
DRAFTER = "prompt_lookup"


@dataclass(frozen=True)
class Guesses:
    """How good guesses are."""

    accept: Annotated[
        float | None,
        typer.Option(help="The chance that a guess holds where all before it do, from 0 to 1: decodes bring guesses."),
    ] = None
    draft_ms: Annotated[float, typer.Option(min=0.0, help="The drafter's milliseconds per guess; 0: it copies.")] = 0.0

    def drafts(self, depth: int, seed: int) -> Drafts:
        """Raises UserError for guesses of which nothing is known."""
        from phasewise.plan.drafts import Drafts

        if depth and self.accept is None:
            raise UserError(f"{depth} guesses a step need --accept: the chance that one holds, such as 0.6")
        return Drafts(depth, self.accept or 0.0, self.draft_ms / 1e3, seed)


@dataclass(frozen=True)
class Depths:
    """How many guesses are tried, and by whom."""

    depths: Annotated[
        str | None, typer.Option(metavar="N,...", help=f"Guesses a step to try. Default with --accept: {DEPTHS}.")
    ] = None
    draft: Annotated[str, typer.Option(metavar="METHOD", help="Who guesses, for the file; one with a knob `k`.")] = (
        DRAFTER
    )

    def tried(self, guesses: Guesses) -> list[int]:
        """Raises UserError."""
        text = self.depths or ("0" if guesses.accept is None else DEPTHS)
        found = [int(part) for part in text.split(",") if part.strip().isdigit()]
        if not found or len(found) < len(text.split(",")):
            raise UserError(f"depths={text!r}: write numbers of guesses, such as {DEPTHS}")
        for depth in found:
            if depth:
                guesses.drafts(depth, 0)
                self.method(depth)
        return found

    def method(self, depth: int) -> str:
        """The drafter at a depth, as `serve --draft` takes it. Raises UserError for one that cannot be told."""
        from phasewise import catalog

        name = catalog.split(self.draft, "draft")[0]
        if "k" not in getattr(catalog.method("draft", name), "__dataclass_fields__", {}):
            raise UserError(f"draft={name!r} has no knob k, the guesses a step: take {DRAFTER} or another that has")
        text = f"{self.draft}{',' if ':' in self.draft else ':'}k={depth}"
        catalog.build("draft", text)
        return text


GUESSES, DEPTHS_TRIED = Guesses(), Depths()
