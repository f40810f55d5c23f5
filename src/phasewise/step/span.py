"""Everything a request brings to one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.kv.cache import KV
    from phasewise.model.lowrank import Delta
    from phasewise.request.request import Request
    from phasewise.step.phase import Phase
    from phasewise.step.plan import AttentionPlan


@dataclass(slots=True, eq=False)
class Span:
    """Rows of one request in one step: a prompt slice, the last token, a draft tree, a block of masks.

    `sees` says which rows of the span a row may read: None = those up to the end of its block, else bool [rows, rows].
    Blocks are of `block` rows, counted from the span's first: of one row, it is causal (itself and those before); of no
    fewer than the span has, every row sees all. Committed cache rows at smaller positions are always visible, unless a
    method says otherwise.
    `first` rows of the same tree are in the KV already, uncommitted: rows that come in pieces, a forward each. They are
    the first of those that `sees` tells, bool [rows, first + rows].
    `layers` is a half-open range when only part of the depth runs now, which the schedule decides; then `hidden`
    [rows, d] and `taps` {layer: [rows, d]} carry the state from step to step, and the span object stays the same. A
    method whose rows the layers below have run before gives the rest, up to the last layer, with `hidden`, the rows
    that enter it; those layers hold them in the KV, uncommitted. Rows behind these may begin with that layer, if none
    of them is kept. It may give `hidden` instead of embedded tokens where
    the whole depth runs; `given` [rows, d] enters the first layer in their place whatever runs when. `beyond`: so many
    rows up to its last stand for no token, so that positions run ahead of tokens. `joins`: so many of its tokens have
    no row of their own, as they share that of the last of their group (`Request.groups`), whose position it has; then
    all of its rows are kept.
    `tuned`: low-rank weights that its rows from number `untuned` on run with, in place of `delta`; those before do not.
    `sure`: the last of its tokens, where they are not the request's yet and will be whatever the model says
    (`Sample.sure`). A token is drawn after the last of them alone.
    """

    request: Request
    kv: KV
    phase: Phase
    tokens: Sequence[int]
    positions: Sequence[int]
    sees: Tensor | None = None
    layers: tuple[int, int] | None = None
    hidden: Tensor | None = None
    taps: dict[int, Tensor] = field(default_factory=dict)
    note: Any = None  # the proposing method's own memory from `propose` to `accept`
    first: int = 0
    block: int = 1
    sure: tuple[int, ...] = ()
    given: Tensor | None = None
    beyond: int = 0
    joins: int = 0
    tuned: Delta | None = None
    untuned: int = 0
    trail: dict[str, Any] | None = None  # what methods make of its rows, until it is known which stay (step/trail.py)
    start: int = field(default=0, init=False)  # first row in the batch, filled by Batch
    rows: int = field(init=False)
    last: int = field(init=False)  # the largest position of its rows
    _plan: AttentionPlan | None = field(default=None, init=False, repr=False)
    _walk: tuple[int, ...] | None = field(default=(), init=False, repr=False)  # (): not asked yet

    def __post_init__(self) -> None:
        self.rows = len(self.tokens)
        positions = self.positions
        self.last = positions[-1] if isinstance(positions, range) else max(positions)
        if self.hidden is None:
            self.hidden = self.given

    @property
    def plan(self) -> AttentionPlan:
        """The attention plan of its rows, which the methods of its phase make."""
        if self._plan is None:
            self._plan = self.phase.plan(self)
        return self._plan

    @property
    def walk(self) -> tuple[int, ...] | None:
        """The layers that its rows run, where that is known beforehand (`walks`); None = all."""
        if self.layers is not None:
            return tuple(range(*self.layers))
        skip = self.phase.skip
        if skip is None:
            return None
        if self._walk == ():
            found = skip.walk_of(self)
            self._walk = None if found is None or len(found) == len(self.kv.layers) else found
        return self._walk

    @property
    def walks(self) -> bool:
        """True if all of its rows run the layers of `walk`."""
        skip = self.phase.skip
        return skip is None or skip.walk_of(self) is not None

    @property
    def delta(self) -> Delta | None:
        """Low-rank weights that its rows run with, but for those that have others (`tuned`): of a method of its phase,
        else of the request's adapter."""
        own = self.phase.delta
        return self.request.lora if own is None and self.phase.adapted else own

    @property
    def single(self) -> bool:
        """True for one row that sees all before it and runs its whole depth in this step."""
        return self.rows == 1 and self.sees is None and self.layers is None and not self.first

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.rows)

    def seen(self, rows: Tensor, ids: Tensor) -> Tensor:
        """True where the span's `rows` [R] see the rows `ids` [F] (those in the KV first): bool [R, F]."""
        if self.sees is not None:
            return self.sees.to(ids.device)[rows][:, ids]
        return ids[None, :] < (rows[:, None] // self.block + 1) * self.block + self.first

    @property
    def reaches_end(self) -> bool:
        """True if its last row is that of the request's last token, or of the last that is sure."""
        return self.end == self.request.known + len(self.sure)

    @property
    def end(self) -> int:
        """The number of tokens up to its last row."""
        return self.positions[-1] + 1 - self.beyond

    @property
    def finishes(self) -> bool:
        """True if this step takes the rows through the last layer."""
        return self.layers is None or self.layers[1] >= len(self.kv.layers)


def ancestors(parents: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Bool [n, n] on `device`: row i sees itself and its ancestors. `parents[i] < i`; -1 marks a root."""
    n = len(parents)
    sees = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees.to(device)


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of each node from its root (a root has depth 0)."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out
