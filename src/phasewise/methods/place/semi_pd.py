"""Both phases on the same cores and one KV pool, apart but without copies (semi-PD, arXiv 2504.19867).

Promises colocated's tokens: KV is handed on as it lies, and draws depend on seed and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.cluster.core_split import Goals
from phasewise.cluster.router import Router
from phasewise.cluster.shared_pool_policy import SharedPoolPolicy
from phasewise.cluster.supervisor import Timeouts
from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed, PlacementPlan, Placing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SemiPD(Method, Placing):
    """One worker computes prompts, another one goes on with them: neither phase waits for the other's steps, and both
    spend the same budget. Decoding workers keep what their requests need to grow; prompts take the rest, and wait for
    more than that.

    Every `window` seconds, the time to the first token and the time per token are held against `slo_ttft` and
    `slo_tpot` (seconds, to be met by a share `attain` of the samples), each if there are `least` samples of it. If one
    target is missed and the other met, a core moves to the phase that misses it, at most once in `dwell` seconds; up to
    `steps` of them, if the curve through what was seen says that it takes so many. A split of the last `memory` windows
    is only gone back to if the phase that gives the core is expected to stay a share `margin` below its target. `cores`
    = how many to use, 0 = all. At one end of the scale prefill runs on all of them and decode on one, at the other end
    the other way round; on two cores these are the only splits besides one each.

    Wants `--cluster processes`; in one thread, the phases take turns and cores mean nothing. On GPUs the shares would
    be of multiprocessors, which is left out, as are several such pairs, and targets of single requests. A worker's
    share is changed between two of its steps; no worker is replaced for it, as it must be there.
    """

    slo_ttft: float = 1.0
    slo_tpot: float = 0.1
    attain: float = 0.9
    window: float = 2.0
    dwell: float = 5.0
    steps: int = 1
    least: int = 8
    margin: float = 0.1
    memory: int = 30
    cores: int = 0
    deadline: float = 10.0

    paper: ClassVar[str] = "arXiv 2504.19867"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("place", launches=True)
    tight: ClassVar[dict[str, object]] = {"slo_tpot": 1e-6, "window": 0.001, "dwell": 0.001}

    def __post_init__(self) -> None:
        for name in ("slo_ttft", "slo_tpot", "window", "deadline"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"semi_pd: {name}={getattr(self, name)} must be positive (seconds)")
        if not self.dwell >= 0.0:
            raise UserError(f"semi_pd: dwell={self.dwell} must not be negative (seconds)")
        if not 0.0 < self.attain <= 1.0:
            raise UserError(f"semi_pd: attain={self.attain} must lie above 0 and be at most 1, a share of the samples")
        for name in ("steps", "least", "memory"):
            if getattr(self, name) < 1:
                raise UserError(f"semi_pd: {name}={getattr(self, name)} must be at least 1")
        if not 0.0 <= self.margin < 1.0:
            raise UserError(f"semi_pd: margin={self.margin} must lie in [0, 1), a share of the target")
        if self.cores < 0:
            raise UserError(f"semi_pd: cores={self.cores} must not be negative (0 = all there are)")

    def policy(self, now: float, cores: Sequence[int]) -> SharedPoolPolicy:
        if self.cores > len(cores):
            raise UserError(f"semi_pd: cores={self.cores}, but its workers may use {len(cores)}: {list(cores)}")
        goals = Goals(
            self.slo_ttft, self.slo_tpot, self.attain, self.window, self.dwell,
            self.least, self.margin, self.memory, self.steps,
        )  # fmt: skip
        return SharedPoolPolicy(cores[: self.cores or None], goals, now)

    def build(self, plan: PlacementPlan) -> Placed:
        policy = self.policy(plan.clock(), plan.cores)
        fronts = [plan.engine(("prefill",), 1.0), plan.engine(("prefill", "decode"), 1.0)]
        return Router(plan.launcher(), policy, fronts, plan.clock, Timeouts(handoff=self.deadline))
