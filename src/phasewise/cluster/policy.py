"""Routing policies. They see numbers only, so that a policy can be tested without workers (DESIGN law 11).

The simulator (plan/simulated_cluster.py) runs the router that asks them. How many workers of each kind is the user's
choice, or that of `phasewise plan`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from phasewise.cluster.launcher import WorkerSpec


class WorkerView(Protocol):
    """A policy's view of a worker. `phasewise.cluster.handle.WorkerHandle` is one; tests bring their own."""

    @property
    def role(self) -> str: ...
    @property
    def prefilling(self) -> int:
        """Prompt tokens it was given and has not finished."""
        ...

    @property
    def decoding(self) -> int:
        """Tokens of the requests that generate there, or are on their way there."""
        ...

    def cached(self, tokens: Sequence[int]) -> int:
        """Tokens at the start of a prompt whose KV it has probably cached."""
        ...


class LiveWorkerView(WorkerView, Protocol):
    """A policy's view of a worker that it looks after."""

    @property
    def name(self) -> str: ...
    @property
    def quiet(self) -> bool:
        """It has answered its last command."""
        ...

    @property
    def state(self) -> Mapping[str, Any]:
        """Its last report of itself, in numbers; empty while it starts."""
        ...


S = TypeVar("S", bound=WorkerView)
T = TypeVar("T", bound=LiveWorkerView)


class Policy(Protocol):
    """A routing policy: it chooses where prompts start and where their requests go on."""

    def worker_specs(self) -> list[WorkerSpec]:
        """One spec per worker."""
        ...

    def start(self, tokens: Sequence[int], views: Sequence[S]) -> S:
        """The worker that computes this prompt. One that also decodes keeps the request to its end."""
        ...

    def go_on(self, tokens: int, views: Sequence[S]) -> S | None:
        """Returns the worker with room that takes over a request of so many tokens; None = wait."""
        ...


@runtime_checkable
class Pairing(Policy, Protocol):
    """A policy that may also choose where a request goes on before its prompt is computed, so that its KV can flow."""

    @property
    def push(self) -> bool:
        """It chooses a peer before the prompt is computed."""
        ...

    def reserve_peer(self, tokens: Sequence[int], start: S, views: Sequence[S]) -> S | None:
        """Returns the worker with room that goes on with a prompt computed at `start`. `start` itself: it stays there.
        None: the worker is chosen once the prompt is done."""
        ...


class Caller(Protocol):
    """A policy's view of a request. Times are seconds of the router's clock."""

    @property
    def id(self) -> str: ...
    @property
    def n_out(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def last_token(self) -> float | None: ...
    @property
    def left(self) -> object | None: ...


@runtime_checkable
class Adjusting(Policy, Protocol):
    """A policy that also looks after the workers while they run."""

    def adjust(
        self, views: Sequence[T], progressed: Sequence[Caller], callers: Iterable[Caller], now: float
    ) -> Iterable[tuple[T, dict[str, Any]]]:
        """After a step in which some requests `progressed` or left, of all `callers`: what to tell to whom."""
        ...


def least_pending(tokens: Sequence[int], views: Sequence[S]) -> S:
    """Join the shortest queue, counted in tokens still to be computed with this prompt's own, cached ones aside."""
    return min(views, key=lambda view: view.prefilling + len(tokens) - view.cached(tokens))


def least_decoding(views: Sequence[S]) -> S:
    """The worker whose requests read the least KV per step."""
    return min(views, key=lambda view: view.decoding)


def threads_each(workers: int) -> int:
    """Threads per worker, so that all together have about one per core of this machine."""
    return max(1, (os.cpu_count() or 1) // workers)


@dataclass(frozen=True)
class TwoPools:
    """Prefill workers and decode workers, `share` of the KV budget for the former (DistServe, arXiv 2401.09670).

    A prompt with at most `local` tokens to compute starts where it will decode, and so does every prompt while each
    prefill worker has more than `queue` tokens to do (conditional disaggregation). With `push` the decode worker is
    chosen when the prompt starts, if one has room.
    """

    prefill: int
    decode: int
    share: float
    local: int = 0
    queue: int = 1 << 30
    push: bool = False

    def worker_specs(self) -> list[WorkerSpec]:
        from phasewise.cluster.launcher import WorkerSpec  # with PyTorch, which no command line needs

        threads = threads_each(self.prefill + self.decode)
        prefill = WorkerSpec("prefill", ("prefill",), self.share / self.prefill, threads=threads)
        decode = WorkerSpec("decode", ("prefill", "decode"), (1.0 - self.share) / self.decode, threads=threads)
        return [prefill] * self.prefill + [decode] * self.decode

    def start(self, tokens: Sequence[int], views: Sequence[S]) -> S:
        decoders = [view for view in views if view.role == "decode"]
        prefillers = [view for view in views if view.role == "prefill"]
        if decoders:
            here = min(decoders, key=lambda view: (len(tokens) - view.cached(tokens), view.decoding))
            short = len(tokens) - here.cached(tokens) <= self.local
            if short or not prefillers or min(view.prefilling for view in prefillers) > self.queue:
                return here
        return least_pending(tokens, prefillers)

    def go_on(self, tokens: int, views: Sequence[S]) -> S | None:
        return least_decoding(views) if views else None

    def reserve_peer(self, tokens: Sequence[int], start: S, views: Sequence[S]) -> S | None:
        return start if start.role == "decode" else self.go_on(len(tokens), views)
