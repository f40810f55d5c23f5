"""Three pools: prompt workers, token workers, and a mixed pool that borrows from both (arXiv 2311.18677)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.policy import S, WorkerView, least_decoding, threads_each


def pool(view: WorkerView) -> str:
    """Returns a worker's pool now: that of its role, or "mixed" as long as it has work foreign to it.

    So a borrowed worker goes home by itself once that is done, whatever dies or starts again in between.
    """
    role = view.role
    foreign = view.decoding if role == "prompt" else view.prefilling if role == "token" else 0
    return "mixed" if foreign else role


def of(views: Sequence[S], name: str) -> list[S]:
    """The workers of a pool. None but the mixed one has any of another role."""
    if name != "mixed":
        views = [view for view in views if view.role == name]
    return [view for view in views if pool(view) == name]


@dataclass(frozen=True)
class PhasePools:
    """`prompt` and `token` workers, and `mixed` ones that have no other home; all are alike but for the role.

    Prompts join the shortest queue of their pool, in tokens; a worker that has some to do takes no more than makes
    `threshold`. What it turns away goes to the mixed pool, then to a worker borrowed from the token pool. Where a
    request goes on is chosen at the same moment: the least loaded token worker with room, else a mixed one, else the
    worker of the prompt keeps it, so that nothing crosses. Borrowed workers keep their own work.
    """

    prompt: int
    token: int
    mixed: int = 0
    threshold: int = 8192

    push: ClassVar[bool] = True

    def worker_specs(self) -> list[WorkerSpec]:
        roles = ["prompt"] * self.prompt + ["token"] * self.token + ["mixed"] * self.mixed
        n = len(roles)
        return [WorkerSpec(role, ("prefill", "decode"), 1.0 / n, threads=threads_each(n)) for role in roles]

    def start(self, tokens: Sequence[int], views: Sequence[S]) -> S:
        def pending(view: S) -> int:
            return view.prefilling + len(tokens) - view.cached(tokens)

        for name in ("prompt", "mixed", "token"):
            there = of(views, name)
            best = min(there, key=lambda view: (pending(view), view.decoding)) if there else None
            if best is not None and (not best.prefilling or pending(best) <= self.threshold):
                return best
        return min(views, key=pending)

    def reserve_peer(self, tokens: Sequence[int], start: S, views: Sequence[S]) -> S:
        """Returns the worker with room that goes on with a prompt computed at `start`, or `start` itself."""
        near = of(views, "token")
        if pool(start) != "prompt" and start not in near:
            near.append(start)  # it decodes anyway
        found = near or of(views, "mixed")
        return min(found, key=lambda view: (view.decoding, view is not start)) if found else start

    def go_on(self, tokens: int, views: Sequence[S]) -> S | None:
        for name in ("token", "mixed", "prompt"):
            there = of(views, name)
            if there:
                return least_decoding(there)
        return None
