"""What the rows of a span may read, as one value.

An attend and an evict method each say it for a span (`plan`); `merge` makes one plan of the two. `step/reference.py`
executes any plan in torch, `step/lower.py` turns it into what the kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.ops.native.weighed import Weighs
    from phasewise.step.choice import Choice
    from phasewise.step.read import Read, View
    from phasewise.step.span import Span


@dataclass(frozen=True, slots=True)
class Full:
    """A row reads everything that it sees."""


@dataclass(frozen=True, eq=False, slots=True)
class Custom:
    """A function is asked between a layer's queries and its attention.

    `attend(reads)` returns one output [R, hq, D] per read, or None for attention over everything visible. A row's
    output depends on that row and its committed prefix alone; queries are overwritten after the call. `choice` says the
    same as data, for single rows over a plain cache.
    """

    attend: Callable[[Sequence[Read]], Sequence[Tensor | None]]
    choice: Choice | None = None


Keys = Full | Custom
FULL = Full()


@dataclass(frozen=True, slots=True)
class Window:
    """An attention window: a row sees the first `sinks` positions and the last `size`, its own included.

    With a `stride`, a row also sees every stride-th block of `block` positions, counted from the first. `rebased`: a
    row that has lost positions between the two reads the sinks as if it stood at position sinks + size - 1, so that
    they lie right before its window. `heads` says by layer which KV heads have the window; the others see everything,
    and none is rebased. Without `prompts`, rows of a prompt see everything.
    """

    sinks: int
    size: int
    stride: int = 0  # 0: no blocks
    block: int = 1
    rebased: bool = False
    heads: tuple[tuple[bool, ...], ...] | None = None
    prompts: bool = True

    @property
    def rows(self) -> int:
        """As many rows are seen whole, however they lie."""
        return self.sinks + self.size

    def hides(self, span: Span) -> bool:
        """Whether some row of the span does not see all rows before it."""
        return span.last >= max(self.rows, 0 if self.prompts else span.request.prompt_len)

    def seen(self, at: Tensor, rows: Tensor) -> Tensor:
        """Whether the position `at` sees that of `rows`, which is not behind it; bool, broadcast."""
        return self.stays(rows) | (rows > at - self.size)

    def stays(self, rows: Tensor) -> Tensor:
        """Whether these positions are seen from anywhere."""
        stays = rows < self.sinks
        return stays | (rows // self.block % self.stride == 0) if self.stride else stays

    def staying(self, position: int) -> int:
        """The first position from this one on that is seen from anywhere; for a window with a stride."""
        apart = self.block * self.stride
        here = position < self.sinks or position % apart < self.block
        return position if here else -(-position // apart) * apart


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """Attention weights that an evict method takes as rows are read.

    `take(read)` is called for each layer, once the queries are known; it may compute weights (`step/probe.py`) and
    returns what the rows still see, or None for everything. The same rows may come twice if a step is tried again.
    `weigh(span)` prepares the weights of a span's last row for a native step, which then computes them on its way
    (`ops/native/weighed.py`); None: this span has to be taken layer by layer.
    """

    take: Callable[[Read], View | None]
    weigh: Callable[[Span], Weighs | None] | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompt blocks that at least `sharers` requests hold in common are read once for all, in levels of at least `rows`
    rows (`step/shared.py`)."""

    sharers: int
    rows: int


@dataclass(frozen=True, eq=False, slots=True)
class AttentionPlan:
    """What the rows of a span may read in every layer.

    `window` limits what they see at all, and `keys` says which of it they read. `bias` float32 [layers, Hq] is added to
    the score of position 0, after scale and softcap. Heads that gave that position up and rows that do not see it are
    left as they are.
    """

    keys: Keys = FULL
    window: Window | None = None
    bias: Tensor | None = None
    record: Record | None = None
    shared: SharedPrefix | None = None

    @property
    def reads_all(self) -> bool:
        """Whether rows read everything they see, with the scores that they have."""
        return self.keys is FULL and self.bias is None

    @property
    def acts_by_layer(self) -> bool:
        """Whether it does anything that differs from layer to layer, or has to be known inside one."""
        return (
            not self.reads_all or self.record is not None or (self.window is not None and self.window.heads is not None)
        )


EVERYTHING = AttentionPlan()
"""Rows read everything before them."""


@lru_cache(maxsize=256)
def merge(attend: AttentionPlan, evict: AttentionPlan) -> AttentionPlan:
    """The plan of both methods. Raises ValueError if both say something about the same."""
    if evict is EVERYTHING:
        return attend
    if attend is EVERYTHING:
        return evict
    if attend.keys is not FULL and evict.keys is not FULL:
        raise ValueError("two methods choose what rows read: leave one of them out")
    for name in ("window", "bias", "record", "shared"):
        if getattr(attend, name) is not None and getattr(evict, name) is not None:
            raise ValueError(f"two methods give the {name} of what rows read: leave one of them out")
    return AttentionPlan(
        keys=evict.keys if attend.keys is FULL else attend.keys,
        window=attend.window or evict.window,
        bias=evict.bias if attend.bias is None else attend.bias,
        record=attend.record or evict.record,
        shared=attend.shared or evict.shared,
    )
