"""Nothing is ever given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Nothing(Method):
    """Keep every row."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("evict")

    def bind(self, host: Host) -> None:
        return None  # no evictor at all: the plain way costs nothing
