"""Several whole engines, each request in one of them: where its prefix is cached (Mooncake, arXiv 2407.00079).

Promises colocated's tokens: every engine computes its requests alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.cluster.prefix_routing import DECODING, PrefixRouting, Route, check_route
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed, PlacementPlan, Placing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Replicated(Method, Placing):
    """`workers` engines that compute whole requests, each with an equal part of the KV budget and a prefix cache of its
    own (data parallelism).

    `route=prefix` sends a request where the fewest tokens are to be computed before its first one comes: those that
    wait there, and its own prompt's but for what is probably cached there. A token under generation counts `weight` of
    one. `load` does the same without the caches, `turns` takes one worker after the other. No KV moves; a request whose
    worker dies starts again elsewhere. `phasewise simulate` and `plan` run the same policy, and `phasewise route` puts
    it before servers.
    """

    workers: int = 2
    route: Route = "prefix"
    weight: float = DECODING

    paper: ClassVar[str] = "arXiv 2407.00079"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("place", launches=True)
    tight: ClassVar[dict[str, object]] = {"workers": 3}

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"replicated: workers={self.workers} must be at least 1")
        try:
            check_route(self.route, self.weight)
        except UserError as error:
            raise UserError(f"replicated: {error}") from None

    @staticmethod
    def sizes(devices: int) -> list[str]:
        return [f"workers={n}" for n in range(2, devices + 1)]

    def policy(self, now: float, cores: Sequence[int]) -> PrefixRouting:
        return PrefixRouting(self.workers, self.route, self.weight)

    def build(self, plan: PlacementPlan) -> Placed:
        policy = self.policy(plan.clock(), ())
        front = plan.engine(("prefill", "decode"), 1.0 / self.workers)
        return Router(plan.launcher(), policy, [front], plan.clock, Timeouts())
