"""Attention plans: one value says what the rows of a span may read.

An attend and an evict method each say it for a span (`plan`); `merge` makes one plan of the two. `step/reference.py`
executes any plan in torch, `step/lower.py` turns it into what the kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.kv.vectors import Standing
    from phasewise.ops.native.weighed import Weighs
    from phasewise.step.read import Read, View
    from phasewise.step.span import Span


@dataclass(frozen=True, slots=True)
class Full:
    """A row reads everything that it sees."""


@dataclass(frozen=True, eq=False, slots=True)
class Custom:
    """A function is asked between a layer's queries and its attention.

    `attend(reads)` returns one output [R, hq, D] per read, or None for attention over everything visible. A row's
    output depends on that row and its committed prefix alone; queries are overwritten after the call.
    """

    attend: Callable[[Sequence[Read]], Sequence[Tensor | None]]


@dataclass(frozen=True, eq=False, slots=True)
class NamedSlots:
    """A row reads the slots that a function names between a layer's queries and its attention.

    `of(reads)` returns for each read int32 [h, 1, S], the slots of a single row that sees all before it; bool [1 | h,
    R, N], what any rows read of what they see; or None for all of that. What is named for a row depends on that row and
    its committed prefix alone; queries are overwritten later. `given(span)` says what a single row over a plain cache
    reads in all layers, where that is known beforehand: then nobody is asked.
    """

    of: Callable[[Sequence[Read]], Sequence[Tensor | None]]
    given: Callable[[Span], ChosenSlots | None] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class AmongTokens:
    """The rows of a whole prompt read some of its tokens, which a function names layer by layer, the same for all
    heads.

    `of(read)` returns their slots, increasing int64 [p], or None: rows read all that they see. With `all_rows` every
    row reads those of them that it sees; else the other tokens' rows read nothing. A row that reads nothing passes the
    attention by.
    """

    of: Callable[[Read], Tensor | None]
    all_rows: bool = False


class ChosenSlots(NamedTuple):
    """The slots that a single row reads: in each layer `lists` int32 [H, K] (-1: none), and all from slot `own` on.
    `heard` gets the row's queries in all layers, bfloat16 [layers, Hq, D], after the step."""

    lists: Sequence[Tensor]
    own: int
    heard: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """A row reads the blocks of `block` positions that `of(its own block)` lists, increasing, its own last."""

    block: int
    of: Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class LayerPicks:
    """Layers before the first of `picking` read everything. So do these, and pick for every KV head the `k` rows before
    the own one with the largest weight over the query heads that share it; a layer behind reads what was picked last,
    and the own row.

    Rows at positions below `since` read everything. `weights(read)` [h, R, N] takes the place of the logarithm of the
    largest weight.
    """

    k: int
    picking: tuple[int, ...]
    since: int
    weights: Callable[[Read], Tensor] | None = None


class Scores(NamedTuple):
    """Scores of the units that a row may choose, [1 | h, R, units]. Of several units of the same score the earlier is
    read.

    With approximate attention `weights` [h, G, R, N], what is read counts for the share of weight that it has, and
    `mean` [h, R, D] stands for the rest.
    """

    units: Tensor
    weights: Tensor | None = None
    mean: Tensor | None = None


class Scorer(Protocol):
    """Ranks what rows may read, by something that stands for their keys and lies beside them (the index)."""

    @property
    def kernel(self) -> KernelScores | None:
        """The same scores as kernels compute them for a single row; None: they do not."""
        ...

    def index(self, read: Read) -> Any:
        """The index of the read's committed rows, up to date; what is read to make it is counted."""
        ...

    def scores(self, read: Read, index: Any, rows: Rivals) -> Scores:
        """The scores with which every row of the read ranks the units. What is read of index and keys is counted."""
        ...


class Rivals(NamedTuple):
    """The N slots of a part as R query rows meet them, bool [1 | h, R, N] each: those `seen`, those read in any case,
    and the `rivals` among the others. `single`: it is one row that sees all before it, none missing, and has so many
    rivals; 0: it is not. `unit` int64 [1 | h, N]
    is the unit of each slot, and `number` int32 [1 | h, R, units] how many rivals each has; None: a unit is a slot."""

    seen: Tensor
    must: Tensor
    rivals: Tensor
    single: int
    unit: Tensor | None = None
    number: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TopK:
    """Top-k KV selection: a row reads the units of the highest score beside those that it reads in any case.

    A unit is a page of `unit` positions. The first `first` units and the last `local` ones, the row's own among them,
    are read in any case, and so are rows that a window has re-based. Of the others a row reads `units` units, or, if
    that is None, as many as fit into `most` rows in all (up to 1: a share of the rows that it sees). Rows that see
    fewer than `least` rows, and the first `dense_layers` layers, read everything.

    `fetch`: single rows are fetched, and counted, in groups of so many slots. `chose(rows, layers, heads)` is told
    how many rows have chosen, in so many layers and (layer, KV head) pairs.
    """

    scorer: Scorer
    most: float
    least: int
    unit: int = 1
    first: int = 0
    local: int = 1
    units: int | None = None
    dense_layers: int = 0
    fetch: int = 0
    chose: Callable[[int, int, int], None] | None = None

    def rows(self, seen: int) -> int:
        """The number of rows that are read of so many seen ones, where units are no bound."""
        return share(self.most, seen)

    def between(self, n: int) -> int:
        """The number of units among which the row at slot n - 1 may choose, if slots are positions."""
        return (n - 1) // self.unit - self.local + 1 - self.first

    def chosen(self, n: int) -> int:
        """The number of these that it reads."""
        units = self.between(n)
        return (self.rows(n) - n + units * self.unit) // self.unit if self.units is None else self.units


