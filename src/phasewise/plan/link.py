"""Links between workers: how long KV takes from one to another."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from phasewise.errors import UserError


@dataclass(frozen=True)
class Link:
    """A connection that carries KV: bytes per second, and seconds before the first of them is there."""

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise UserError(f"link={self.bandwidth:g} B/s carries nothing: give a bandwidth above 0")
        if not 0 <= self.latency < math.inf:
            raise UserError(f"link latency={self.latency:g} s must be a number of seconds of at least 0")

    def seconds(self, n_bytes: float) -> float:
        """The time that so many bytes occupy the link."""
        return n_bytes / self.bandwidth


LOCAL = Link()  # between workers that share a memory


class Network:
    """Links of the same kind at every worker. Transfers take the sender's and the receiver's, one after the other."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._out: defaultdict[str, float] = defaultdict(float)  # when a worker's link is free again, outwards ...
        self._into: defaultdict[str, float] = defaultdict(float)  # ... and inwards

    def send(self, source: str, target: str, n_bytes: float, now: float) -> float:
        """Start a transfer, or queue it. Returns when all of it will be there."""
        begins = max(now, self._out[source], self._into[target])
        self._out[source] = self._into[target] = over = begins + self.link.seconds(n_bytes)
        return over + self.link.latency
