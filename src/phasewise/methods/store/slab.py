"""KV as the model made it, in one slab per request and layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.kv.format import Raw, RowFormat
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SlabStore(Method, Storing):
    """Rows in the model's own dtype."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("store")

    def format(self) -> RowFormat:
        return Raw()
