"""Every layer runs for every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class All(Method):
    """Full depth."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("skip")

    def bind(self, host: Host) -> None:
        return None  # no skipping at all: the plain way costs nothing
