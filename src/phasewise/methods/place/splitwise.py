"""Prompt workers, token workers and a pool that borrows from both; KV flows while prompts run (Splitwise, 2311.18677).

Promises colocated's tokens: rows move as they are, or the KV moves whole, and draws depend on seed and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.cluster.phase_pools import PhasePools
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed, PlacementPlan, Placing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Splitwise(Method, Placing):
    """`prompt` and `token` workers, and `mixed` ones without another home, each with an equal part of the KV budget.

    A request gets two workers when it arrives: the prompt worker with the fewest pending tokens, and the token worker
    with the fewest tokens of the KV it reads, which keeps room for the whole prompt. The KV crosses while the prompt is
    computed, in the pieces that the scheduler makes of it: chunks, or groups of layers with `schedule=layered`; a
    prompt computed in one step crosses in one piece. A prompt worker that has something to do and would come to more
    than `threshold` pending tokens passes the prompt on to the mixed pool, which borrows token workers when it must. If
    no token worker has room, the request goes on in the mixed pool or stays with its prompt worker, which then belongs
    there. Workers are home again once nothing foreign is left to do.

    Every worker can do both, so borrowing moves nothing but a role. `schedule=splitwise` is the scheduler of the
    paper's machines. `phasewise plan` provisions them, and `phasewise simulate` runs this policy in virtual time.
    """

    prompt: int = 1
    token: int = 1
    mixed: int = 0
    threshold: int = 8192
    deadline: float = 10.0

    paper: ClassVar[str] = "arXiv 2311.18677"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("place", launches=True)
    tight: ClassVar[dict[str, object]] = {"prompt": 2, "token": 2, "threshold": 60}

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("token", 1), ("mixed", 0), ("threshold", 1)):
            if getattr(self, name) < least:
                raise UserError(f"splitwise: {name}={getattr(self, name)} must be at least {least}")
        if self.deadline <= 0.0:
            raise UserError(f"splitwise: deadline={self.deadline} must be positive (seconds)")

    @staticmethod
    def sizes(devices: int) -> list[str]:
        """Prompt and token workers in all numbers, beside a mixed pool of 0, 1, 2, 4, 8 ... workers."""
        pools = [0, *(1 << k for k in range(devices.bit_length()))]
        found = [
            (prompt, n - prompt, mixed)
            for mixed in pools for n in range(2, devices - mixed + 1) for prompt in range(1, n)
        ]  # fmt: skip
        return [
            f"prompt={prompt},token={token}" + (f",mixed={mixed}" if mixed else "")
            for prompt, token, mixed in sorted(found, key=sum)
        ]

    def policy(self, now: float, cores: Sequence[int]) -> PhasePools:
        return PhasePools(self.prompt, self.token, self.mixed, self.threshold)

    def build(self, plan: PlacementPlan) -> Placed:
        policy = self.policy(plan.clock(), ())
        front = plan.engine(("prefill", "decode"), policy.worker_specs()[0].share)
        return Router(plan.launcher(), policy, [front], plan.clock, Timeouts(handoff=self.deadline))