@dataclass(frozen=True, eq=False)
class KernelScores:
    """The rule by which kernels score the units of a single row (`ops/native/choice.py`), with vectors beside the rows.

    `key` names the index, of which `empty(keys)` is one for no rows of keys [h, 0, D]. n committed rows have
    `vectors(n)` vectors. `softmax`: a unit's score is its share of the softmax over vectors, summed over the query
    heads that share a KV head, or over all heads if `joint`; else the largest product or upper bound. The softmax runs
    over the units that may be chosen, or over `every` vector. Unit u has the vectors from u * each - before to
    (u + 1) * each; a vector is made of `parts` times `step` rows, or by `make(layer, keys, start)` of the keys
    [H, m, D] from slot `start` on.

    `width`: numbers of a vector, 0 as many as a key has; of these `largest` are looked at, those where the query is
    largest, if that is not 0. `channels`: which numbers of a key a vector is, int32 [H, width] by layer.
    `turned(layer, position)`: cos and signed sin float32 [2, R] that turn the query first. `scaled`: products are
    multiplied with the layer's scale of scores.
    """

    key: Hashable
    softmax: bool = True
    joint: bool = False
    every: bool = False
    each: int = 1
    before: int = 0
    step: int = 1
    parts: int = 1
    width: int = 0
    largest: int = 0
    scaled: bool = True
    vectors: Callable[[int], int] = int
    empty: Callable[[Tensor], Standing] | None = None
    channels: Sequence[Tensor] | None = None
    make: Callable[[int, Tensor, int], Tensor] | None = None
    turned: Callable[[int, int], Tensor | None] | None = None


Keys = Full | TopK | ReadBlocks | LayerPicks | NamedSlots | AmongTokens | Custom
FULL = Full()


def share(value: float, whole: int) -> int:
    """Up to 1 a share of `whole`, rounded up, above a number; within 1 and `whole`."""
    return max(1, min(whole, -int(-value * whole // 1) if value <= 1 else int(value)))


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
        """The number of rows that a row sees for certain, however they lie: sinks and window."""
        return self.sinks + self.size

    def hides(self, span: Span) -> bool:
        """True if some row of the span does not see all rows before it."""
        return span.last >= self.hides_from(span)

    def hides_from(self, span: Span) -> int:
        """The first position of the span's request whose row does not see all rows before it."""
        return max(self.rows, 0 if self.prompts else span.request.prompt_len)

    def seen(self, at: Tensor, rows: Tensor) -> Tensor:
        """True where the position `at` sees that of `rows`, which is not behind it; bool, broadcast."""
        return self.stays(rows) | (rows > at - self.size)

    def stays(self, rows: Tensor) -> Tensor:
        """True for positions that are seen from anywhere."""
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
    """A plan says what the rows of a span may read in every layer.

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
        """True if rows read everything they see, with the scores that they have."""
        return self.keys is FULL and self.bias is None

    @property
    def acts_by_layer(self) -> bool:
        """True if it does anything that differs from layer to layer, or has to be known inside one."""
        return (
            not self.reads_all or self.record is not None or (self.window is not None and self.window.heads is not None)
        )


EVERYTHING = AttentionPlan()
"""Rows read everything before them."""


@lru_cache(maxsize=256)
def merge(attend: AttentionPlan, evict: AttentionPlan) -> AttentionPlan:
    """The plan of both methods. Raises ValueError if both say something about the same."""
    if evict is EVERYTHING or evict is attend:
        return attend
    if attend is EVERYTHING:
        return evict
    if attend.keys is not FULL and evict.keys is not FULL:
        raise ValueError("two methods choose what rows read: leave one of them out")
    given: dict[str, tuple[object, object]] = {
        "window": (attend.window, evict.window), "bias": (attend.bias, evict.bias),
        "record": (attend.record, evict.record), "shared": (attend.shared, evict.shared),
    }  # fmt: skip
    for name, (one, other) in given.items():
        if one is not None and other is not None:
            raise ValueError(f"two methods give the {name} of what rows read: leave one of them out")
    return AttentionPlan(
        keys=evict.keys if attend.keys is FULL else attend.keys,
        window=attend.window or evict.window,
        bias=evict.bias if attend.bias is None else attend.bias,
        record=attend.record or evict.record,
        shared=attend.shared or evict.shared,
    )
