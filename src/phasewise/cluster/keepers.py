"""Which worker has what a request left: whoever goes on from that KV starts there, where it can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from phasewise.cluster.handle import WorkerHandle
from phasewise.request.params import Params
from phasewise.request.request import Request

REMEMBERED = 4096  # requests that have finished; KV mostly goes sooner


class Keepers:
    """As far as the router knows: KV may have made way since, and then the worker computes the prompt."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, WorkerHandle] = OrderedDict()

    def finished(self, request: Request, decode: Any, handle: WorkerHandle) -> None:
        """It was `decode` that computed its prompt."""
        if not hasattr(decode, "follows"):
            return
        self._at[request.id] = handle
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)

    def find(self, request: Request, decode: Any, seated: Sequence[WorkerHandle]) -> WorkerHandle | None:
        """The worker that has what this request goes on from; None where nobody has, or it computes no prompts."""
        follows: Callable[[Params], str | None] | None = getattr(decode, "follows", None)
        name = None if follows is None else follows(request.params)
        handle = None if name is None else self._at.get(name)
        there = handle is not None and handle in seated and "prefill" in handle.spec.phases
        return handle if there else None
