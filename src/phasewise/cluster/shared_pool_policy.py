"""One prefill worker and one decode worker on the same cores and the same KV pool (arXiv 2504.19867)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from phasewise.cluster.core_split import CoreSplit, Goals, Split, ladder
from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.policy import Caller, S, T, least_decoding, least_pending


class SharedPoolPolicy:
    """Prompts start at one worker and go on at the other; cores follow the targets, and unused prefixes make way."""

    def __init__(self, cores: Sequence[int], goals: Goals, now: float) -> None:
        self.shares = CoreSplit(ladder(cores), goals, now)
        self._start = self.shares.split
        self._told: dict[str, Split] = {}  # by worker
        self._asked: dict[str, tuple[int, ...]] = {}  # when a worker was last asked for memory, it was like this
        self._last: dict[str, tuple[int, float]] = {}  # by request: tokens, and when the last of them came

    # ---- where requests run
    def worker_specs(self) -> list[WorkerSpec]:
        split = self._start
        phases = {"prefill": ("prefill",), "decode": ("prefill", "decode")}
        return [
            WorkerSpec(role, phases[role], 1.0, split.cores(role), len(split.cores(role)), pooled=True)
            for role in phases
        ]

    def start(self, tokens: Sequence[int], views: Sequence[S]) -> S:
        return least_pending(tokens, [view for view in views if view.role == "prefill"])

    def go_on(self, tokens: int, views: Sequence[S]) -> S | None:
        return least_decoding(views) if views else None

    # ---- while they run
    def adjust(
        self, views: Sequence[T], progressed: Sequence[Caller], callers: Iterable[Caller], now: float
    ) -> Iterator[tuple[T, dict[str, Any]]]:
        for caller in progressed:
            self._sample(caller)
        if self.shares.due(now):
            self.shares.decide(now, [caller.arrived for caller in callers if caller.first_token is None])
        for view in views:
            split = self.shares.split
            if view.state and self._told.get(view.name, self._start) != split:
                self._told[view.name] = split
                cores = split.cores(view.role)
                yield view, {"do": "cores", "cores": list(cores), "threads": len(cores)}
        yield from self._spare(views)

    def _sample(self, caller: Caller) -> None:
        """Note how long the caller waited for what it got in this step."""
        known = self._last.pop(caller.id, None)
        if caller.first_token is None or caller.last_token is None:
            return
        if known is None:
            self.shares.first(caller.arrived, caller.first_token)
        elif caller.n_out > known[0]:
            self.shares.token((caller.last_token - known[1]) / (caller.n_out - known[0]))
        if caller.left is None:
            self._last[caller.id] = caller.n_out, caller.last_token

    def _spare(self, views: Sequence[T]) -> Iterator[tuple[T, dict[str, Any]]]:
        """Ask workers to drop unused prefixes where another worker is short of memory."""
        for short in views:
            wish = short.state.get("wish", 0)
            for view in views:
                state = view.state
                if not wish or view is short or not view.quiet or not state.get("prefix_bytes"):
                    continue
                now = wish, state["prefix_bytes"], state["running"], state["counters"]["steps"]
                if self._asked.get(view.name) != now:
                    self._asked[view.name] = now
                    yield view, {"do": "spare", "bytes": wish}


def cores_here() -> list[int]:
    """The cores that this process may run on, ids."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
