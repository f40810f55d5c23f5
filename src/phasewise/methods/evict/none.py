"""Nothing is ever given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.host import Host


@dataclass(frozen=True)
class Nothing:
    """Keep every row."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def bind(self, host: Host) -> None:
        return None  # no evictor at all: the plain way costs nothing
