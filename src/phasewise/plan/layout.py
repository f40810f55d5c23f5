"""How many devices, and of which kind, a worker of each role takes: tensor and pipeline degrees per role."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phasewise.errors import UserError

Affinity = Literal["high", "low"]


@dataclass(frozen=True, order=True)
class Layout:
    """A worker of a role: `ways` devices share every layer (tensor parallelism), in each of `stages` stages (pipeline
    parallelism). `device` is their kind; empty: the kind of all roles."""

    role: str
    ways: int = 1
    stages: int = 1
    device: str = ""

    @property
    def devices(self) -> int:
        return self.ways * self.stages

    def __str__(self) -> str:
        return f"{self.role} on {self.ways}x{self.stages}{' ' * bool(self.device)}{self.device}"


def parse(text: str) -> tuple[Layout, ...]:
    """From ROLE=WAYSxSTAGES[@DEVICE],... such as prefill=4x1,decode=2x2. Raises UserError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)x([1-9]\d*)(?:@(\S+))?", part.strip())
        if match is None:
            raise UserError(f"{part!r} is no layout: write ROLE=WAYSxSTAGES[@DEVICE], such as prefill=4x1,decode=2x2")
        found.append(Layout(match[1], int(match[2]), int(match[3]), match[4] or ""))
    if len({one.role for one in found}) < len(found):
        raise UserError(f"layouts {text!r}: a role is named twice")
    return tuple(found)


def fits(workers: Sequence[Layout], node: int, affinity: Affinity) -> bool:
    """Whether workers can be put on nodes of `node` devices each (0: on one node that has all).

    The devices that share a layer lie in one node. With low affinity KV must not leave a node either: workers are cut
    into equal parts by their stages, and a node holds the same part of all (DistServe's second search,
    arXiv 2401.09670).
    """
    if not node:
        return True
    if any(one.ways > node for one in workers):
        return False
    if affinity == "high":
        return True
    parts = [k for k in range(1, min(one.stages for one in workers) + 1) if all(one.stages % k == 0 for one in workers)]
    return any(sum(one.devices for one in workers) // k <= node for k in parts)
