"""Prompts on some workers, tokens on others, so that neither waits for the other (DistServe, arXiv 2401.09670).

Promises colocated's tokens: the KV moves as it is, evicted or quantised, and draws depend on seed and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.cluster.policy import TwoPools
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed, PlacementPlan, Placing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Disaggregated(Method, Placing):
    """`prefill` workers share `share` of the KV budget and compute prompts and first tokens, `decode` workers the rest.

    Decoding workers pull: a finished prompt waits in its worker's share of the budget until one of them has room, and
    so full decoding workers stop new prompts. Prompts go to the worker with the fewest pending tokens (a prompt counts
    whole until it is done), cached ones aside; those with at most `local` tokens to compute, and all while every
    prefill worker has more than `queue` tokens to do, start where they will decode (0 and none by default). A move of
    which nothing is heard for `deadline` seconds, or whose worker dies, is recomputed from tokens. How many
    workers of each kind is the user's choice; `phasewise plan` searches, and `phasewise bench goodput` measures.
    """

    prefill: int = 1
    decode: int = 1
    share: float = 0.5
    local: int = 0
    queue: int = 1 << 30
    deadline: float = 10.0
    transfer: Literal["pull", "push"] = "pull"

    paper: ClassVar[str] = "arXiv 2401.09670"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("place", launches=True)
    tight: ClassVar[dict[str, object]] = {"prefill": 2, "decode": 2, "local": 8}

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 1:
                raise UserError(f"disaggregated: {name}={getattr(self, name)} must be at least 1")
        for name in ("local", "queue"):
            if getattr(self, name) < 0:
                raise UserError(f"disaggregated: {name}={getattr(self, name)} must not be negative (tokens)")
        if not 0.0 < self.share < 1.0:
            raise UserError(f"disaggregated: share={self.share} must lie between 0 and 1, so that both sides have KV")
        if self.transfer not in ("pull", "push"):
            raise UserError(f"disaggregated: transfer={self.transfer!r}: choose pull or push")
        if self.deadline <= 0.0:
            raise UserError(f"disaggregated: deadline={self.deadline} must be positive (seconds)")

    @staticmethod
    def sizes(devices: int) -> list[str]:
        return [f"prefill={i},decode={n - i}" for n in range(2, devices + 1) for i in range(1, n)]

    def policy(self, now: float, cores: Sequence[int]) -> TwoPools:
        return TwoPools(self.prefill, self.decode, self.share, self.local, self.queue, self.transfer == "push")

    def build(self, plan: PlacementPlan) -> Placed:
        fronts = [
            plan.engine(("prefill",), self.share / self.prefill),
            plan.engine(("prefill", "decode"), (1.0 - self.share) / self.decode),
        ]
        policy = self.policy(plan.clock(), ())
        return Router(plan.launcher(), policy, fronts, plan.clock, Timeouts(handoff=self.deadline))
