"""KV affinity: a request that goes on from the KV of a finished one starts at the worker that has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from phasewise.cluster.handle import WorkerHandle
from phasewise.engine.runtime import Runtime
from phasewise.request.request import Request

REMEMBERED = 4096  # requests that have finished; KV mostly goes sooner


class KVAffinity:
    """Workers by the finished requests whose KV they retain. The KV may have been evicted since; then the worker
    computes the prompt."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, WorkerHandle] = OrderedDict()

    def finished(self, request: Request, runtime: Runtime, handle: WorkerHandle) -> None:
        """Note that a request has finished at a worker; `runtime` computed its prompt."""
        if not runtime.traits.retains_kv:
            return
        self._at[request.id] = handle
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)

    def find(self, request: Request, runtime: Runtime, seated: Sequence[WorkerHandle]) -> WorkerHandle | None:
        """The worker that has what this request goes on from; None where nobody has, or it computes no prompts."""
        name = runtime.phases[0].decode.follows(request.params) if runtime.traits.retains_kv else None
        handle = None if name is None else self._at.get(name)
        there = handle is not None and handle in seated and "prefill" in handle.spec.phases
        return handle if there else None
