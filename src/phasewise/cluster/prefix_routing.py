"""Routing among workers, or servers, that can all do the same: by what each has cached, and what it has to do.

A placement asks it for workers, in the simulator too, and `phasewise route` for servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from phasewise.cluster.policy import S, least_decoding, threads_each
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.cluster.launcher import WorkerSpec

Route = Literal["prefix", "load", "turns"]
ROUTES: tuple[Route, ...] = get_args(Route)
DECODING = 0.1  # of a prompt's token: what a token under generation there costs


def check_route(route: str, weight: float) -> None:
    """Raise UserError for a rule that there is not, and for a weight that is none."""
    if route not in ROUTES:
        raise UserError(f"route={route!r} is not known: choose one of {', '.join(ROUTES)}")
    if not 0.0 <= weight < float("inf"):
        raise UserError(f"weight={weight} must be a number that is not negative (of a prompt's token)")


@dataclass
class PrefixRouting:
    """Chooses among `workers` replicas, as Mooncake's cache-aware scheduler does (arXiv 2407.00079), but in tokens
    where that estimates seconds.

    `prefix`: where the fewest tokens are to be computed before the first token comes, those that wait there included
    and cached ones aside, plus `weight` times the tokens of the requests that generate there. `load`: the same as if
    nothing were cached. `turns`: one after the other. Among equals it goes by turns.
    """

    workers: int
    route: Route = "prefix"
    weight: float = DECODING
    turn: int = field(default=0, init=False)

    def worker_specs(self) -> list[WorkerSpec]:
        from phasewise.cluster.launcher import WorkerSpec  # with PyTorch, which no command line needs

        threads = threads_each(self.workers)
        return [WorkerSpec("replica", ("prefill", "decode"), 1.0 / self.workers, threads=threads)] * self.workers

    def start(self, tokens: Sequence[int], views: Sequence[S]) -> S:
        return self.ranked(tokens, views)[0]

    def ranked(self, tokens: Sequence[int], views: Sequence[S]) -> list[S]:
        """All of them, the best one first. Whoever asks takes a turn."""
        first, self.turn = self.turn % max(1, len(views)), self.turn + 1
        turns = [*views[first:], *views[:first]]
        return turns if self.route == "turns" else sorted(turns, key=lambda view: self.cost(tokens, view))

    def cost(self, tokens: Sequence[int], view: S) -> float:
        """The prompt tokens that stand before this prompt's first token, and how much it disturbs."""
        cached = view.cached(tokens) if self.route == "prefix" else 0
        return view.prefilling + len(tokens) - cached + self.weight * view.decoding

    def go_on(self, tokens: int, views: Sequence[S]) -> S | None:
        return least_decoding(views) if views else None
