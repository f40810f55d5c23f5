"""The seams: what a method of each verb has to offer, and the Phase that holds one of each.

A method is a frozen dataclass of knobs (see catalog.py). If it needs the model or any state, it has
`bind(host) -> runtime object`; otherwise it is its own runtime. The protocols below describe the runtimes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.batch import Span
    from phasewise.companion import Companion
    from phasewise.model.model import Model
    from phasewise.read import Read, View
    from phasewise.request import Request
    from phasewise.sampling import Sample
    from phasewise.trace import Counters


@dataclass(slots=True)
class Hidden:
    """What a forward leaves behind: `x` [T, d] after the last layer, and the taps asked for, {layer: [T, d]}.

    Whoever needs them beyond the step copies them: the next one may write over them.
    """

    x: Tensor
    count: int  # T, which is slow to ask of a tensor
    taps: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, index: list[int]) -> Tensor:
        """Rows of `x` -> [n, d]; not a copy if they are all of them in order."""
        if len(index) == self.count and (self.count == 1 or index == list(range(self.count))):
            return self.x
        return self.x[torch.tensor(index, device=self.x.device)]


@dataclass(slots=True)
class Outcome:
    """What became of a span: its rows to keep in the KV (the first `keep`, or a path), and the tokens to emit."""

    keep: int | list[int]
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0

    @property
    def kept(self) -> int:
        return self.keep if isinstance(self.keep, int) else len(self.keep)


class Decode(Protocol):
    """decode: which rows does a request bring, and what is made of the result?

    A method whose rows see later rows of their own block has an attribute `unit: int`, the rows of a block.
    """

    def rows(self, request: Request) -> int:
        """Rows the request would like to bring to the next step (at least 1)."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        """One span per request, of at most its budget of rows (a method with a smallest unit may exceed it by one)."""
        ...

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        """One outcome per span. Pure as to the engine: it changes neither KV nor the request's tokens."""
        ...


class Attend(Protocol):
    """attend: what may one query row read? Pages stay untouched.

    A method that always reads exactly everything visible may say so in an attribute `everything = True`; whole steps
    may then run without it. If it also has `commons(spans) -> Sequence[Common]`, these read what it lists once for all.
    """

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        """One output [R, hq, D] per read; a row's result depends on that row and its committed prefix alone."""
        ...


class Evict(Protocol):
    """evict: which cached rows are given up for good?"""

    observes: int  # how many of the last prompt rows it must see the queries of (they are never taken from a prefix)

    def observe(self, read: Read) -> None:
        """Called for every read while the method is attached; may keep queries in the request's drawer.

        A step that failed is tried again, so the same rows may come twice: tell them by their positions.
        """
        ...

    def view(self, read: Read) -> View | None:
        """What a row may still see before the rows are really dropped, so that a chunk equals single steps."""
        ...

    def due(self, request: Request) -> bool:
        """Whether `keep` has work to do for this request now (called after each commit)."""
        ...

    def keep(self, request: Request, layer: int) -> Tensor | Sequence[Tensor] | None:
        """Slots of the committed rows to keep, increasing: [K], [H, K] or one per head; None = all."""
        ...


class Skip(Protocol):
    """skip: which layers run for a row?"""

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        """Local rows of the span that run this layer (int64 index, possibly empty); None = all. x [R, d]."""
        ...

    def unused(self, layers: int) -> Sequence[int]:
        """Layers no row of this phase ever runs: their KV is freed when a request enters the phase."""
        ...


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a generation, as a value: a bound method per verb. None = the plain way, at no cost."""

    name: str
    decode: Decode
    attend: Attend
    evict: Evict | None = None
    skip: Skip | None = None
    plain: bool = field(init=False)  # rows run through all layers, read all before them, and show nobody anything

    def __post_init__(self) -> None:
        dense = getattr(self.attend, "everything", False)
        object.__setattr__(self, "plain", self.skip is None and self.evict is None and dense)


@dataclass(slots=True)
class Host:
    """What a method may ask for when it is bound to an engine."""

    model: Model
    sample: Sample
    counters: Counters
    load: Callable[[str], Model]  # a second model, by name or path
    companion: Callable[[str, Model], Companion]  # a second model that follows requests with KV of its own
    taps: set[int] = field(default_factory=set)  # layers whose output the bound methods want to see

    def bind(self, method: Any) -> Any:
        """The runtime of a method: `method.bind(host)` if it has one, else the method itself."""
        return method.bind(self) if hasattr(method, "bind") else method
